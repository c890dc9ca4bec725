"""How a cache grows: chunks, the exact window, the frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_core.api.facts import Side
from vq_core.cache.shell import PackedKVCache
from vq_core.plugins import partner
from vq_core.testing.kit import Kit, feed, few
from vq_core.testing.observe import assert_same, gaussian, packed_tokens, raw, stored, window

CHUNKINGS = ([256, 256, 256, 9], [1] * 777, [300, 1, 476])


class GrowthConformance(Kit):
    """What is stored depends on the tokens, not on how they came."""

    def block_of(self, cache: PackedKVCache) -> int:
        """Tokens that are flushed together."""
        assert cache._history is not None
        return cache._history.block

    def expected_packed(self, cache: PackedKVCache, tokens: int) -> int:
        """The frontier of a sequence that was only appended to."""
        policy, block = cache.policy, self.block_of(cache)
        return max(0, tokens - policy.sink_tokens - policy.residual) // block * block

    def _compare(self, cache: PackedKVCache, once: PackedKVCache, what: str) -> None:
        assert_same(stored(cache), stored(once), f"{what}, stored")
        assert_same(window(cache), window(once), f"{what}, window")
        assert_same(cache.decode(), once.decode(), f"{what}, decoded")

    def test_chunkings(self) -> None:
        """777 tokens in one, four, 777 and three chunks: identical bytes, identical decoding."""
        tokens, once = self.tokens(777, seed=31), self.cache()
        feed(once, tokens, [777])
        assert packed_tokens(once) == [self.expected_packed(once, 777)]
        for chunks in CHUNKINGS:
            cache = self.cache()
            feed(cache, tokens, chunks)
            self._compare(cache, once, f"{len(chunks)} chunks")

    @few
    @given(cuts=st.lists(st.integers(1, 399), unique=True, max_size=6), residual=st.sampled_from([0, 1, 33, 128]))
    def test_any_chunking(self, cuts: Sequence[int], residual: int) -> None:
        """Chunks of any size, with any window, with and without sink tokens."""
        edges = [0, *sorted(cuts), 400]
        tokens, sinks = self.tokens(400, seed=32), 4 if residual == 33 else 0
        once, cache = (self.cache(residual=residual, sink_tokens=sinks) for _ in range(2))
        feed(once, tokens, [400])
        feed(cache, tokens, [b - a for a, b in pairwise(edges)])
        assert packed_tokens(cache) == [self.expected_packed(cache, 400)]
        self._compare(cache, once, f"cuts at {cuts}, residual {residual}")

    def test_stored_codes_never_change(self) -> None:
        """What is packed stays as it is, step after step, across pages and reallocations."""
        cache, tokens = self.cache(residual=16), self.tokens(700, seed=33)
        seen: dict[str, Any] = {}
        places = 0
        for begin in range(0, 700, 35):
            feed(cache, tokens, [35], begin)
            now = stored(cache)[0]
            for name, old in seen.items():
                new = now[name]
                axis = next((i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b), None)
                new = new if axis is None else new.take(range(old.shape[axis]), axis=axis)
                assert_same(new, old, f"after {begin + 35} tokens, {name}")
            seen, places = now, places + 1
        assert places == 20 and packed_tokens(cache)[0] > 0

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_window_is_exact(self, dtype: str) -> None:
        """The newest R to R + block - 1 tokens, and the sink tokens, are the input bit for bit, in its dtype."""
        for n, residual, sinks in ((100, 128, 0), (300, 128, 0), (300, 64, 5), (300, 0, 0)):
            cache = self.cache(residual=residual, sink_tokens=sinks)
            tokens = self.tokens(n, dtype=dtype, seed=34)
            cache.update_and_fetch(*tokens)
            packed = self.expected_packed(cache, n)
            first = sinks if packed else 0
            kept = n - first - packed
            assert packed_tokens(cache) == [packed]
            assert residual <= kept < residual + self.block_of(cache) or not packed
            for got, want in zip(cache.decode(), tokens, strict=True):
                assert got.dtype == want.dtype and got.shape == want.shape
                assert_same(got[:, :, n - kept :], want[:, :, n - kept :], f"{dtype}, the newest {kept} of {n}")
                assert_same(got[:, :, :first], want[:, :, :first], f"{dtype}, {first} sink tokens")
            report = cache.report()
            assert (report.packed, report.exact, report.approximate) == (packed, n - packed, 0)

    def test_decoding_is_the_methods_own(self) -> None:
        """decode() gives what the codec gives for the same tokens; exact methods give the input."""
        cache, tokens = self.cache(residual=8), self.tokens(330, seed=35)
        cache.update_and_fetch(*tokens)
        n = packed_tokens(cache)[0]
        for side, got, want in zip(("keys", "values"), cache.decode(), tokens, strict=True):
            assert got.shape == want.shape and np.isfinite(np.array(got.astype(mx.float32))).all()
            if side in self.facts().sides and self.capabilities().exact:
                assert_same(got, want, f"{side} of an exact method")
            elif side in self.facts().sides:
                assert not np.array_equal(raw(got[:, :, :n]), raw(want[:, :, :n])), f"{side}: nothing was packed"

    def test_new_tokens_come_back_exact(self) -> None:
        """What an update returns holds its own tokens exactly, even those that it has packed."""
        cache = self.cache(residual=0)
        tokens = self.tokens(300, seed=36)
        feed(cache, tokens, [140])
        made = cache.update_and_fetch(*(x[:, :, 140:] for x in tokens))
        for got, want in zip(made, tokens, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            assert_same(mx.array(got)[:, :, 140:], want[:, :, 140:], "the chunk just given")

    @pytest.mark.parametrize("chunks", [[1], [1] * 37, [31, 1, 32, 33], [257], [2, 1, 1, 128, 1]])
    def test_odd_counts(self, chunks: list[int]) -> None:
        """Offset, size and returned length are the sum of the chunks, after each of them."""
        cache, tokens, done = self.cache(residual=32), self.tokens(257, seed=37), 0
        for n in chunks:
            keys, values = cache.update_and_fetch(*(x[:, :, done : done + n] for x in tokens))
            done += n
            assert cache.offset == cache.size() == keys.shape[2] == values.shape[2] == done
            assert not cache.empty()

    def test_pairs_with_another_method(self, side: Side) -> None:
        """No hook sees both sides, so the method goes with any other on the other side, whatever its block."""
        other: Side = "values" if side == "keys" else "keys"
        texts = {side: self.method, other: partner.NAME}
        cache = PackedKVCache(**texts, residual=16)  # type: ignore[arg-type]
        tokens = self.tokens(200, seed=38)
        feed(cache, tokens, [150, 50])
        assert cache._history is not None
        blocks = [bound.layout.block for bound in cache._history.bound.values()]
        assert self.block_of(cache) == math.lcm(*blocks)
        kept = cache.decode()[0 if other == "keys" else 1]
        assert_same(kept, tokens[0 if other == "keys" else 1], f"{other} of the partner")

    def test_dtype_survives_a_life(self) -> None:
        """update, single steps, trim, update: the dtype of the input in everything that comes out."""
        for dtype in ("float16", "bfloat16", "float32"):
            cache, tokens = self.cache(residual=8), self.tokens(80, dtype=dtype, seed=39)
            feed(cache, tokens, [32] + [1] * 40)
            if self.capabilities().trimmable:
                cache.trim(5)
            feed(cache, tokens, [1], cache.offset)
            assert {x.dtype for x in cache.decode()} == {tokens[0].dtype}
            queries = gaussian((1, self.kv_heads, 1, self.dim()), dtype)
            assert cache.attend(queries, scale=0.1).dtype == queries.dtype
