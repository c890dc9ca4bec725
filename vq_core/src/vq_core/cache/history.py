"""One layer's tokens: the two packed stores, the exact window, the frontier between them, flush and trim."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import mlx.core as mx

from vq_core.attention.view import CacheView, SideView, decode_depths
from vq_core.cache.store import PageStore
from vq_core.cache.window import Window, owned
from vq_core.plugins.binding import BoundSide


def frontier(tokens: int, sinks: int, residual: int, block: int) -> int:
    """f(T): how many tokens of a sequence of T that was only appended to are packed."""
    return max(0, tokens - sinks - residual) // block * block


class History:
    """Tokens of one layer, in order: sinks, packed, exact.

    Args:
        keys, values: The methods.
        residual: R; the newest R to R + block - 1 tokens are exact.
        sinks: The first tokens that stay exact.
        rows: B.
    """

    def __init__(self, keys: BoundSide, values: BoundSide, residual: int, sinks: int, rows: int):
        self.bound = {"keys": keys, "values": values}
        self.residual, self.sinks = residual, sinks
        self.block = math.lcm(keys.layout.block, values.layout.block)
        self.window = Window(rows)
        self.stores = {side: PageStore(b.layout, b.ctx.kv_heads, rows) for side, b in self.bound.items()}

    # ---- counts

    @property
    def packed(self) -> list[int]:
        """Packed tokens of each row."""
        return self.stores["keys"].tokens

    @property
    def rows(self) -> int:
        """B."""
        return len(self.window.counts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [s + n + w for s, n, w in zip(self.window.sinks, self.packed, self.window.counts, strict=True)]

    def arrays(self) -> list[mx.array]:
        """Every array held."""
        return [*self.stores["keys"].arrays(), *self.stores["values"].arrays(), *self.window.arrays()]

    # ---- growing

    def update(self, keys: mx.array, values: mx.array) -> CacheView:
        """Append L tokens (B, H, L, D) to every row and flush what has left the window.

        Returns:
            The reading that attention of these L tokens works on: they themselves are exact in it, even those
            that this very update has packed.
        """
        window, length = self.window, keys.shape[2]
        joined = window.joined(keys, values)
        width, before = joined[0].shape[2], self.lengths
        counts = [n + length for n in window.counts]
        goal = [
            max(n, frontier(t + length, self.sinks, self.residual, self.block))
            for n, t in zip(self.packed, before, strict=True)
        ]
        if goal == self.packed:
            window.keys, window.values = joined
            window.counts = counts
            return self.view()
        # For attention: what was packed by now of the tokens before this chunk.
        seen = [
            max(n, min(g, max(0, t - self.sinks) // self.block * self.block))
            for n, g, t in zip(self.packed, goal, before, strict=True)
        ]
        packing = [g - n for g, n in zip(goal, self.packed, strict=True)]
        draft = self.copy()  # the stores that drafts share are not written to
        taken = draft._flush(joined, counts, goal)
        window = draft.window
        window.counts = [n - t for n, t in zip(counts, taken, strict=True)]
        window.approximate = [max(0, a - n) for a, n in zip(window.approximate, packing, strict=True)]
        kept = max(window.counts)
        window.keys, window.values = (owned(x, width - kept, width) for x in joined)
        self.window, self.stores = window, draft.stores
        if seen == self.packed:
            return self.view()
        exact = [t + length - s - n for t, s, n in zip(before, window.sinks, seen, strict=True)]
        widest = max(exact)
        # Nothing of the cache stays lazy behind an attention that is done: lazy arrays belong to one thread.
        return self._view(seen, exact, *mx.depends([x[:, :, width - widest :] for x in joined], self.arrays()))

    def _flush(self, joined: tuple[mx.array, mx.array], counts: Sequence[int], goal: Sequence[int]) -> list[int]:
        """Pack rows up to ``goal``; returns how many tokens left the window, row by row."""
        width, taken = joined[0].shape[2], [0] * self.rows
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, (count, have, want) in enumerate(zip(counts, self.packed, goal, strict=True)):
            if want > have:
                # Rows that start alike and are filled alike can be written together.
                fills = tuple(have % store.layout.page for store in self.stores.values())
                groups.setdefault((width - count, want - have, int(have == 0), have, *fills), []).append(row)
        for (start, n, first, have, *_), rows in groups.items():
            data = joined if len(rows) == self.rows else tuple(mx.take(x, mx.array(rows), axis=0) for x in joined)
            if first and self.sinks:
                self.window.keep_sinks(rows, *(x[:, :, start : start + self.sinks] for x in data))
                start += self.sinks
            positions = mx.arange(self.sinks + have, self.sinks + have + n, dtype=mx.int32)
            positions = mx.broadcast_to(positions, (len(rows), n))
            for (side, store), x in zip(self.stores.items(), data, strict=True):
                self._write(side, store, rows, x[:, :, start : start + n], positions, bool(first))
            for row in rows:
                taken[row] = n + (self.sinks if first else 0)
        return taken

    def _write(
        self, side: str, store: PageStore, rows: list[int], x: mx.array, positions: mx.array, first: bool
    ) -> None:
        bound = self.bound[side]
        if first and bound.layout.sequence:
            block = bound.layout.block
            store.start(rows, bound.start(x[:, :, :block], positions[:, :block]))
        pick = mx.array(rows, mx.int32)
        sequence = {name: mx.take(a, pick, axis=0) for name, a in store.sequence.items()}
        store.append(rows, bound.pack(x, positions, sequence), x.shape[2])

    # ---- shrinking

    def trim(self, n: int) -> None:
        """Drop the newest n tokens of every row (at most the shortest row's).

        A cut behind the frontier brings the survivors of the cut block back as decoded, approximate tokens.
        """
        window = self.window
        goal = [t - n for t in self.lengths]
        if all(g >= s + p for g, s, p in zip(goal, window.sinks, self.packed, strict=True)):
            self._shorten(n)
            return
        parts = [self._trimmed(row, g) for row, g in enumerate(goal)]
        self.stores = {side: PageStore.join([p.stores[side] for p in parts]) for side in self.stores}
        self.window = Window.join([p.window for p in parts])

    def _shorten(self, n: int) -> None:
        window = self.window
        end, counts = window.width - n, [c - n for c in window.counts]
        if window.keys is None or window.values is None:
            return
        begin = end - max(counts)
        window.keys, window.values = owned(window.keys, begin, end), owned(window.values, begin, end)
        window.counts = counts
        # Where no sink tokens are set apart, the first of the window are the exact first tokens of the sequence.
        lead = [0 if s or p else self.sinks for s, p in zip(window.sinks, self.packed, strict=True)]
        window.approximate = [min(a, max(0, c - n)) for a, c, n in zip(window.approximate, counts, lead, strict=True)]

    def _trimmed(self, row: int, goal: int) -> History:
        """One row, alone, cut to ``goal`` tokens."""
        part = self.select([row])
        window, sinks, packed = part.window, part.window.sinks[0], part.packed[0]
        if goal >= sinks + packed:
            part._shorten(part.lengths[0] - goal)
            return part
        keep = max(0, goal - sinks) // self.block * self.block
        view = part.view()
        exact = []
        for side, stored, first in (
            ("keys", view.keys, window.sink_keys),
            ("values", view.values, window.sink_values),
        ):
            page = self.bound[side].layout.page
            pieces = []
            if not keep and first is not None and sinks:
                pieces.append(first[:, :, : min(sinks, goal)])
            if goal > sinks + keep:
                begin = keep // page
                decoded = decode_depths(view, stored, begin, -(-(goal - sinks) // page)).astype(stored.exact.dtype)
                pieces.append(decoded[:, :, keep - begin * page : goal - sinks - begin * page])
            blank = stored.exact[:, :, :0]
            exact.append(mx.concatenate(pieces, axis=2) if pieces else blank)
        window.keys, window.values = (owned(x, 0, x.shape[2]) for x in exact)
        window.counts = [exact[0].shape[2]]
        window.approximate = [max(0, goal - sinks - keep)]
        if not keep:
            # The sink tokens stand at the left of the window again, exact; what follows them is approximate.
            window.sinks, window.sink_keys, window.sink_values = [0], None, None
        for store in part.stores.values():
            store.cut([keep])
            if not keep:
                store.sequence = {}
        return part

    # ---- rows

    def select(self, rows: Sequence[int]) -> History:
        """Some rows, in the order given, as a history of its own."""
        new = self._empty(len(rows))
        new.window = self.window.select(rows)
        new.stores = {side: store.select(rows) for side, store in self.stores.items()}
        return new

    def join(self, others: Sequence[History]) -> History:
        """This history's rows and then the others'."""
        everyone = [self, *others]
        new = self._empty(sum(h.rows for h in everyone))
        new.window = Window.join([h.window for h in everyone])
        new.stores = {side: PageStore.join([h.stores[side] for h in everyone]) for side in self.stores}
        return new

    def draft(self) -> History:
        """A history to update or trim, which leaves this one as it is: both share all that does not change."""
        new = copy.copy(self)
        new.window, new.stores = self.window.copy(), dict(self.stores)
        return new

    def copy(self) -> History:
        """A history that shares the arrays: none is ever changed in place."""
        new = self._empty(self.rows)
        new.window = self.window.copy()
        new.stores = {side: store.copy() for side, store in self.stores.items()}
        return new

    def _empty(self, rows: int) -> History:
        return History(self.bound["keys"], self.bound["values"], self.residual, self.sinks, rows)

    # ---- reading

    def view(self) -> CacheView:
        """All tokens as they are stored."""
        assert self.window.keys is not None and self.window.values is not None
        return self._view(self.packed, self.window.counts, self.window.keys, self.window.values)

    def _view(self, packed: Sequence[int], exact: Sequence[int], keys: mx.array, values: mx.array) -> CacheView:
        window = self.window
        sides = {
            side: SideView(self.bound[side], self.stores[side].view(packed), x, first)
            for side, x, first in (("keys", keys, window.sink_keys), ("values", values, window.sink_values))
        }
        return CacheView(sides["keys"], sides["values"], tuple(window.sinks), tuple(packed), tuple(exact))
