"""Trim and rewind."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_core.cache.shell import PackedKVCache
from vq_core.errors import CacheStateError, SettingsError
from vq_core.testing.kit import Kit, feed, few, skip
from vq_core.testing.observe import assert_same, floats, gaussian, packed_tokens, snapshot, stored, window

LENGTH = 420


class TrimmingConformance(Kit):
    """Dropping the newest tokens, within the window and behind the frontier."""

    def _needs_trim(self) -> None:
        if not self.capabilities().trimmable:
            skip("trimmable=False")

    @few
    @given(drop=st.integers(0, LENGTH), extra=st.integers(1, 200), sinks=st.sampled_from([0, 4]))
    def test_trim_and_regrow(self, drop: int, extra: int, sinks: int) -> None:
        """After a trim the cache is one of fewer tokens, and grows again as a fresh one would."""
        self._needs_trim()
        self._trim_and_regrow(drop, extra, sinks)

    @pytest.mark.parametrize("drop", [1, 63, 64, 65, 96, 127, 128, 129, 200, 300, LENGTH - 4, LENGTH - 1, LENGTH])
    def test_trim_at(self, drop: int) -> None:
        """The lengths at which something happens: window, frontier, block, page, sink tokens, everything."""
        self._needs_trim()
        self._trim_and_regrow(drop, 150, 4 if drop == LENGTH - 4 else 0)

    def _trim_and_regrow(self, drop: int, extra: int, sinks: int) -> None:
        total = LENGTH - drop + extra
        tokens = self.tokens(LENGTH + extra, seed=71)
        what = f"{LENGTH} tokens, {drop} dropped, {extra} added, {sinks} sinks"
        cache, fresh = self.cache(sink_tokens=sinks), self.cache(sink_tokens=sinks)
        feed(cache, tokens, [LENGTH])
        before, packed = cache.decode(), packed_tokens(cache)[0]
        assert cache.trim(drop) == drop
        assert cache.offset == LENGTH - drop and cache.is_trimmable()
        keep = packed_tokens(cache)[0]
        assert keep <= packed and keep <= max(0, LENGTH - drop - sinks)
        approximate = cache.report().approximate
        if drop < LENGTH:
            assert_same(cache.decode(), tuple(x[:, :, : LENGTH - drop] for x in before), f"{what}: the survivors")
        if drop <= LENGTH - packed - sinks:
            assert (keep, approximate) == (packed, 0), f"{what}: a rewind inside the window is exact"
        # The same tokens follow, so that a fresh cache holds the same sequence.
        feed(cache, tokens, [extra], LENGTH - drop)
        feed(fresh, tokens, [total])
        goal = packed_tokens(fresh)[0]
        assert packed_tokens(cache)[0] == max(keep, goal), f"{what}: frontier"
        if approximate == 0 and keep <= goal:
            assert_same(stored(cache), stored(fresh), f"{what}: stored")
            assert_same(window(cache), window(fresh), f"{what}: window")
            return
        self._near(cache, fresh, tokens, keep + sinks, keep + sinks + approximate, what)

    def _near(
        self, cache: PackedKVCache, fresh: PackedKVCache, tokens: tuple[mx.array, mx.array],
        begin: int, end: int, what: str,
    ) -> None:  # fmt: skip
        """Equal in front of the cut; behind it, in the blocks that were coded twice, one more error of the kind."""
        assert cache._history is not None
        block = cache._history.block
        last = -(-end // block) * block + block
        for side, got, want, x in zip(("keys", "values"), cache.decode(), fresh.decode(), tokens, strict=True):
            assert_same(got[:, :, :begin], want[:, :, :begin], f"{what}: {side} in front of the cut")
            if cache._history.packed == fresh._history.packed:  # type: ignore[union-attr]
                assert_same(got[:, :, last:], want[:, :, last:], f"{what}: {side} after the cut block")
            true = floats(x[:, :, : got.shape[2]])
            twice, once = (np.square(floats(a) - true)[:, :, begin:last].sum() for a in (got, want))
            usual = np.square(floats(want) - true).mean() * true[:, :, begin:last].size
            assert twice <= 4 * max(once, usual) + 1e-9, f"{what}: {side}, error {twice:.4g}, coded once {once:.4g}"

    def test_small_sequence(self) -> None:
        """Ten tokens, six dropped, twelve added: nothing later counts as flushed already."""
        self._needs_trim()
        cache, fresh, tokens = self.cache(residual=0), self.cache(residual=0), self.tokens(22, seed=72)
        feed(cache, tokens, [10])
        cache.trim(6)
        assert cache.offset == 4 and packed_tokens(cache)[0] <= 4
        feed(cache, tokens, [12], 4)
        feed(fresh, tokens, [16])
        assert packed_tokens(cache) == packed_tokens(fresh)
        assert cache.decode()[0].shape == fresh.decode()[0].shape

    def test_trim_again_and_again(self) -> None:
        """Draft and reject, 60 times across blocks and pages: offsets and shapes stay right."""
        self._needs_trim()
        cache, tokens, n = self.cache(residual=8), self.tokens(400, seed=73), 0
        for step in range(60):
            feed(cache, tokens, [5], n)
            n += 5
            n -= cache.trim(step % 4)
            assert cache.offset == n == cache.decode()[0].shape[2]
        assert cache.report().tokens == n

    def test_nan_goes_with_its_tokens(self) -> None:
        """What a trim has dropped is gone: a NaN left in an emptied place would come back times a weight of zero."""
        self._needs_trim()
        cache, (keys, values) = self.cache(residual=0), self.tokens(200, seed=75)
        bad = mx.array(float("nan"), keys.dtype)
        cache.update_and_fetch(*(mx.concatenate([x[:, :, :150], x[:, :, 150:] * bad], axis=2) for x in (keys, values)))
        cache.trim(200 - 128)
        queries = gaussian((1, 2 * self.kv_heads, 1, self.dim()), seed=76)
        assert np.isfinite(floats(cache.attend(queries, scale=0.1))).all(), f"NaN came back, {cache.offset} tokens"
        cache.trim(65)
        assert np.isfinite(floats(cache.attend(queries, scale=0.1))).all(), f"NaN came back, {cache.offset} tokens"
        feed(cache, (keys, values), [137], cache.offset)
        assert np.isfinite(floats(cache.attend(queries, scale=0.1))).all(), f"NaN came back, {cache.offset} tokens"

    def test_trim_more_than_there_is(self) -> None:
        """trim says how many tokens it dropped: at most all; a negative count is an error."""
        self._needs_trim()
        cache = self.filled(100)
        with pytest.raises(SettingsError, match="-1"):
            cache.trim(-1)
        assert cache.trim(1000) == 100 and cache.empty() and cache.trim(1) == 0
        with pytest.raises(CacheStateError):
            cache.decode()
        cache.update_and_fetch(*self.tokens(3))
        assert cache.offset == 3

    def test_refusal(self) -> None:
        """A method that cannot be cut says so from the start, refuses, and nothing changes; the window can be rewound.

        From the start: mlx-lm asks an empty cache before it speculates, and never again.
        """
        if self.capabilities().trimmable:
            skip("trimmable=True")
        assert not self.cache().is_trimmable()
        cache = self.filled(40)
        assert packed_tokens(cache) == [0] and not cache.is_trimmable()
        assert cache.trim(10) == 10 and cache.offset == 30
        cache = self.filled(300)
        assert not cache.is_trimmable()
        before = snapshot(cache)
        with pytest.raises(CacheStateError, match="trim"):
            cache.trim(290)
        assert_same(snapshot(cache), before, "after a refused trim")
        assert cache.trim(10) == 10 and cache.offset == 290

    def test_copies_are_independent(self) -> None:
        """A copy and its original go separate ways."""
        import copy

        cache, tokens = self.cache(residual=8), self.tokens(300, seed=74)
        feed(cache, tokens, [200])
        before = snapshot(cache)
        twin = copy.deepcopy(cache)
        for _ in self._changes(twin, tokens):
            assert_same(snapshot(cache), before, "the original after its copy changed")
        other = snapshot(twin)
        feed(cache, tokens, [100], 200)
        assert_same(snapshot(twin), other, "the copy after its original grew")

    def _changes(self, cache: PackedKVCache, tokens: tuple[mx.array, mx.array]) -> Iterator[None]:
        feed(cache, tokens, [1] * 20, 200)
        yield
        feed(cache, tokens, [80], 220)
        yield
        if self.capabilities().trimmable:
            cache.trim(150)
            yield
            feed(cache, tokens, [60], 150)
            yield
