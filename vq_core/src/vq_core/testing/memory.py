"""Bytes: what is claimed is what is held."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from vq_core.cache.shell import PackedKVCache
from vq_core.plugins.binding import BoundSide, state_arrays
from vq_core.testing.kit import Kit, feed
from vq_core.testing.observe import gaussian

SPARE_TOKENS, SPARE_SHARE = 128, 0.03
NOISE = 64 * 1024
"""Active memory that comes and goes with MLX's own small arrays."""


class MemoryConformance(Kit):
    """A method that keeps more than its layout says is found here."""

    def settled(self, cache: PackedKVCache) -> None:
        """Evaluate everything that the cache holds."""
        mx.eval([a for a in cache.state if isinstance(a, mx.array)])

    def test_nbytes_is_what_is_reachable(self) -> None:
        """nbytes, the report and a walk over every object of the cache agree."""
        cache = self.cache(sink_tokens=4)
        for n in (1, 100, 300, 1):
            cache.update_and_fetch(*self.tokens(n, rows=2))
            found = sum(a.nbytes for a in reachable(cache))
            assert cache.nbytes == found == cache.report().bytes.held

    def test_memory_grows_by_nbytes(self) -> None:
        """After the tokens are gone, active memory has grown by at most 1.1 times nbytes; no reference hides."""
        cache = self.cache(residual=32)
        cache.prepare_for(kv_heads=8, key_dim=self.dim(), value_dim=self.dim(), dtype=mx.float16)
        gc.collect()
        before = mx.get_active_memory()
        for i in range(4):
            tokens = [gaussian((1, 8, 512, self.dim()), seed=40 + i) for _ in range(2)]
            cache.update_and_fetch(*tokens)
            self.settled(cache)
            del tokens
        for i in range(40):
            cache.update_and_fetch(*(gaussian((1, 8, 1, self.dim()), seed=50 + i) for _ in range(2)))
        self.settled(cache)
        gc.collect()
        grown = mx.get_active_memory() - before
        assert grown <= 1.1 * cache.nbytes + NOISE, (
            f"active memory grew by {grown} bytes, nbytes is {cache.nbytes}: tokens are kept outside the layout"
        )

    def test_window_does_not_keep_the_prompt(self) -> None:
        """A window of 32 tokens of a prompt of 2,048 keeps 32 tokens alive, not 2,048."""
        cache = self.cache(residual=32)
        shape = (1, 8, 2048, self.dim())
        cache.prepare_for(kv_heads=8, key_dim=self.dim(), value_dim=self.dim(), dtype=mx.float16)
        gc.collect()
        before = mx.get_active_memory()
        tokens = [gaussian(shape, seed=60 + i) for i in range(2)]
        whole = sum(x.nbytes for x in tokens)
        cache.update_and_fetch(*tokens)
        self.settled(cache)
        del tokens
        gc.collect()
        grown = mx.get_active_memory() - before
        assert grown <= 1.1 * cache.nbytes + NOISE, f"memory grew by {grown:,} bytes, nbytes is {cache.nbytes:,}"
        assert cache.report().bytes.window <= whole // 16, "the window is larger than its tokens"

    def test_attention_keeps_nothing(self) -> None:
        """Attention leaves no dense copy behind, and the prepared state does not grow with the tokens."""
        cache = self.filled(600)
        assert cache._history is not None
        self.settled(cache)
        bound = list(cache._history.bound.values())
        constants = [sum(a.nbytes for a in state_arrays(b.state)) for b in bound]
        queries = gaussian((1, self.kv_heads, 1, self.dim()))
        mx.eval(cache.attend(queries, scale=0.1))
        gc.collect()
        before = mx.get_active_memory()
        for _ in range(3):
            mx.eval(cache.attend(queries, scale=0.1))
        gc.collect()
        assert mx.get_active_memory() - before <= NOISE
        assert [sum(a.nbytes for a in state_arrays(b.state)) for b in bound] == constants

    @pytest.mark.parametrize("tokens", [1, 129, 300, 1000, 5000])
    def test_spare_capacity(self, tokens: int) -> None:
        """Capacity that no token uses stays within the larger of 128 tokens and 3%, a begun page included."""
        cache = self.cache(residual=0)
        data = self.tokens(tokens, seed=41)
        feed(cache, data, [tokens // 2, tokens - tokens // 2] if tokens > 1 else [1])
        assert cache._history is not None
        for store in cache._history.stores.values():
            n, page = store.tokens[0], store.layout.page
            assert store.capacity * page - n <= max(SPARE_TOKENS, page - 1, SPARE_SHARE * n)

    def test_report_adds_up(self) -> None:
        """Codes, metadata, window and spare are the bytes held; what is stored a token is what the layout says."""
        cache = self.filled(128 * 8, residual=0)
        report, history = cache.report(), cache._history
        assert history is not None
        held = report.bytes
        assert held.codes + held.metadata + held.window + held.spare == held.held == cache.nbytes
        for side, store in history.stores.items():
            codes, metadata = store.layout.bits_per_element(self.dim())
            numbers = store.tokens[0] * self.kv_heads * self.dim()
            paged = sum(a.nbytes for a in store.paged.values()) - store.spare_bytes()
            promised = numbers * (codes + metadata) / 8
            assert np.isclose(paged, promised, rtol=1e-3), f"{side} hold {paged:,} bytes, the layout says {promised:,}"
        assert held.fp16 == 128 * 8 * self.kv_heads * self.dim() * 2 * 2


def reachable(cache: PackedKVCache) -> list[mx.array]:
    """Every array that a cache's objects lead to, each once.

    The methods' shared constants are apart.
    """
    return state_arrays(cache, leave=(BoundSide,))
