"""The exact window: rows aligned at the right, memory of its own."""

from __future__ import annotations

import gc
import io

import mlx.core as mx
import numpy as np
import pytest

from vq_core.cache.window import Window, owned


def filled(counts: list[int], heads: int = 2, dim: int = 3) -> Window:
    """Row r holds r * 100 + its tokens' numbers, at the right; what is left of them is -1."""
    width = max(counts)
    data = np.full((len(counts), heads, width, dim), -1, np.float32)
    for r, n in enumerate(counts):
        data[r, :, width - n :] = (r * 100 + np.arange(n))[None, :, None]
    window = Window(len(counts))
    window.keys, window.values, window.counts = mx.array(data), mx.array(-data), list(counts)
    return window


def tokens(window: Window, row: int) -> list[float]:
    assert window.keys is not None
    return np.array(window.keys[row, 0, window.width - window.counts[row] :, 0]).tolist()


@pytest.mark.parametrize("shape", [(1, 1, 512, 512), (1, 4, 128, 512), (2, 1, 256, 512)])
def test_owned_lets_go_of_the_whole(shape: tuple[int, ...]) -> None:
    """Case 36: with B = H = 1 a slice is contiguous, and keeps its parent; mx.contiguous lets go of what is larger."""
    mx.synchronize()
    before = mx.get_active_memory()
    whole = mx.random.normal(shape)
    part = owned(whole, shape[2] - 8, shape[2])
    mx.eval(part)
    del whole
    gc.collect()
    mx.synchronize()
    assert part.shape[2] == 8
    assert mx.get_active_memory() - before <= 1.1 * part.nbytes + 4096


def test_joined_is_memory_of_its_own_even_at_the_first_token() -> None:
    window, x = Window(1), mx.zeros((1, 1, 4, 3))
    first = window.joined(x, x)[0].whole()
    x[...] = 7
    assert not first.any()


@pytest.mark.parametrize("before", [0, 5])
def test_parts_of_joined_tokens_are_those_of_all(before: int) -> None:
    window, x = Window(2), mx.arange(2 * 3 * 11 * 4, dtype=mx.float32).reshape(2, 3, 11, 4)
    if before:
        window.keys, window.values = x[:, :, :before], -x[:, :, :before]
    keys, values = window.joined(x[:, :, before:], -x[:, :, before:])
    assert keys.width == values.width == 11
    assert mx.array_equal(keys.whole(), x) and mx.array_equal(values.whole(), -x)
    for begin in range(11):
        for end in range(begin + 1, 12):
            assert mx.array_equal(keys.cut(begin, end), x[:, :, begin:end])
            assert mx.array_equal(values.owned(begin, end), -x[:, :, begin:end])


def test_new_tokens_take_the_dependencies_of_held_ones() -> None:
    window = filled([6])
    window.depend(mx.array(3.0) * 2)
    keys, _ = window.joined(mx.ones((1, 2, 9, 3)), mx.ones((1, 2, 9, 3)))
    found = io.StringIO()
    mx.export_to_dot(found, keys.owned(8, 15))
    assert "Multiply" in found.getvalue()


def test_select_cuts_to_the_longest_row() -> None:
    window = filled([2, 5, 0])
    part = window.select([0, 2])
    assert (part.width, part.counts) == (2, [2, 0])
    assert tokens(part, 0) == [0, 1]
    assert tokens(window.select([1, 1, 0]), 1) == [100, 101, 102, 103, 104]


def test_join_pads_at_the_left_with_zeros() -> None:
    window = Window.join([filled([1]), filled([4, 2])])
    assert window.counts == [1, 4, 2]
    assert window.width == 4
    assert [tokens(window, r) for r in range(3)] == [[0], [0, 1, 2, 3], [100, 101]]
    assert window.keys is not None and not window.keys[0, :, :3].any()


def test_spare_bytes_are_the_places_without_a_token() -> None:
    window = filled([2, 5])
    token = 2 * 3 * 4 * 2  # heads, numbers, bytes, both sides
    assert window.spare_bytes() == 3 * token
    assert sum(a.nbytes for a in window.arrays()) - window.spare_bytes() == 7 * token


def test_sink_tokens_of_rows_that_flush_later() -> None:
    window = filled([6, 6])
    assert window.keys is not None and window.values is not None
    window.keep_sinks([1], window.keys[1:, :, :2], window.values[1:, :, :2])
    first = window.sink_keys
    window.keep_sinks([0], window.keys[:1, :, :2], window.values[:1, :, :2])
    assert window.sinks == [2, 2]
    assert window.sink_keys is not None and first is not None
    assert np.array(window.sink_keys[:, 0, :, 0]).tolist() == [[0, 1], [100, 101]]
    assert not first[0].any(), "an array that was handed out does not change"


def test_copy_shares_arrays_and_no_lists() -> None:
    window = filled([2, 3])
    other = window.copy()
    other.counts[0] = 99
    assert window.counts == [2, 3]
    assert other.keys is window.keys
