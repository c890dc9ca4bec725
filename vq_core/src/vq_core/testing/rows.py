"""Rows of a batch: joined, selected, split."""

from __future__ import annotations

import numpy as np

from vq_core.cache.shell import PackedKVCache
from vq_core.testing.kit import Kit, feed, skip
from vq_core.testing.observe import assert_same, floats, gaussian, packed_tokens, snapshot, stored, window

LENGTHS = (5, 200, 700)


class RowsConformance(Kit):
    """What a row holds does not depend on its neighbours."""

    def singles(self) -> list[PackedKVCache]:
        """Sequences of 5, 200 and 700 tokens, each in a cache of its own."""
        caches = []
        for i, n in enumerate(LENGTHS):
            caches.append(self.cache(residual=16))
            feed(caches[-1], self.tokens(n, seed=81 + i), [n // 2 + 1, n - n // 2 - 1])
        return caches

    def _same_rows(self, batch: PackedKVCache, singles: list[PackedKVCache], what: str) -> None:
        for row, alone in enumerate(singles):
            assert_same(stored(batch)[row], stored(alone)[0], f"{what}, row {row}, stored")
            assert_same(window(batch)[row], window(alone)[0], f"{what}, row {row}, window")
            for got, want in zip(batch.decode(), alone.decode(), strict=True):
                assert_same(got[row : row + 1, :, got.shape[2] - alone.offset :], want, f"{what}, row {row}, decoded")

    def test_join_select_split(self) -> None:
        """Each row keeps the bytes of its own run, in every order and number."""
        singles = self.singles()
        before = [snapshot(c) for c in singles]
        batch = PackedKVCache.join(singles)
        assert batch.offset == max(LENGTHS)
        self._same_rows(batch, singles, "joined")
        for rows in ([2, 0], [1], [0, 1, 2], [2, 1, 0], [1, 1]):
            self._same_rows(batch.select(rows), [singles[r] for r in rows], f"rows {rows}")
        for one, alone in zip(batch.split(), singles, strict=True):
            assert one.offset == alone.offset
            assert_same(snapshot(one), snapshot(alone), "split")
        self._same_rows(PackedKVCache.join([batch.select([2, 1]), singles[0]]), singles[::-1], "joined again")
        assert_same([snapshot(c) for c in singles], before, "the caches that were joined")

    def test_joined_rows_grow_alike(self) -> None:
        """After the join all rows take the same steps and keep the bytes of their own runs."""
        singles = self.singles()
        batch = PackedKVCache.join(singles)
        more = self.tokens(120, rows=len(singles), seed=85)
        for step in ([1] * 40, [80]):
            feed(batch, more, step, 0 if len(step) > 1 else 40)
        for row, alone in enumerate(singles):
            feed(alone, tuple(x[row : row + 1] for x in more), [120])  # type: ignore[arg-type]
        self._same_rows(batch, singles, "grown after the join")
        assert batch.nbytes == batch.report().bytes.held

    def test_joined_rows_trim_alike(self) -> None:
        """A trim of the batch is a trim of each row."""
        if not self.capabilities().trimmable:
            skip("trimmable=False")
        for drop in (3, 5):
            singles = self.singles()
            batch = PackedKVCache.join(singles)
            assert batch.trim(drop) == drop
            for alone in singles:
                alone.trim(drop)
            if drop < min(LENGTHS):
                self._same_rows(batch, singles, f"{drop} dropped")
            assert packed_tokens(batch) == [packed_tokens(c)[0] for c in singles]

    def test_an_even_batch(self) -> None:
        """Four rows updated together hold the bytes of four single runs."""
        keys, values = self.tokens(333, rows=4, seed=86)
        batch = self.cache(residual=32)
        feed(batch, (keys, values), [300, 1, 32])
        for row in range(4):
            alone = self.cache(residual=32)
            feed(alone, (keys[row : row + 1], values[row : row + 1]), [333])
            assert_same(stored(batch)[row], stored(alone)[0], f"row {row} of 4, stored")
            assert_same(window(batch)[row], window(alone)[0], f"row {row} of 4, window")

    def test_attention_of_unequal_rows(self) -> None:
        """Each row of an uneven batch attends as it does alone, one query and many."""
        singles = self.singles()
        batch = PackedKVCache.join(singles)
        for length, mask in ((1, None), (5, "causal"), (20, "causal")):
            queries = gaussian((len(singles), 2 * self.kv_heads, length, self.dim()), seed=87)
            got = floats(batch.attend(queries, scale=self.dim() ** -0.5, mask=mask))
            for row, alone in enumerate(singles):
                if length > alone.offset:
                    continue
                want = floats(alone.attend(queries[row : row + 1], scale=self.dim() ** -0.5, mask=mask))
                error = np.sqrt(np.square(got[row] - want[0]).mean() / np.square(want).mean())
                assert error <= self.tolerance["float16"], f"row {row}, {length} queries: relative error {error:.2e}"

    def test_nan_stays_in_its_row(self) -> None:
        """A row of NaN changes what it attends to, and nothing of its neighbours."""
        clean, hit = self.singles(), self.singles()
        more = self.tokens(40, seed=88)
        for one in (*clean, *hit):
            feed(one, more, [40])
        spoilt = self.cache(residual=16)
        feed(spoilt, tuple(x * float("nan") for x in self.tokens(240, seed=89)), [240])  # type: ignore[arg-type]
        hit[1] = spoilt
        batches = [PackedKVCache.join(caches) for caches in (clean, hit)]
        for length in (1, 20):
            queries = gaussian((len(clean), 2 * self.kv_heads, length, self.dim()), seed=90)
            want, got = (floats(batch.attend(queries, scale=0.1)) for batch in batches)
            assert np.isnan(got[1]).all()
            assert_same(got[[0, 2]], want[[0, 2]], f"{length} queries, the other rows")
