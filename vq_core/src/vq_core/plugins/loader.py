"""Discovery and loading, one entry point at a time.

pluggy's bulk loader stops at the first entry point that raises, keeps whichever of two equal names comes first
on the path, and lets ``SystemExit`` through.  Here every entry point of the group ``vq.methods`` is loaded in a
guard and a plugin manager of its own, and becomes one :class:`~vq_core.plugins.records.MethodRecord` whatever
happens.

Installed metadata is the only source.  A folder that merely can be imported is not a method: from this
repository's root an uninstalled ``vq_kivi`` imports as an empty namespace package.
"""

from __future__ import annotations

import os
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

import attrs
from pluggy import PluginManager

from vq_core import hookspecs
from vq_core.api.facts import API_VERSION, MethodFacts
from vq_core.api.settings import canonical_name
from vq_core.errors import PluginError
from vq_core.plugins.diagnose import explain
from vq_core.plugins.records import MethodRecord

GROUP = "vq.methods"
DISABLE = "VQ_DISABLE"
REQUIRED = ("vq_method", "vq_prepare", "vq_layout", "vq_encode", "vq_pack", "vq_decode")
BOUND = ("vq_start", "vq_encode", "vq_pack", "vq_decode", "vq_attend")
"""Hooks that a cache binds to plain functions; a wrapper around one would never run."""

_SPECIFIED = tuple(name for name in vars(hookspecs) if name.startswith("vq_"))
_NAME = re.compile(r"[a-z0-9_]+")


@attrs.frozen
class Offer:
    """An entry point together with the distribution that declares it."""

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint

    def record(self, **changes: Any) -> MethodRecord:
        """A record of this offer."""
        return MethodRecord(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            entry_point=self.entry_point.value,
            **changes,
        )


def load_all() -> list[MethodRecord]:
    """One record for each method that an installed distribution offers, sorted by name.

    Never raises because of a plugin; only ``KeyboardInterrupt`` passes.
    """
    disabled = disabled_names()
    offers, records = discover()
    by_name: dict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        if disabled & {offer.name, canonical_name(offer.distribution)}:
            records.append(offer.record(status="disabled", reason=_disabled_reason(offer)))
        else:
            by_name[offer.name].append(offer)
    for rivals in by_name.values():
        records += _settle([_load(offer) for offer in rivals])
    return sorted(records, key=lambda record: (record.name, record.distribution))


def disabled_names() -> set[str]:
    """Canonical names of methods and distributions that ``VQ_DISABLE`` switches off."""
    return {canonical_name(name) for name in os.environ.get(DISABLE, "").split(",") if name.strip()}


def discover() -> tuple[list[Offer], list[MethodRecord]]:
    """All offers of the group, and a broken record for each distribution whose metadata cannot be read."""
    offers: dict[tuple[str, str, str], Offer] = {}
    unreadable: list[MethodRecord] = []
    seen: set[str] = set()
    for distribution in distributions():
        name, version = "unknown", ""
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = distribution.metadata["Name"], distribution.version
            # One distribution can be on the path twice (lib64 is often a link to lib). The first is the one
            # that Python imports; further ones are the same thing again, or out of reach.
            if canonical_name(name) in seen:
                continue
            seen.add(canonical_name(name))
            for offer in _offers(distribution, name, version):
                offers.setdefault((offer.name, offer.distribution, offer.entry_point.value), offer)
        except Exception as error:  # not silent: damaged metadata of any kind becomes a record that is listed
            unreadable.append(
                MethodRecord(
                    name=canonical_name(name or "unknown"),
                    status="broken",
                    distribution=name or "unknown",
                    version=version or "",
                    entry_point="",
                    reason=f"its metadata cannot be read ({type(error).__name__}: {error}): reinstall it",
                    traceback=_text(error),
                )
            )
    return list(offers.values()), unreadable


def make_manager(plugin: Any, name: str) -> PluginManager:
    """A plugin manager with the hook specifications and exactly one method.

    Raises:
        pluggy.PluginValidationError: where a hook does not fit its specification.
    """
    manager = PluginManager("vq")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name)
    manager.check_pending()
    return manager


def check_hooks(plugin: Any, name: str) -> None:
    """Check a plugin's hooks against :mod:`vq_core.hookspecs`.

    Raises:
        PluginError: for a required hook that is missing, a hook without its marker, a wrapper where none is
            allowed.
        pluggy.PluginValidationError: for a hook of a wrong signature or one that no specification knows.
    """
    manager = make_manager(plugin, name)
    callers = {hook: getattr(manager.hook, hook).get_hookimpls() for hook in _SPECIFIED}
    for hook, found in callers.items():
        if not found and callable(getattr(plugin, hook, None)):
            raise PluginError(f"{hook} is defined but not marked: put @vq_core.api.hookimpl on it")
    missing = [hook for hook in REQUIRED if not callers[hook]]
    if missing:
        raise PluginError(f"required hooks are missing: {', '.join(missing)}; see vq_core.hookspecs")
    for hook in BOUND:
        if any(impl.wrapper or impl.hookwrapper for impl in callers[hook]):
            raise PluginError(f"{hook} is a wrapper, which would never run: caches bind this hook to a plain function")


