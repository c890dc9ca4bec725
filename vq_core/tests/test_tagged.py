"""What update_and_fetch returns: a pair of arrays that attention recognises and everything else reads densely."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.cache.tagged import StrictTag, TaggedArray, reading_of
from vq_core.errors import CacheStateError

Make = Callable[..., PackedKVCache]


@pytest.fixture(params=(False, True), ids=("tagged", "strict"))
def cache(request: Any, echo: Make) -> PackedKVCache:
    return PackedKVCache.from_policy(echo().policy, strict=request.param)


def test_tags_are_the_dense_tokens(cache: PackedKVCache, normal: Any) -> None:
    x = normal(1, 2, 50, 4)
    cache.update_and_fetch(x[:, :, :30], x[:, :, :30])
    keys, values = cache.update_and_fetch(x[:, :, 30:], -x[:, :, 30:])
    assert keys.shape == (1, 2, 50, 4) and keys.ndim == 4 and keys.dtype == mx.float32
    np.testing.assert_array_equal(np.array(keys + 0), np.array(x))
    np.testing.assert_array_equal(np.array(keys[:, :, 30:]), np.array(x[:, :, 30:]))
    np.testing.assert_array_equal(np.array(keys.swapaxes(-1, -2)), np.array(x.swapaxes(-1, -2)))
    np.testing.assert_array_equal(np.array(2 * values)[:, :, 30:], -2 * np.array(x)[:, :, 30:])


def test_only_a_pair_is_recognised(cache: PackedKVCache, normal: Any) -> None:
    x = normal(1, 2, 50, 4)
    keys, values = cache.update_and_fetch(x, x)
    again = cache.keys_and_values()
    assert reading_of(keys, values) is not None
    assert reading_of(*again) is not None
    # Twice the keys is latent attention, see tests/host_mlx_lm/test_latent.py.
    for pair in (
        (values, keys),
        (values, values),
        (keys, again[1]),
        (keys, again[0]),
        (keys + 0, values),
        (keys, x),
        (None, values),
    ):
        assert reading_of(*pair) is None


def test_a_tag_reads_the_cache_as_it_was(cache: PackedKVCache, normal: Any) -> None:
    x, q = normal(1, 2, 90, 4), normal(1, 4, 1, 4)
    tags = cache.update_and_fetch(x[:, :, :50], x[:, :, :50])
    want = cache.attend(q, scale=0.5)
    cache.update_and_fetch(x[:, :, 50:], x[:, :, 50:])
    cache.trim(70)
    reading = reading_of(*tags)
    assert reading is not None
    np.testing.assert_allclose(np.array(reading.attend(q, scale=0.5)), np.array(want), rtol=1e-6, atol=1e-6)


def test_reads_are_counted(cache: PackedKVCache, normal: Any) -> None:
    """Case 34: an update whose result nobody attended to packed is named in the report."""
    q = normal(1, 2, 1, 4)
    for step in range(4):
        tags = cache.update_and_fetch(normal(1, 2, 20, 4), normal(1, 2, 20, 4))
        if step != 2:
            reading = reading_of(*tags)
            assert reading is not None
            reading.attend(q, scale=1.0)
            reading.attend(q, scale=1.0)
    report = cache.report()
    assert (report.updates, report.attentions, report.lost) == (4, 6, 1)
    assert any("1 of 4 updates" in note for note in report.notes)


def test_the_dense_side_costs_nothing_unless_read(echo: Make, normal: Any) -> None:
    """8 MB of packed tokens: holding, attending and evaluating the rest makes no dense array."""
    cache = echo(block=32, page=128)
    x = normal(1, 2, 16384, 64)
    cache.update_and_fetch(x, x)
    mx.eval(cache.state)
    mx.synchronize()
    y = normal(1, 2, 1, 64)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tags = cache.update_and_fetch(y, y)
    mx.eval([a for a in cache.state if isinstance(a, mx.array)])
    assert mx.get_peak_memory() - before < x.nbytes / 4
    assert type(tags[0]) is TaggedArray
    mx.eval(*tags)
    assert mx.get_peak_memory() - before >= 2 * x.nbytes


def test_a_strict_tag_counts_dense_reads_and_is_not_copied(echo: Make, normal: Any) -> None:
    cache = PackedKVCache.from_policy(echo().policy, strict=True)
    keys, _ = cache.update_and_fetch(normal(1, 2, 20, 4), normal(1, 2, 20, 4))
    assert type(keys) is StrictTag
    assert keys.shape and keys.dtype and not cache.reads.dense
    keys[0], keys.sum(), keys * 2, keys @ keys.swapaxes(-1, -2)
    assert cache.reads.dense == 1
    assert any("dense side" in note for note in cache.report().notes)
    with pytest.raises(CacheStateError, match="one step"):
        copy.deepcopy(keys)
