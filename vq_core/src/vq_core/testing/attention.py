"""Attention on packed codes against dense attention over the decoded cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core.cache.shell import PackedKVCache
from vq_core.testing.kit import Kit, feed, skip
from vq_core.testing.observe import floats, gaussian, raw

GROUPS = [(8, 8), (8, 2), (8, 1), (6, 3)]
MASKS = ["none", "causal", "bool", "additive", "per head"]
QUERIES = (1, 5, 40)
TOKENS = 300


class AttentionConformance(Kit):
    """``attend`` equals softmax(scale q k' + mask) v in double precision over ``decode()``."""

    def attention_cache(
        self, heads: int, dtype: str = "float16", *, rows: int = 2, dims: tuple[int, int] | None = None, **options: Any
    ) -> PackedKVCache:
        """A cache of 300 tokens with most of them packed."""
        cache = self.cache(**{"residual": 40} | options)
        keys, values = (
            gaussian((rows, heads, TOKENS, d), dtype, seed=101 + i)
            for i, d in enumerate(dims or (self.dim(), self.dim()))
        )
        feed(cache, (keys, values), [TOKENS - 1, 1])
        return cache

    def check(
        self, cache: PackedKVCache, query_heads: int, length: int, mask: str = "none",
        sinks: bool = False, what: str = "",
    ) -> None:  # fmt: skip
        """One attention against the dense one; the queries must come out of it as they went in."""
        keys, values = cache.decode()
        name = str(keys.dtype).removeprefix("mlx.core.")
        shape = (keys.shape[0], query_heads, length, keys.shape[3])
        queries, scale = gaussian(shape, name, seed=103 + length), keys.shape[3] ** -0.5
        made = make_mask(mask, shape, keys.shape[2], keys.dtype)
        extra = gaussian((query_heads,), "float32", seed=104) if sinks else None
        before = raw(queries)
        got = cache.attend(queries, scale=scale, mask=made, sinks=extra)
        mx.eval(got)
        assert np.array_equal(raw(queries), before), "attend has changed the queries in place"
        assert got.shape == (*shape[:3], values.shape[3]) and got.dtype == queries.dtype
        want = dense_attention(queries, keys, values, scale, made, extra)
        error = np.sqrt(np.square(floats(got) - want).mean() / np.square(want).mean())
        limit = self.tolerance[name]
        case = f"{query_heads}:{keys.shape[1]} heads, {length} queries, mask {mask}, sinks {sinks}, {name}{what}"
        assert error <= limit, f"{case}: relative error {error:.2e}, at most {limit:.0e}"

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize(("query_heads", "heads"), GROUPS)
    def test_attention(self, query_heads: int, heads: int, mask: str) -> None:
        """Grouped heads, masks, the model's learned sinks, one query, a few, many."""
        cache = self.attention_cache(heads)
        for length in QUERIES:
            self.check(cache, query_heads, length, mask, sinks=length != 5)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_other_dtypes(self, dtype: str) -> None:
        """float32 to 1e-5; bfloat16 to what it can show."""
        cache = self.attention_cache(2, dtype)
        for length in QUERIES:
            for mask in ("causal", "additive"):
                self.check(cache, 4, length, mask, sinks=mask == "causal")

    @pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
    def test_head_sizes(self, dim: int) -> None:
        """Every head size that the method takes."""
        accepted = self.capabilities().head_dims
        if accepted is not None and dim not in accepted:
            skip(f"head_dims={accepted}", f"{dim} is not among them")
        cache = self.attention_cache(2, rows=1, dims=(dim, dim))
        for length in (1, 40):
            self.check(cache, 4, length, "causal")

    def test_key_and_value_sizes_that_differ(self) -> None:
        """Keys of 192 and values of 128, as some models have."""
        accepted = self.capabilities().head_dims
        if accepted is not None and not {192, 128} <= set(accepted):
            skip(f"head_dims={accepted}", "not both of 192 and 128")
        cache = self.attention_cache(2, dims=(192, 128))
        for length in (1, 40):
            self.check(cache, 4, length, "causal")

    @pytest.mark.parametrize(("residual", "sink_tokens"), [(0, 0), (512, 0), (0, 4), (40, 4)])
    def test_windows(self, residual: int, sink_tokens: int) -> None:
        """All packed, nothing packed, sink tokens."""
        cache = self.attention_cache(2, residual=residual, sink_tokens=sink_tokens)
        for length in QUERIES:
            self.check(cache, 4, length, "bool", sinks=True, what=f", residual {residual}, {sink_tokens} sink tokens")

    def test_variants(self) -> None:
        """Every text of the method, one query and many."""
        if not self.variants:
            pytest.skip("no variants: set them to further texts of the method")
        for text in self.variants:
            cache = self.cache(text, residual=40)
            feed(cache, self.tokens(TOKENS, seed=106), [TOKENS])
            for length in (1, 40):
                self.check(cache, 2 * self.kv_heads, length, "causal", what=f", {text}")

    def test_reference_tier_agrees(self) -> None:
        """attention="reference" decodes everything and multiplies; the method's own way gives the same."""
        cache = self.attention_cache(2, attention="reference")
        for length in (1, 40):
            self.check(cache, 4, length, "causal", sinks=True, what=", reference")

    def test_probe_ran(self) -> None:
        """The report says which implementation attends; a method that offers one is not quietly decoded."""
        cache = self.attention_cache(2)
        lines = [line for line in cache.report().operations if "attend" in line]
        assert len(lines) == 2 and not any("failed its probe" in line for line in lines)


def make_mask(kind: str, shape: tuple[int, ...], tokens: int, dtype: mx.Dtype) -> Any:
    """A mask of one of the kinds in ``MASKS``."""
    rows, heads, length, _ = shape
    rng = np.random.default_rng(105)
    if kind == "none":
        return None
    if kind == "causal":
        return "causal"
    if kind == "additive":
        added = np.where(rng.random((length, tokens)) < 0.2, -np.inf, rng.standard_normal((length, tokens)))
        return mx.array(added.astype(np.float32)).astype(dtype)
    form = (1, heads, length, tokens) if kind == "per head" else (rows, 1, length, tokens)
    seen = rng.random(form) < 0.7
    seen[..., -1] = True
    return mx.array(seen)


def dense_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> np.ndarray[Any, Any]:
    """Softmax attention in float64."""
    q, k, v = floats(queries), floats(keys), floats(values)
    repeats, length, tokens = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (np.repeat(a, repeats, axis=1) for a in (k, v))
    scores = scale * q @ k.swapaxes(-1, -2)
    if isinstance(mask, str):
        seen = np.arange(tokens)[None] <= np.arange(tokens - length, tokens)[:, None]
        scores = np.where(seen, scores, -np.inf)
    elif mask is not None and mask.dtype == mx.bool_:
        scores = np.where(np.array(mask), scores, -np.inf)
    elif mask is not None:
        scores = scores + floats(mask)
    top = scores.max(axis=-1, keepdims=True)
    logits = None if sinks is None else floats(sinks).reshape(1, -1, 1, 1)
    if logits is not None:
        top = np.maximum(top, logits)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if logits is not None:
        total = total + np.exp(logits - top)
    out: np.ndarray[Any, Any] = (weights / total) @ v
    return out
