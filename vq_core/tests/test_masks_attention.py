"""Attention of the core over a method that loses nothing, against plain numpy: masks, sinks, rows, NaN.

Every case runs three ways: a method with attention of its own, one that is read by decoding tiles, and the dense
tier; and with few queries (one step) and many (tiles).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache

HEADS, QUERY_HEADS, DIM = 2, 6, 8
SCALE = 0.6


class Keys:
    def prepare_query(self, queries: mx.array) -> mx.array:
        return queries

    def scores(self, queries: mx.array, tile: Any) -> mx.array:
        return queries @ tile["x"].swapaxes(-1, -2)


class Values:
    def accumulate(self, weights: mx.array, tile: Any) -> mx.array:
        return weights @ tile["x"]

    def finish(self, sums: mx.array) -> mx.array:
        return sums


@pytest.fixture(params=("own", "decoded", "dense"))
def make(request: Any, install: Any, hooks: Any) -> Callable[..., PackedKVCache]:
    """A cache whose packed tokens are read in one of three ways."""
    extra = {"vq_attend": lambda side: Keys() if side == "keys" else Values()} if request.param == "own" else {}
    install("plain", hooks() | extra)

    def build(key_page: int = 32, value_page: int = 32, block: int = 8, **rest: Any) -> PackedKVCache:
        return PackedKVCache(
            keys=f"plain:block={block},page={key_page}", values=f"plain:block={block},page={value_page}",
            attention="reference" if request.param == "dense" else "mlx", **({"residual": 8} | rest),
        )  # fmt: skip

    return build


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, sinks: np.ndarray | None
) -> np.ndarray:
    """Float64 attention of one row: q (H_q, L, D), k and v (H, T, D), additive mask broadcastable to (H_q, L, T)."""
    repeats = q.shape[0] // k.shape[0]
    k, v = (np.repeat(x.astype(np.float64), repeats, axis=0) for x in (k, v))
    scores = SCALE * q.astype(np.float64) @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights[..., : k.shape[1]] @ v


def causal(length: int, tokens: int) -> np.ndarray:
    return np.where(np.arange(tokens) <= np.arange(tokens - length, tokens)[:, None], 0.0, -np.inf)


def close(got: mx.array, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(got), want, atol=1e-5 * max(1.0, np.abs(want).max()))


def masks(kind: str, B: int, L: int, T: int) -> tuple[Any, np.ndarray]:
    """A mask as it is handed over, and as (B, H_q, L, T) additive."""
    rng = np.random.default_rng(7)
    full = np.broadcast_to(causal(L, T), (B, QUERY_HEADS, L, T))
    if kind == "none":
        return None, np.zeros((B, QUERY_HEADS, L, T))
    if kind == "causal":
        return "causal", full
    if kind == "bool 2d":
        return mx.array(causal(L, T) == 0), full
    if kind == "additive 3d":
        array = rng.standard_normal((B, L, T)).astype(np.float32)
        return mx.array(array), np.broadcast_to(array[:, None], full.shape)
    if kind == "bool a row":
        array = rng.random((B, 1, 1, T)) < 0.7
        array[..., -1] = True
        return mx.array(array), np.broadcast_to(np.where(array, 0.0, -np.inf), full.shape)
    if kind == "additive a head":
        array = rng.standard_normal((B, QUERY_HEADS, L, T)).astype(np.float32)
        return mx.array(array), array
    # Most of the history is masked, with minus infinity, as a sliding window does it.
    array = np.where(np.arange(T) < T - L - 3, -np.inf, 0.0) + causal(L, T)
    return mx.array(array.astype(np.float32)), np.broadcast_to(array, full.shape)


KINDS = ("none", "causal", "bool 2d", "additive 3d", "bool a row", "additive a head", "minus infinity")


@pytest.mark.parametrize("length", (1, 5, 20))
@pytest.mark.parametrize("kind", KINDS)
def test_masks(make: Any, normal: Any, kind: str, length: int) -> None:
    for rows, tokens, options in (
        (2, 90, {}),
        (1, 1500, {"sink_tokens": 3, "residual": 0}),
        (1, 24, {"residual": 0}),
        (2, 30, {"residual": 64}),
        (1, 300, {"key_page": 64, "value_page": 24}),
    ):
        cache = make(**options)
        k, v, q = (normal(rows, h, n, DIM) for h, n in ((HEADS, tokens), (HEADS, tokens), (QUERY_HEADS, length)))
        cache.update_and_fetch(k, v)
        mask, added = masks(kind, rows, length, tokens)
        for sinks in (None, normal(QUERY_HEADS)):
            before = np.array(q)
            got = cache.attend(q, scale=SCALE, mask=mask, sinks=sinks)
            np.testing.assert_array_equal(np.array(q), before, "queries stay as they are (case 22)")
            for b in range(rows):
                numbers = [np.array(x[b]) for x in (q, k, v)]
                close(got[b], expected(*numbers, added[b], None if sinks is None else np.array(sinks)))


@pytest.mark.parametrize("length", (1, 4, 20))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(23, 150, 60), (9, 22), (200, 24, 199)], ids=str)
def test_rows_of_unequal_length(make: Any, normal: Any, kind: str, length: int, lengths: tuple[int, ...]) -> None:
    """Case B1: each row equals its own run; a mask's columns are the longest row's, aligned at the right."""
    tokens = [(normal(1, HEADS, n, DIM), normal(1, HEADS, n, DIM)) for n in lengths]
    caches = []
    for pair in tokens:
        caches.append(make(sink_tokens=2))
        caches[-1].update_and_fetch(*pair)
    joined = PackedKVCache.join(caches)
    q, longest = normal(len(lengths), QUERY_HEADS, length, DIM), max(lengths)
    sinks = normal(QUERY_HEADS)
    mask, added = masks(kind, len(lengths), length, longest)
    got = joined.attend(q, scale=SCALE, mask=mask, sinks=sinks)
    assert np.isfinite(np.array(got)).all()
    for b, n in enumerate(lengths):
        seen = added[b][..., longest - n :]
        if not np.isfinite(seen).any(axis=-1).all():
            continue  # some query of this row sees nothing at all
        close(got[b], expected(np.array(q[b]), *(np.array(x[0]) for x in tokens[b]), seen, np.array(sinks)))


@pytest.mark.parametrize("length", (1, 20))
@pytest.mark.parametrize("kind", ("none", "causal", "bool a row", "additive a head"))
@pytest.mark.parametrize("side", (0, 1))
def test_nan_stays_in_its_row(make: Any, normal: Any, side: int, kind: str, length: int) -> None:
    """The other row is shorter: its empty pages must not be read from its neighbour."""
    caches = []
    for n in (150, 30):
        pair = [normal(1, HEADS, n, DIM), normal(1, HEADS, n, DIM)]
        if n == 150:
            pair[side][:, :, :40] = mx.nan
        caches.append(make())
        caches[-1].update_and_fetch(*pair)
    joined = PackedKVCache.join(caches)
    mask, _ = masks(kind, 2, length, 150)
    out = joined.attend(normal(2, QUERY_HEADS, length, DIM), scale=SCALE, mask=mask)
    assert mx.isnan(out[0]).any()
    assert not mx.isnan(out[1]).any()


@pytest.mark.parametrize("length", (1, 20))
def test_empty_places_may_decode_to_anything(install: Any, hooks: Any, normal: Any, length: int) -> None:
    """A method may divide by a norm that an empty place does not have."""

    def decode(packed: Any) -> mx.array:
        return packed["x"] / mx.where(packed["x"].square().sum(axis=-1, keepdims=True) > 0, 1.0, 0.0)

    install("divides", hooks() | {"vq_decode": decode})
    cache = PackedKVCache(method="divides:block=8,page=32", residual=4)
    k, v, q = normal(1, HEADS, 60, DIM), normal(1, HEADS, 60, DIM), normal(1, QUERY_HEADS, length, DIM)
    cache.update_and_fetch(k, v)
    close(cache.attend(q, scale=SCALE)[0], expected(*(np.array(x[0]) for x in (q, k, v)), None, None))


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
@pytest.mark.parametrize("tokens", (20, 90))
def test_masks_and_sinks_of_other_dtypes(make: Any, normal: Any, dtype: mx.Dtype, tokens: int) -> None:
    """The same call works before and after the first token is packed."""
    cache, x = make(residual=32), normal(1, HEADS, tokens, DIM, dtype=dtype)
    cache.update_and_fetch(x, x)
    q = normal(1, QUERY_HEADS, 3, DIM, dtype=dtype)
    want = cache.attend(q, scale=SCALE, mask="causal", sinks=mx.zeros((QUERY_HEADS,), dtype))
    mask = mx.array(causal(3, tokens).astype(np.float32))
    got = cache.attend(q, scale=SCALE, mask=mask, sinks=mx.zeros((QUERY_HEADS,)))
    assert got.dtype == want.dtype == dtype
    np.testing.assert_allclose(*(np.array(a.astype(mx.float32)) for a in (got, want)), atol=0.02, rtol=0.02)


def test_a_finite_lowest_mask_is_a_mask(make: Any, normal: Any) -> None:
    """Models write masks with the lowest number of their dtype instead of minus infinity."""
    cache = make(residual=0)
    k, v = normal(1, HEADS, 40, DIM), normal(1, HEADS, 40, DIM)
    cache.update_and_fetch(k, v)
    for length in (2, 20):
        q = normal(1, QUERY_HEADS, length, DIM)
        lowest = np.where(causal(length, 40) < 0, np.finfo(np.float32).min, 0).astype(np.float32)
        got = cache.attend(q, scale=SCALE, mask=mx.array(lowest))
        close(got[0], expected(*(np.array(x[0]) for x in (q, k, v)), causal(length, 40), None))


def test_a_failing_probe_names_the_method_or_falls_back(install: Any, hooks: Any, normal: Any) -> None:
    class Wrong(Keys):
        def scores(self, queries: mx.array, tile: Any) -> mx.array:
            return 1.01 * super().scores(queries, tile)

    from vq_core.errors import PluginError

    install("wrong", hooks() | {"vq_attend": lambda side: Wrong() if side == "keys" else Values()})
    x, q = normal(1, HEADS, 60, DIM), normal(1, QUERY_HEADS, 1, DIM)
    cache = PackedKVCache(method="wrong", residual=0)
    with pytest.raises(PluginError, match=r"'wrong': attention on the keys differs .* fallback='warn'"):
        cache.update_and_fetch(x, x)
    assert cache.empty() and cache.nbytes == 0
    cache = PackedKVCache(method="wrong", residual=0, fallback="warn")
    with pytest.warns(RuntimeWarning, match="failed its probe"):
        cache.update_and_fetch(x, x)
    close(cache.attend(q, scale=SCALE)[0], expected(*(np.array(a[0]) for a in (q, x, x)), None, None))
    assert any("failed its probe" in line for line in cache.report().operations)