def _offers(distribution: Distribution, name: str, version: str) -> Iterator[Offer]:
    for entry_point in distribution.entry_points:
        if entry_point.group == GROUP:
            yield Offer(canonical_name(entry_point.name), name, version, entry_point)


def _load(offer: Offer) -> MethodRecord:
    facts: MethodFacts | None = None
    try:
        plugin = _import(offer)
        facts = _facts(plugin, offer)
        if facts.api_version != API_VERSION:
            return offer.record(
                status="incompatible",
                reason=_incompatible_reason(facts, offer),
                api_version=facts.api_version,
                facts=facts,
            )
        check_hooks(plugin, offer.name)
    except (Exception, SystemExit) as error:
        # The one place where everything is caught: a plugin runs code of its own here and may raise anything,
        # and whatever it is ends in the record, with its traceback, which every listing shows. SystemExit is a
        # plugin's sys.exit() at import; KeyboardInterrupt is the user's and passes.
        module = offer.entry_point.value.partition(":")[0].strip()
        return offer.record(
            status="broken",
            reason=explain(error, module=module, distribution=offer.distribution),
            traceback=_text(error),
            api_version=facts.api_version if facts else None,
            facts=facts,
        )
    return offer.record(status="ok", api_version=facts.api_version, facts=facts, plugin=plugin)


def _import(offer: Offer) -> Any:
    entry_point = offer.entry_point
    if not _NAME.fullmatch(offer.name):
        raise PluginError(f"the entry point's name {entry_point.name!r} is not made of letters, digits and '_'")
    if not entry_point.pattern.match(entry_point.value):
        raise PluginError(f"the entry point's value {entry_point.value!r} is neither 'module' nor 'module:object'")
    plugin = entry_point.load()
    if isinstance(plugin, type):
        raise PluginError(f"{entry_point.value} is a class: an entry point names a module or an instance")
    return plugin


def _facts(plugin: Any, offer: Offer) -> MethodFacts:
    # Asked before the specifications are added: a method written for another API version should be listed as
    # incompatible, not as one whose signatures are wrong.
    manager = PluginManager("vq")
    manager.register(plugin, offer.name)
    caller = getattr(manager.hook, "vq_method", None)
    if caller is None:
        check_hooks(plugin, offer.name)
        raise PluginError("required hooks are missing: vq_method")
    facts = next(iter(caller()), None)
    if not isinstance(facts, MethodFacts):
        raise PluginError(f"vq_method must return a vq_core.api.MethodFacts, got {type(facts).__name__}")
    if canonical_name(facts.name) != offer.name:
        raise PluginError(
            f"the entry point is called {offer.entry_point.name!r} but {offer.entry_point.value} calls its method "
            f"{facts.name!r}: names must agree, and each method needs an entry point and a module or object of its own"
        )
    return facts


def _settle(rivals: list[MethodRecord]) -> list[MethodRecord]:
    """Records of one name: with several, none wins."""
    if len(rivals) == 1:
        return rivals
    owners = sorted({record.distribution for record in rivals})
    if len(owners) == 1:
        values = " and ".join(sorted(record.entry_point for record in rivals))
        reason = f"{owners[0]} offers the name {rivals[0].name!r} more than once ({values}): only its author can choose"
        return [attrs.evolve(record, status="broken", reason=reason, plugin=None) for record in rivals]
    return [_shadow(record, rivals) for record in rivals]


def _shadow(record: MethodRecord, rivals: Iterable[MethodRecord]) -> MethodRecord:
    labels = sorted({rival.label for rival in rivals})
    owners = " and ".join(sorted({f"{rival.distribution} {rival.version}" for rival in rivals}))
    reason = (
        f"{owners} each offer {record.name!r}: choose with {' or '.join(labels)}, "
        f"uninstall one, or name one in {DISABLE}"
    )
    if record.status == "ok":
        return attrs.evolve(record, status="shadowed", reason=reason)
    return attrs.evolve(record, reason=f"{record.reason}; also {reason}")


def _incompatible_reason(facts: MethodFacts, offer: Offer) -> str:
    older = facts.api_version < API_VERSION
    way_out = f"pip install --upgrade {offer.distribution if older else 'vq-core'}"
    return f"written for API version {facts.api_version}, this vq-core has API version {API_VERSION}: {way_out}"


def _disabled_reason(offer: Offer) -> str:
    return f"switched off by {DISABLE}={os.environ.get(DISABLE, '')}; not imported"


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
