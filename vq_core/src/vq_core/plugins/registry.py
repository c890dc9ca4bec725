"""The methods of this process, and lookup by name."""

from __future__ import annotations

import difflib
import importlib
import threading

import attrs

from vq_core.api.settings import canonical_name, parse_choice
from vq_core.errors import PluginError, SettingsError
from vq_core.plugins.loader import DISABLE, load_all
from vq_core.plugins.records import MethodRecord

FIRST_PARTY = {"kivi": "vq-kivi", "turboquant": "vq-turboquant", "qjl": "vq-qjl", "vecinfer": "vq-vecinfer"}
"""Where to get the methods of this repository; an install hint, the core imports none of them."""

_lock = threading.RLock()
_records: list[MethodRecord] | None = None
_added: list[MethodRecord] = []
_loading = False


def list_methods(refresh: bool = False) -> list[MethodRecord]:
    """Every method that an installed distribution offers, usable or not, sorted by name.

    Plugins are loaded once per process.

    Args:
        refresh: Look again, for methods installed since.

    Raises:
        PluginError: only when called by a plugin while it is being loaded.
    """
    global _records, _loading
    with _lock:
        if _loading:
            raise PluginError("list_methods was called while methods are being loaded: a plugin asks at its import")
        if _records is None or refresh:
            _loading = True
            try:
                if refresh:
                    importlib.invalidate_caches()
                _records = load_all()
            finally:
                _loading = False
        return sorted([*_records, *_added], key=lambda record: (record.name, record.distribution))


def add_record(record: MethodRecord) -> None:
    """Make a method usable that no installed distribution offers; what :mod:`vq_core.testing` is built on.

    Raises:
        SettingsError: where the name is taken.
    """
    with _lock:
        taken = next((known for known in list_methods() if known.name == record.name), None)
        if taken is not None:
            raise SettingsError(
                f"a method called {record.name!r} is there already, from {taken.distribution} {taken.version}: "
                f"register this one under another name"
            )
        _added.append(record)


def remove_record(record: MethodRecord) -> None:
    """Undo :func:`add_record`."""
    with _lock:
        _added[:] = [known for known in _added if known is not record]


def find(label: str) -> list[MethodRecord]:
    """Records that a label means, usable or not; more than one where distributions share the name.

    Raises:
        SettingsError: where no installed distribution offers such a method, naming what is installed, the near
            miss, and the pip line where one is known.
    """
    choice = parse_choice(label)
    if choice.options:
        raise SettingsError(f"a method's name was expected, without settings, got {label!r}")
    records = list_methods()
    named = [record for record in records if record.name == choice.name]
    if choice.distribution is not None:
        wanted = canonical_name(choice.distribution)
        chosen = [record for record in named if canonical_name(record.distribution) == wanted]
        if named and not chosen:
            labels = ", ".join(record.label for record in named)
            raise SettingsError(
                f"distribution {choice.distribution!r} offers no method {choice.name!r}; installed: {labels}"
            )
        named = chosen
    if not named:
        hint = ""
        if choice.distribution and canonical_name(choice.distribution) in {record.name for record in records}:
            hint = f". Settings are written {choice.distribution}:{choice.name}=VALUE"
        raise SettingsError(_unknown(label, choice.name, records) + hint)
    return named


def resolve(label: str) -> MethodRecord:
    """The usable method that ``name`` or ``distribution:name`` means.

    Raises:
        SettingsError: for a name that is not installed, or that two distributions offer and none was chosen.
        PluginError: for a method that is installed and cannot be used; the message has the reason.
    """
    records = find(label)
    if len(records) > 1:
        switched_on = [record for record in records if record.status != "disabled"]
        if len(switched_on) > 1:
            shadowed = next((record for record in switched_on if record.status == "shadowed"), switched_on[0])
            raise SettingsError(f"method {label!r} is ambiguous: {shadowed.reason}")
        records = switched_on or records
    record = records[0]
    if record.status == "shadowed":
        # Its distribution was named, so it has been chosen.
        return attrs.evolve(record, status="ok", reason="")
    if record.status == "ok":
        return record
    if record.status == "disabled":
        raise PluginError(f"method {label!r} of {record.distribution} is {record.reason}; take it out of {DISABLE}")
    raise PluginError(
        f"method {label!r} of {record.distribution} {record.version} is {record.status}: {record.reason}; "
        f"`vq doctor {record.name}` shows more"
    )


def _unknown(label: str, name: str, records: list[MethodRecord]) -> str:
    installed = sorted({record.name for record in records})
    message = f"unknown method {label!r}; installed: {', '.join(installed) or 'none'}"
    if name in FIRST_PARTY:
        return f"{message}. It is in a package of its own: pip install {FIRST_PARTY[name]}"
    # Compared without '_' as well: `ki-vi` is a likelier slip for `kivi` than its spelling ratio says.
    known = {known.replace("_", ""): known for known in (*FIRST_PARTY, *installed)}
    near = difflib.get_close_matches(name.replace("_", ""), known, n=1)
    if near:
        guess = known[near[0]]
        message += f". Did you mean {guess!r}?"
        if guess not in installed:
            message += f" It is not installed: pip install {FIRST_PARTY[guess]}"
    elif not installed:
        message += f". Methods come as packages, for example: pip install {FIRST_PARTY['kivi']}"
    return message
