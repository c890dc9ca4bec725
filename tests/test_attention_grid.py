"""Acceptance 5: attention from packed codes against float64 numpy over the decoded keys and values.

"Relative" is the largest difference over the largest number of the reference.  The fused path works in float32 and
does not round what it decodes, so in bfloat16 the reference reads the decoded arrays in float32; what is left is
the rounding of the output to 8 bits, at most 2**-8 of each number.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.attention import view as views
from vq_core.cache.tagged import reading_of

HEADS = ((8, 8), (8, 2), (8, 1), (6, 3))
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 96))
MASKS = ("none", "causal", "bool", "additive", "per head")
LENGTHS = ((1, True), (24, False), (5, True), (1, False), (20, True))
BOUNDS = {mx.float16: 2e-3, mx.float32: 1e-5, mx.bfloat16: 2**-8 + 1e-5}
BITS = {64: 2, 80: 3, 96: 4, 128: 2, 192: 8, 256: 4}
TOKENS = 200


def normal(rng: np.random.Generator, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)


def plain(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def dense(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: np.ndarray, sinks: mx.array | None) -> np.ndarray:
    """Float64 attention; mask (B, H_q, L, T), additive."""
    repeats = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(plain(x), repeats, axis=1) for x in (k, v))
    scores = scale * plain(q) @ keys.swapaxes(-1, -2) + mask
    if sinks is not None:
        extra = np.broadcast_to(plain(sinks)[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, extra], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True))[..., : keys.shape[2]] @ values


def mask_of(kind: str, rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[Any, np.ndarray]:
    """A mask as a model hands it over, and as an additive array of ``shape`` (B, H_q, L, T)."""
    B, _, L, T = shape
    causal = np.arange(T) <= np.arange(T - L, T)[:, None]
    if kind == "none":
        return None, np.zeros(shape)
    if kind == "causal":
        return "causal", np.broadcast_to(np.where(causal, 0, -np.inf), shape)
    if kind == "bool":
        seen = causal & (rng.random((B, 1, L, T)) < 0.8) | np.eye(L, T, T - L, dtype=bool)
        return mx.array(seen), np.broadcast_to(np.where(seen, 0, -np.inf), shape)
    added = normal(rng, dtype, *((B, 1, L, T) if kind == "additive" else shape))
    return added, np.broadcast_to(plain(added), shape)


def decoded(cache: PackedKVCache) -> tuple[mx.array, ...]:
    """Keys and values, bfloat16 before it is rounded."""
    keys, values = cache.decode()
    if keys.dtype != mx.bfloat16:
        return keys, values
    view = cache._view()
    wide = [views.dense(view, side, mx.float32) for side in (view.keys, view.values)]
    assert mx.array_equal(wide[0].astype(keys.dtype), keys) and mx.array_equal(wide[1].astype(keys.dtype), values)
    return wide[0], wide[1]


def difference(got: mx.array, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.abs(plain(got) - want).max() / np.abs(want).max())


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=lambda d: str(d).removeprefix("mlx.core."))
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_grid(heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(sum(heads) * 1000 + dims[0] + dims[1])
    scale = dims[0] ** -0.5
    for rows, options in ((1, {"residual": 33}), (2, {"residual": 0, "sink_tokens": 3})):
        cache = PackedKVCache(method=f"kivi:bits={BITS[dims[0]]},group_size=32", **options)
        for tokens in (TOKENS - 40, 40):
            cache.update_and_fetch(*(normal(rng, dtype, rows, heads[1], tokens, d) for d in dims))
        assert cache.report().packed >= 160 * rows
        both = decoded(cache)
        for kind, (length, with_sinks) in zip(MASKS, LENGTHS, strict=True):
            q = normal(rng, dtype, rows, heads[0], length, dims[0])
            sinks = normal(rng, dtype, heads[0]) if with_sinks else None
            mask, added = mask_of(kind, rng, (rows, heads[0], length, TOKENS), dtype)
            before = plain(q)
            got = cache.attend(q, scale=scale, mask=mask, sinks=sinks)
            assert got.dtype == dtype
            np.testing.assert_array_equal(plain(q), before, "queries are not changed")
            error = difference(got, dense(q, *both, scale, added, sinks))
            assert error <= BOUNDS[dtype], (rows, kind, length, with_sinks, error)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("length", (1, 16, 17, 130))
@pytest.mark.parametrize("with_sinks", (False, True))
def test_every_mask_with_every_length(kind: str, length: int, with_sinks: bool) -> None:
    """Either side of the step from one path to the other, over more than one tile of history."""
    rng = np.random.default_rng(length)
    cache = PackedKVCache(keys="kivi:bits=4,group_size=64", values="kivi:bits=2", residual=100)
    cache.update_and_fetch(*(normal(rng, mx.float32, 2, 2, 1500, d) for d in (64, 80)))
    q = 2 * normal(rng, mx.float32, 2, 6, length, 64)
    sinks = normal(rng, mx.float32, 6) if with_sinks else None
    mask, added = mask_of(kind, rng, (2, 6, length, 1500), mx.float32)
    want = dense(q, *cache.decode(), 0.125, added, sinks)
    assert difference(cache.attend(q, scale=0.125, mask=mask, sinks=sinks), want) <= 1e-5


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=lambda d: str(d).removeprefix("mlx.core."))
def test_what_update_returned_attends_like_the_dense_arrays(dtype: mx.Dtype) -> None:
    """A prompt chunk over packed history, with its own tokens exact, through the tags that a host sees."""
    rng = np.random.default_rng(3)
    cache = PackedKVCache(method="kivi:bits=2", residual=16)
    cache.update_and_fetch(*(normal(rng, dtype, 1, 2, 300, 64) for _ in range(2)))
    keys, values = cache.update_and_fetch(*(normal(rng, dtype, 1, 2, 200, 64) for _ in range(2)))
    q = normal(rng, dtype, 1, 8, 200, 64)
    reading = reading_of(keys, values)
    assert reading is not None
    _, added = mask_of("causal", rng, (1, 8, 200, 500), dtype)
    got = reading.attend(q, scale=0.125, mask="causal")
    bound = BOUNDS[dtype] if dtype != mx.bfloat16 else 3 * 2**-8  # the dense keys and values are rounded as well
    assert difference(got, dense(q, keys, values, 0.125, added, None)) <= bound


def test_the_reference_tier_is_the_same() -> None:
    rng = np.random.default_rng(4)
    x = [normal(rng, mx.float32, 2, 2, 300, 80) for _ in range(2)]
    q = normal(rng, mx.float32, 2, 4, 3, 80)
    outs = []
    for tier in ("auto", "mlx", "reference"):
        cache = PackedKVCache(method="kivi:bits=3", residual=32, attention=tier)
        cache.update_and_fetch(*x)
        outs.append(np.array(cache.attend(q, scale=0.1, mask="causal")))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_allclose(outs[1], outs[2], atol=1e-5)
