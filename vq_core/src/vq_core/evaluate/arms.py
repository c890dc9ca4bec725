"""Which methods are evaluated, with which settings and in which pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from vq_core.api.facts import SIDES, Side
from vq_core.api.settings import build_settings, format_choice, format_value, parse_choice
from vq_core.errors import SettingsError, VQError
from vq_core.plugins.choice import choose
from vq_core.plugins.records import MethodRecord
from vq_core.plugins.registry import list_methods, resolve

ALL = "all"
"""In place of a method: every installed one at every width."""
PARTNER = "kivi:bits=2"
"""Method of the other side, of methods that hold one side only."""


@attrs.frozen
class Candidate:
    """A method with settings.

    Attributes:
        text: Text form, with the settings that differ from the defaults.
        name: The method's name, without settings.
        sides: The sides that it holds.
        asked: Whether it was asked for by name; one that was not and refuses is left out, with the reason.
    """

    text: str
    name: str
    sides: tuple[Side, ...]
    asked: bool


@attrs.frozen
class Pair:
    """Methods of both sides.

    Attributes:
        keys, values: Text forms.
        family: Pairs that differ in bits only; ``""`` for a mixed pair, which has no such.
        asked: See :class:`Candidate`.
    """

    keys: str
    values: str
    family: str
    asked: bool

    @property
    def name(self) -> str:
        """For tables and records."""
        return self.keys if self.keys == self.values else f"{self.keys} + {self.values}"


def candidates(methods: Sequence[str] = ()) -> tuple[list[Candidate], list[dict[str, str]]]:
    """The methods asked for, ``all`` replaced by every installed one at every width, each once.

    Args:
        methods: Text forms, or ``all``; by default all.

    Returns:
        Candidates, and what is installed but cannot be used, with the reason.

    Raises:
        SettingsError, PluginError: a method that was asked for is unknown, refuses its settings or cannot be used.
    """
    found: dict[tuple[str, str], Candidate] = {}
    left_out: list[dict[str, str]] = []
    for text in methods or (ALL,):
        if text.strip().lower() != ALL:
            _add(found, text, asked=True)
            continue
        for record in list_methods():
            if record.status != "ok":
                left_out.append({"arm": record.name, "reason": record.reason or record.status})
                continue
            for one in widths(record):
                try:
                    _add(found, one, asked=False)
                except VQError as error:
                    left_out.append({"arm": one, "reason": str(error)})
    if not found:
        raise SettingsError(
            "no method to evaluate: none is installed that can be used; `vq list-methods` says why, or for example "
            "pip install vq-kivi"
        )
    return list(found.values()), left_out


def _add(found: dict[tuple[str, str], Candidate], text: str, asked: bool) -> None:
    label = parse_choice(text).label
    facts = resolve(label).facts
    assert facts is not None
    settings = choose(text, facts.sides[0]).settings
    made = Candidate(_short(label, settings), facts.name, facts.sides, asked)
    found.setdefault((label, format_choice(label, settings)), made)


def _short(label: str, settings: Any) -> str:
    """The text form without what has its default, but for the bits, which are always told."""
    plain = type(settings)()
    same = {f.name for f in attrs.fields(type(settings)) if getattr(settings, f.name) == getattr(plain, f.name)}
    options = format_choice("", settings).removeprefix(":").split(",")
    kept = [one for one in options if (key := one.partition("=")[0]) and (key not in same or key == "bits")]
    return f"{label}:{','.join(kept)}" if kept else label


def widths(record: MethodRecord) -> list[str]:
    """Text forms of a usable method: the settings that it names as verified, and every value of a setting ``bits``.

    A method that has neither is evaluated at its defaults.
    """
    assert record.facts is not None
    kind = record.facts.settings
    texts = [f"{record.name}:{settings}" for settings in record.facts.verified if settings]
    bits = next((field for field in attrs.fields(kind) if field.name == "bits"), None)
    if bits is not None:
        known = [build_settings(record.name, kind, parse_choice(text).options).bits for text in texts]
        choices: Iterable[Any] = bits.metadata.get("choices") or ()
        texts += [f"{record.name}:bits={format_value(value)}" for value in choices if value not in known]
    return texts or [record.name]


def pairs(
    methods: Sequence[str] = (), keys: Sequence[str] = (), values: Sequence[str] = (), partner: str = PARTNER,
    mixed: bool = True,
) -> tuple[list[Pair], list[dict[str, str]]]:  # fmt: skip
    """Pairs of methods: each on both sides, those asked for, and by default one mixed pair for each method of keys.

    Args:
        methods: See :func:`candidates`; a method of one side is paired with ``partner``.
        keys, values: Methods of the two sides, the first with the first and so on.
        partner: A method of the other side.
        mixed: Whether ``all`` has mixed pairs: each method of keys with the next method, in the order of names, that
            holds values, both as asked for or at their defaults.

    Raises:
        SettingsError, PluginError: as :func:`candidates`; unequal counts of ``keys`` and ``values``.
    """
    if len(keys) != len(values):
        raise SettingsError(
            f"{len(keys)} methods of keys and {len(values)} of values: give as many --keys as --values, the first of "
            "one goes with the first of the other"
        )
    found: list[Pair] = []
    left_out: list[dict[str, str]] = []
    if methods or not keys:
        singles, left_out = candidates(methods)
        found = [_single(one, partner) for one in singles]
        if mixed and (not methods or ALL in methods):
            found += _mixed(singles)
    for both in zip(keys, values, strict=True):
        texts = [_short(parse_choice(text).label, choose(text, side).settings)
                 for text, side in zip(both, SIDES, strict=True)]  # fmt: skip
        found.append(Pair(texts[0], texts[1], "", True))
    once: dict[tuple[str, str], Pair] = {}
    for pair in found:
        once.setdefault((pair.keys, pair.values), pair)
    return list(once.values()), left_out


def paired(text: str, partner: str = PARTNER) -> tuple[str, tuple[str, str]]:
    """A method for both sides, or with ``partner`` on the side that it does not hold: a name, keys and values.

    Raises:
        SettingsError, PluginError: as :func:`candidates`.
    """
    sides = candidates((text,))[0][0].sides
    if set(sides) == set(SIDES):
        return text, (text, text)
    keys, values = (text, partner) if sides[0] == "keys" else (partner, text)
    return f"{keys} + {values}", (keys, values)


def _single(one: Candidate, partner: str) -> Pair:
    if set(one.sides) == set(SIDES):
        return Pair(one.text, one.text, one.name, one.asked)
    other: Side = "values" if one.sides[0] == "keys" else "keys"
    text = _short(parse_choice(partner).label, choose(partner, other).settings)
    keys, values = (one.text, text) if other == "values" else (text, one.text)
    return Pair(keys, values, f"{one.name} with {text} for the {other}", one.asked)


def _mixed(among: Sequence[Candidate]) -> list[Pair]:
    """Methods as they were asked for, the others at their defaults."""
    first: dict[str, Candidate] = {}
    for one in sorted(among, key=lambda one: not one.asked):
        label = parse_choice(one.text).label
        facts = resolve(label).facts
        assert facts is not None
        plain = attrs.evolve(one, text=_short(label, facts.settings()))
        first.setdefault(one.name, one if one.asked else plain)
    names = sorted(first)
    found = []
    for at, name in enumerate(names):
        after = [first[other] for other in names[at + 1 :] + names[:at] if "values" in first[other].sides]
        if "keys" in first[name].sides and after:
            found.append(Pair(first[name].text, after[0].text, "", False))
    return found


def by_bits(
    rows: Iterable[dict[str, Any]], family: str, bits: Callable[[dict[str, Any]], float]
) -> list[dict[str, Any]]:
    """Rows of one family together, where its first was, by bits."""
    rows = list(rows)
    place = {name: at for at, name in reversed(list(enumerate(row[family] for row in rows)))}
    return sorted(rows, key=lambda row: (place[row[family]], bits(row)))


def order_of(rows: Sequence[tuple[str, str, float, float]]) -> list[dict[str, Any]]:
    """Whether KL falls as bits rise, family by family; families of one width are not told.

    Args:
        rows: (family, name, bits of a number, KL); those of the family ``""`` are left out.

    Returns:
        For each family ``ordered`` and ``inversions``, in words.
    """
    told = []
    for family in dict.fromkeys(row[0] for row in rows if row[0]):
        own = sorted((row for row in rows if row[0] == family), key=lambda row: row[2])
        wrong = [
            f"{a[1]} ({a[2]:.4g} bits) has KL {a[3]:.3g}, {b[1]} ({b[2]:.4g} bits) {b[3]:.3g}"
            for at, a in enumerate(own) for b in own[at + 1 :] if b[2] > a[2] and not b[3] < a[3]
        ]  # fmt: skip
        if own[0][2] < own[-1][2]:
            told.append({"family": family, "ordered": not wrong, "inversions": wrong})
    return told
