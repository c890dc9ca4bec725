"""Attention of methods that ask for a few tokens at a time: several tiles, even and uneven rows, NaN next door."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache

SIZES = (2500, 300, 1400)
POLICIES = ({"method": "example:bits=4"}, {"keys": "example:bits=3", "values": "kivi:bits=4"})


def filled(tokens: int, policy: dict[str, str], seed: int) -> PackedKVCache:
    cache = PackedKVCache(**policy, residual=32, sink_tokens=3)
    keys, values = (mx.random.normal((1, 2, tokens, 64), key=mx.random.key(seed + i)) for i in (0, 50))
    cache.update_and_fetch(keys, values)
    return cache


def dense(cache: PackedKVCache, q: mx.array) -> np.ndarray:
    k, v = (np.repeat(np.array(x, np.float64), 2, axis=1) for x in cache.decode())
    scores = np.array(q, np.float64) * 0.125 @ np.swapaxes(k, -1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_several_tiles(policy: dict[str, str]) -> None:
    cache = filled(SIZES[0], policy, 0)
    assert cache._history is not None
    bound = cache._history.bound["keys"]
    assert bound.attend.tile_tokens < cache._history.packed[0], "the history must take several tiles"
    q = mx.random.normal((1, 4, 2, 64), key=mx.random.key(9))
    np.testing.assert_allclose(np.array(cache.attend(q, scale=0.125)), dense(cache, q), rtol=0, atol=2e-5)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_several_tiles_of_uneven_rows(policy: dict[str, str]) -> None:
    rows = [filled(n, policy, i) for i, n in enumerate(SIZES)]
    batch = PackedKVCache.join(rows)
    q = mx.random.normal((3, 4, 1, 64), key=mx.random.key(9))
    got = batch.attend(q, scale=0.125)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(np.array(got[i : i + 1]), dense(row, q[i : i + 1]), rtol=0, atol=2e-5)


def test_nan_of_one_row_stays_there() -> None:
    """A tile of uneven rows holds other rows' pages where a row has none."""
    rows = [filled(n, POLICIES[0], i) for i, n in enumerate(SIZES)]
    bad = PackedKVCache(**POLICIES[0], residual=32, sink_tokens=3)
    x = mx.full((1, 2, SIZES[0], 64), float("nan"))
    bad.update_and_fetch(x, x)
    batch = PackedKVCache.join([bad, *rows[1:]])
    q = mx.random.normal((3, 4, 1, 64), key=mx.random.key(9))
    got = np.array(batch.attend(q, scale=0.125))
    assert np.isnan(got[0]).all()
    for i, row in enumerate(rows[1:], 1):
        np.testing.assert_allclose(got[i : i + 1], dense(row, q[i : i + 1]), rtol=0, atol=2e-5)
