"""Acceptance 3: what arrays hold against the layout, and what an object walk finds."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from vq_core.errors import SettingsError
from vq_core.evaluate.held import Wanted, measure
from vq_core.testing.registering import load_plugin, registered

METHODS = Path(__file__).parent.parent / "methods"
SMALL = Wanted(tokens=700, kv_heads=2, head_dim=64, residual=100)


@pytest.mark.parametrize(
    ("text", "codes", "metadata", "block"),
    [("kivi:bits=3", 3, 1, 32), ("kivi:bits=4,group_size=64", 4, 0.5, 64), ("example:bits=2", 2, 0.25, 1)],
)
def test_bits_of_packed_tokens(text: str, codes: float, metadata: float, block: int) -> None:
    (row,) = measure(attrs.evolve(SMALL, methods=(text,)))["rows"]
    packed = 600 // block * block
    assert row["packed"] == packed and set(row["sides"]) == {"keys", "values"}
    numbers = packed * 2 * 64
    for side in row["sides"].values():
        assert side["bits"] == side["layout_bits"] == {"codes": codes, "metadata": metadata}
        assert (side["difference"], side["within"]) == (0, True)
        held = side["bytes"]
        assert held["codes"] * 8 == codes * numbers and held["metadata"] * 8 == metadata * numbers
    total = row["bytes"]
    assert total["held"] == row["walked"] == sum(total[part] for part in ("codes", "metadata", "window", "spare"))
    assert total["window"] == 2 * (700 - packed) * 2 * 64 * 2
    assert row["all_in_bits"] == total["held"] * 8 / (2 * 700 * 2 * 64)


def test_what_belongs_to_the_sequence_is_apart() -> None:
    with registered(load_plugin(METHODS / "centred.py")):
        (row,) = measure(attrs.evolve(SMALL, methods=("centred",)))["rows"]
    for side in row["sides"].values():
        assert side["bits"] == {"codes": 8, "metadata": 0.5} and side["bytes"]["sequence"] == 2 * 64 * 4
    per_token = sum(side["bytes"]["metadata"] for side in row["sides"].values())
    assert row["bytes"]["metadata"] == per_token + 2 * 2 * 64 * 4
    assert row["walked"] == row["bytes"]["held"]


def test_a_method_of_keys_has_a_partner() -> None:
    with registered(load_plugin(METHODS / "sign_sketch.py")):
        (row,) = measure(attrs.evolve(SMALL, methods=("sign_sketch:sketch=64",)))["rows"]
    keys, values = row["sides"]["keys"], row["sides"]["values"]
    assert row["name"] == "sign_sketch:sketch=64 + kivi:bits=2" and values["layout_bits"]["codes"] == 2
    assert keys["bits"] == {"codes": 1, "metadata": 0.5} and keys["within"]
    assert keys["bytes"]["constants"] >= 64 * 64 * 4 and values["bytes"]["constants"] == 0


def test_nothing_packed_is_an_error() -> None:
    with pytest.raises(SettingsError, match="700 tokens with a window of 700 pack none"):
        measure(attrs.evolve(SMALL, methods=("kivi",), residual=700))


@pytest.mark.parametrize("changes", [{"tokens": 0}, {"kv_heads": 0}, {"head_dim": 0}, {"dtype": "int8"}], ids=str)
def test_bad_input(changes: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(changes))):
        attrs.evolve(SMALL, **changes)
