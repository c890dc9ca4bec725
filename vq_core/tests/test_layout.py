"""Fields and layouts: what is refused, and the arithmetic that the store relies on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_core.api import Field, Layout, PluginError, PrepareContext
from vq_core.api.layout import DTYPE_BYTES


def kivi_keys(head_dim: int = 128, bits: int = 2, group: int = 32, page: int = 128) -> Layout:
    """Codes and fp16 scales and zeros of keys grouped along tokens."""
    return Layout(
        block=group,
        page=page,
        fields=(
            Field("codes", "uint32", (head_dim, page * bits // 32), axis=1, codes=True),
            Field("scales", "float16", (head_dim, page // group), axis=1, wide="float32"),
            Field("zeros", "float16", (head_dim, page // group), axis=1, wide="float32"),
            Field("mean", "float32", (head_dim,), axis=None),
        ),
    )


def test_paged_fields_and_fields_of_the_sequence() -> None:
    layout = kivi_keys()
    assert [field.name for field in layout.paged] == ["codes", "scales", "zeros"]
    assert [field.name for field in layout.sequence] == ["mean"]


def test_bits_per_element_leave_the_sequence_out() -> None:
    assert kivi_keys(bits=2).bits_per_element(128) == (2.0, 1.0)
    assert kivi_keys(bits=3, group=64).bits_per_element(128) == (3.0, 0.5)


@given(st.sampled_from((32, 64, 128)), st.integers(1, 8))
def test_units_of_whole_blocks(group: int, blocks: int) -> None:
    layout = kivi_keys(group=group)
    codes, scales, _ = layout.paged
    assert layout.units(codes, blocks * group) * 16 == blocks * group
    assert layout.units(scales, blocks * group) == blocks


def test_bytes_of_a_field() -> None:
    assert Field("codes", "uint32", (128, 8), axis=1).nbytes == 4096
    assert Field("norm", "bfloat16", (128,)).nbytes == 256
    assert set(DTYPE_BYTES.values()) == {1, 2, 4, 8}


def test_shapes_become_tuples() -> None:
    shape: Any = [128, 8]
    assert Field("codes", "uint32", shape, axis=1).shape == (128, 8)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"dtype": "float8"}, "field 'x': unknown dtype 'float8'; known: bool_"),
        ({"wide": "double"}, "field 'x': unknown dtype 'double'"),
        ({"axis": 2}, "field 'x': token axis 2 is not an axis of (128, 8)"),
        ({"axis": -1}, "field 'x': token axis -1 is not an axis of (128, 8)"),
        ({"shape": (128, 0)}, "field 'x': every length of (128, 0) must be positive"),
        ({"shape": (), "axis": 0}, "field 'x': token axis 0 is not an axis of ()"),
    ],
)
def test_refused_fields(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(PluginError, match=re.escape(part)):
        Field(**{"name": "x", "dtype": "uint32", "shape": (128, 8), **arguments})


@pytest.mark.parametrize(
    ("block", "page", "shapes", "part"),
    [
        (0, 128, [(128,)], "page (128) must be a multiple of block (0), block at least 1"),
        (48, 128, [(128,)], "page (128) must be a multiple of block (48)"),
        (32, 128, [], "field names must be unique and at least one: []"),
        (8, 128, [(8,)], "field 'f0': a block of 8 tokens is no whole number of units along axis 0 of (8,)"),
    ],
)
def test_refused_layouts(block: int, page: int, shapes: list[tuple[int, ...]], part: str) -> None:
    with pytest.raises(PluginError, match=re.escape(part)):
        Layout(block, [Field(f"f{at}", "uint32", shape) for at, shape in enumerate(shapes)], page=page)  # type: ignore[arg-type]


def test_equal_field_names_are_refused() -> None:
    with pytest.raises(PluginError, match=re.escape("field names must be unique and at least one: ['x', 'x']")):
        Layout(1, (Field("x", "uint8", (128,)), Field("x", "uint8", (128,))))


def test_the_contexts_head_size_is_its_sides() -> None:
    shape: dict[str, Any] = {"kv_heads": 8, "key_dim": 192, "value_dim": 128, "dtype": "float16"}
    assert PrepareContext(side="keys", **shape).head_dim == 192
    assert PrepareContext(side="values", **shape).head_dim == 128
