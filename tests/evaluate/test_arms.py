"""Which methods are evaluated, and whether KL falls as bits rise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vq_core.errors import SettingsError
from vq_core.evaluate.arms import Pair, by_bits, candidates, order_of, pairs, widths
from vq_core.plugins.registry import list_methods, resolve
from vq_core.testing.registering import load_plugin, registered

METHODS = Path(__file__).parent.parent / "methods"
KIVI = ["kivi:bits=2", "kivi:bits=3", "kivi:bits=4", "kivi:bits=8"]


@pytest.fixture
def keys_only() -> Iterator[None]:
    with registered(load_plugin(METHODS / "sign_sketch.py")):
        yield


def test_every_width_of_every_installed_method() -> None:
    """The settings that a method names, every value of its setting `bits`, or its defaults."""
    assert widths(resolve("kivi")) == KIVI
    assert widths(resolve("example")) == [f"example:bits={bits}" for bits in (1, 2, 3, 4)]
    found, left_out = candidates()
    assert {one.name for one in found} | {one["arm"].partition(":")[0] for one in left_out} == {
        record.name for record in list_methods()
    }
    assert not any(one.asked for one in found) and all(one["reason"] for one in left_out)
    assert [one.text for one in found if one.name == "kivi"] == KIVI


def test_a_method_without_widths() -> None:
    with registered(load_plugin(METHODS / "identity.py")) as record:
        assert widths(record) == ["identity"]


def test_what_is_asked_for_comes_once() -> None:
    found, left_out = candidates(["kivi", "kivi:group_size=32,bits=2", "vq-kivi:kivi:bits=4", "kivi:group_size=64"])
    assert [one.text for one in found] == ["kivi:bits=2", "vq-kivi:kivi:bits=4", "kivi:bits=2,group_size=64"]
    assert all(one.asked for one in found) and left_out == []
    both, _ = candidates(["kivi:bits=4,group_size=128", "ALL"])
    assert [one.asked for one in both][:2] == [True, False]


@pytest.mark.parametrize(
    ("given", "said"), [("nothing", "unknown method"), ("kivi:bits=5", "bits"), ("kivi:depth=1", "no setting")]
)
def test_bad_methods(given: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        candidates([given])


def test_pairs(keys_only: None) -> None:
    found, _ = pairs(["sign_sketch:sketch=64", "kivi:bits=4"], ["kivi"], ["example"], partner="example:bits=3")
    assert found == [
        Pair("sign_sketch:sketch=64", "example:bits=3", "sign_sketch with example:bits=3 for the values", True),
        Pair("kivi:bits=4", "kivi:bits=4", "kivi", True),
        Pair("kivi:bits=2", "example:bits=4", "", True),
    ]
    assert [pair.name for pair in found] == [
        "sign_sketch:sketch=64 + example:bits=3", "kivi:bits=4", "kivi:bits=2 + example:bits=4",
    ]  # fmt: skip
    only, _ = pairs((), ["kivi"], ["kivi"])
    assert [pair.name for pair in only] == ["kivi:bits=2"]


def test_a_partner_must_hold_the_other_side(keys_only: None) -> None:
    with pytest.raises(SettingsError, match="can hold keys only"):
        pairs(["sign_sketch"], partner="sign_sketch")


def test_mixed_pairs(keys_only: None) -> None:
    """One for each method of keys, with the next that holds values; what was asked for comes as it was asked for."""
    found, _ = pairs(["example:bits=1", "all"])
    mixed = {pair.keys.partition(":")[0]: pair for pair in found if not pair.family}
    assert mixed["example"].keys == "example:bits=1" and mixed["kivi"].keys == "kivi:bits=2"
    assert mixed["sign_sketch"].keys == "sign_sketch"
    for name, pair in mixed.items():
        assert pair.values.partition(":")[0] not in (name, "sign_sketch") and not pair.asked
    assert not [pair for pair in pairs(["kivi", "example"])[0] if not pair.family]
    assert not [pair for pair in pairs(mixed=False)[0] if not pair.family]


@pytest.mark.parametrize(("keys", "values"), [(["kivi"], []), ([], ["kivi"]), (["kivi"], ["kivi", "example"])])
def test_unequal_sides(keys: list[str], values: list[str]) -> None:
    with pytest.raises(SettingsError, match="as many --keys as --values"):
        pairs((), keys, values)


def test_order() -> None:
    rows = [
        ("a", "a4", 4.0, 0.1), ("a", "a2", 2.0, 0.5), ("a", "a2b", 2.0, 0.6), ("a", "a3", 3.0, 0.2),
        ("b", "b2", 2.0, 0.1), ("b", "b4", 4.0, 0.3), ("b", "b3", 3.0, 0.1),
        ("c", "c2", 2.0, 0.1), ("c", "c2b", 2.0, 0.2), ("", "mixed", 1.0, 0.0),
    ]  # fmt: skip
    a, b = order_of(rows)
    assert a == {"family": "a", "ordered": True, "inversions": []}
    assert (b["family"], b["ordered"], len(b["inversions"])) == ("b", False, 3)
    assert "b2 (2 bits) has KL 0.1, b4 (4 bits) 0.3" in b["inversions"]
    assert order_of([("n", "n2", 2.0, float("nan")), ("n", "n3", 3.0, 0.1)])[0]["ordered"] is False


def test_rows_of_a_family_come_together_by_bits() -> None:
    rows = [{"name": n[0], "bits": float(n[1])} for n in ("b4", "a2", "b1", "c1", "b3", "a1")]
    found = by_bits(rows, "name", lambda row: float(row["bits"]))
    assert [f"{row['name']}{row['bits']:.0f}" for row in found] == ["b1", "b3", "b4", "a1", "a2", "c1"]
