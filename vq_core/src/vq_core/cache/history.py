"""One layer's tokens: the two packed stores, the exact window, the frontier between them, flush and trim."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import mlx.core as mx

from vq_core.attention.view import CacheView, SideView
from vq_core.cache.cutting import cut_row
from vq_core.cache.packing import Group, packing
from vq_core.cache.steady import Coming, Steady, room
from vq_core.cache.store import PageStore
from vq_core.cache.window import Joined, Window, owned
from vq_core.errors import CacheStateError
from vq_core.plugins.binding import BoundSide

EVERYTHING = 2**31
"""A residual window that nothing leaves."""


class History:
    """Tokens of one layer, in order: sinks, packed, exact.

    Args:
        keys, values: The methods.
        residual: R; the newest R to R + block - 1 tokens are exact.
        sinks: The first tokens that stay exact.
        rows: B.
        sliding: W, the layer attends to the newest W tokens only: older ones are dropped, whole pages at once.
            ``None``: to all.
    """

    def __init__(
        self, keys: BoundSide, values: BoundSide, residual: int, sinks: int, rows: int, sliding: int | None = None
    ):
        self.bound = {"keys": keys, "values": values}
        self.residual, self.sinks = residual, sinks
        self.block = math.lcm(keys.layout.block, values.layout.block)
        self.sliding, self._queries = sliding, 1
        self.pages = keys.layout.page, values.layout.page
        self.unit = math.lcm(*self.pages)
        self.window = Window(rows)
        self.stores = {side: PageStore(b.layout, b.ctx.kv_heads, rows) for side, b in self.bound.items()}
        self._steady: Steady | None = None

    # ---- counts

    @property
    def packed(self) -> list[int]:
        """Packed tokens of each row."""
        return self.stores["keys"].tokens

    @property
    def dropped(self) -> list[int]:
        """Tokens of each row that have left the sliding window and are gone, whole pages of both sides."""
        return self.stores["keys"].gone

    @property
    def rows(self) -> int:
        """B."""
        return len(self.window.counts)

    @property
    def held(self) -> list[int]:
        """Tokens that each row holds."""
        return [s + n + w for s, n, w in zip(self.window.sinks, self.packed, self.window.counts, strict=True)]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's sequence, dropped ones too."""
        return [d + n for d, n in zip(self.dropped, self.held, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest row's sequence."""
        return max(self.lengths) if self._steady is None else self._steady.longest + self.window.counts[0]

    def arrays(self) -> list[mx.array]:
        """Every array held."""
        return [*self.stores["keys"].arrays(), *self.stores["values"].arrays(), *self.window.arrays()]

    @property
    def nbytes(self) -> int:
        """Bytes of every array held."""
        return self.stores["keys"].nbytes() + self.stores["values"].nbytes() + self.window.nbytes

    # ---- growing

    def step(self, keys: mx.array, values: mx.array) -> tuple[History, Coming] | None:
        """What :meth:`update` would make of this history where it would only append; this one stays as it is.

        Most decode steps are of this kind. Nothing here takes longer for more packed tokens.

        Returns:
            The history after it and the reading; ``None`` where tokens would be packed or dropped, and for keys and
            values that are not like the last ones, which may be what is refused.
        """
        steady, window = self._steady, self.window
        if (
            steady is None
            or not isinstance(keys, mx.array)
            or not isinstance(values, mx.array)
            or keys.shape != steady.keys_shape
            or values.shape != steady.values_shape
            or keys.dtype != steady.dtype
            or values.dtype != steady.dtype
        ):
            return None
        length = steady.length
        if window.counts[0] + length > steady.most:
            return None
        new = History.__new__(History)
        new.__dict__.update(self.__dict__)
        new.window, new._queries = window.grown(keys, values, length), length
        return new, Coming(new._reading, steady, new.window, length, self.sliding is None)

    def _reading(self, steady: Steady, queries: int) -> CacheView:
        """The view of all tokens; of a sliding window those that the newest ``queries`` attend to together."""
        window, bound = self.window, self.bound
        columns = steady.columns + window.counts[0]
        hidden: tuple[int, ...] = ()
        if self.sliding is not None:
            shown = self._shown(self.lengths, queries)
            hidden = tuple([n - m for n, m in zip(self.held, shown, strict=True)])
            columns = max(shown)
        return CacheView(
            SideView(bound["keys"], steady.keys, None, window.sink_keys, window),
            SideView(bound["values"], steady.values, None, window.sink_values, window),
            steady.sinks, steady.packed, tuple(window.counts), steady.dropped, hidden, columns, steady.even, steady,
        )  # fmt: skip

    def _settled(self, keys: mx.array, values: mx.array, view: CacheView) -> Steady | None:
        """What the next update of this shape finds; ``None`` where it has to look at everything."""
        packed, counts = tuple(self.packed), self.window.counts
        if view.packed != packed or not self.window.width:
            return None
        lengths, held = self.lengths, self.held
        before = self.sinks + self.residual
        free = room(lengths, packed, self.dropped, before, self.block, self.sliding, self.unit)
        return Steady(
            keys.shape, values.shape, keys.dtype, keys.shape[2], counts[0] + free, max(lengths) - counts[0],
            max(held) - counts[0], view.even, view.sinks, packed, view.dropped, view.keys.pages, view.values.pages,
        )  # fmt: skip

    def update(self, keys: mx.array, values: mx.array) -> CacheView:
        """Append L tokens (B, H, L, D) to every row and flush what has left the window.

        Returns:
            The reading that attention of these L tokens works on: they themselves are exact in it, even those
            that this very update has packed.
        """
        view = self._append(keys, values)
        self._queries = keys.shape[2]
        if not self._drop():
            self._steady = self._settled(keys, values, view)
            return view
        parts = mx.depends([view.keys.exact, view.values.exact], self.arrays())
        sides = [attrs.evolve(s, exact=x) for s, x in zip((view.keys, view.values), parts, strict=True)]
        return attrs.evolve(view, keys=sides[0], values=sides[1])

    def _append(self, keys: mx.array, values: mx.array) -> CacheView:
        window, length = self.window, keys.shape[2]
        joined, dropped = window.joined(keys, values), tuple(self.dropped)
        width, shown = joined[0].width, self._shown([t + length for t in self.lengths], length)
        packs = packing(
            length, tuple(window.counts), tuple(window.sinks), tuple(self.packed), dropped,
            self.sinks, self.residual, self.block, self.pages,
        )  # fmt: skip
        if not packs.groups:
            window.keys, window.values = (x.whole() for x in joined)
            window.counts = [n + length for n in window.counts]
            return self.view(shown)
        draft = self.copy()  # the stores that drafts share are not written to
        draft._flush(joined, packs.groups)
        window = draft.window
        window.counts = list(packs.left)
        window.approximate = [max(0, a - n) for a, n in zip(window.approximate, packs.tokens, strict=True)]
        kept = max(packs.left)
        window.keys, window.values = (x.owned(width - kept, width) for x in joined)
        self.window, self.stores = window, draft.stores
        if not packs.changed:
            return self.view(shown)
        widest = max(packs.exact)
        # Nothing of the cache stays lazy behind an attention that is done: lazy arrays belong to one thread.
        recent, values = mx.depends([x.cut(width - widest, width) for x in joined], self.arrays())
        return self._view(packs.seen, packs.exact, recent, values, shown)

    def _shown(self, lengths: Sequence[int], queries: int = 1) -> list[int]:
        """How many of each row's newest tokens the last ``queries`` of them attend to, together.

        What mlx-lm's rotating cache returns: layers of one kind share a mask, whatever their caches.
        """
        if self.sliding is None:
            return list(lengths)
        if queries == 1:
            return [min(t, self.sliding) for t in lengths]
        return [min(t - queries, self.sliding - 1) + queries for t in lengths]

    def _drop(self) -> bool:
        """Let go of pages all of whose tokens have left the sliding window; returns whether there were any."""
        if self.sliding is None:
            return False
        gone = [
            max(0, min(d + n, t - self.sliding) // self.unit * self.unit - d)
            for d, n, t in zip(self.dropped, self.packed, self.lengths, strict=True)
        ]
        if not any(gone):
            return False
        self.stores = {side: store.copy() for side, store in self.stores.items()}
        for store in self.stores.values():
            store.drop(gone)
        return True

    def _flush(self, joined: tuple[Joined, Joined], groups: Sequence[Group]) -> None:
        """Pack groups of rows."""
        for group in groups:
            rows, n, first, start = list(group.rows), group.tokens, group.first, joined[0].width - group.end
            if first and self.sinks:
                self.window.keep_sinks(rows, *self._of(rows, joined, start, start + self.sinks))
                start += self.sinks
            begin = self.sinks + group.before
            positions = mx.arange(begin, begin + n, dtype=mx.int32)
            positions = positions[None] if len(rows) == 1 else mx.broadcast_to(positions, (len(rows), n))
            data = self._of(rows, joined, start, start + n)
            for (side, store), x in zip(self.stores.items(), data, strict=True):
                self._write(side, store, rows, x, positions, first)

    def _of(self, rows: list[int], joined: tuple[Joined, Joined], begin: int, end: int) -> list[mx.array]:
        """Tokens ``begin`` to ``end`` of some rows, both sides."""
        parts = [x.cut(begin, end) for x in joined]
        if len(rows) == self.rows:
            return parts
        pick = mx.array(rows, mx.int32)
        return [mx.take(x, pick, axis=0) for x in parts]

    def _write(
        self, side: str, store: PageStore, rows: list[int], x: mx.array, positions: mx.array, first: bool
    ) -> None:
        bound = self.bound[side]
        if first and bound.layout.sequence:
            block = bound.layout.block
            store.start(rows, bound.start(x[:, :, :block], positions[:, :block]))
        sequence = dict(store.sequence)
        if sequence and len(rows) < self.rows:
            pick = mx.array(rows, mx.int32)
            sequence = {name: mx.take(a, pick, axis=0) for name, a in sequence.items()}
        store.append(rows, bound.pack(x, positions, sequence), x.shape[2])

    # ---- shrinking

    def trim(self, n: int) -> None:
        """Drop the newest n tokens of every row (at most the shortest row's).

        A cut behind the frontier brings the survivors of the cut block back as decoded, approximate tokens.
        """
        window = self.window
        self._queries = 1
        goal = [t - n for t in self.held]
        if all(g >= s + p for g, s, p in zip(goal, window.sinks, self.packed, strict=True)):
            self.shorten(n)
            return
        parts = [cut_row(self, row, g) for row, g in enumerate(goal)]  # in tokens held, as goal is
        self.stores = {side: PageStore.join([p.stores[side] for p in parts]) for side in self.stores}
        self.window = Window.join([p.window for p in parts])

    def shorten(self, n: int) -> None:
        """Drop the newest n tokens of every row, all of them exact ones."""
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
        new = History.__new__(History)
        new.__dict__.update(self.__dict__)
        new.window, new.stores, new._steady = self.window.copy(), dict(self.stores), None
        return new

    def copy(self) -> History:
        """A history that shares the arrays: none is ever changed in place."""
        self.window.together()  # both have what one of them will have evaluated
        new = self.draft()
        new.stores = {side: store.copy() for side, store in self.stores.items()}
        return new

    def _empty(self, rows: int) -> History:
        return History(self.bound["keys"], self.bound["values"], self.residual, self.sinks, rows, self.sliding)

    # ---- reading

    def view(self, shown: Sequence[int] | None = None) -> CacheView:
        """All tokens as they are stored; of a sliding window those that the newest token attends to, or ``shown``."""
        if shown is None and self._steady is not None:
            return self._reading(self._steady, 1)
        assert self.window.keys is not None and self.window.values is not None
        shown = self._shown(self.lengths) if shown is None else shown
        return self._view(self.packed, self.window.counts, self.window.keys, self.window.values, shown)

    def latest(self) -> CacheView:
        """What the last update's reading held, as it is stored now.

        Raises:
            CacheStateError: some of it has left the sliding window for good.
        """
        if self.sliding is None:
            return self.view()
        shown = self._shown(self.lengths, self._queries)
        if any(n > held for n, held in zip(shown, self.held, strict=True)):
            raise CacheStateError(
                f"the sliding window of {self.sliding} has dropped tokens that the last chunk attended to"
            )
        return self.view(shown)

    def _view(
        self, packed: Sequence[int], exact: Sequence[int], keys: mx.array, values: mx.array, shown: Sequence[int]
    ) -> CacheView:
        window, bound, stores = self.window, self.bound, self.stores
        sides = (
            SideView(bound["keys"], stores["keys"].view(packed), keys, window.sink_keys),
            SideView(bound["values"], stores["values"].view(packed), values, window.sink_values),
        )
        held = [s + n + w for s, n, w in zip(window.sinks, packed, exact, strict=True)]
        hidden = () if self.sliding is None else tuple([t - n for t, n in zip(held, shown, strict=True)])
        counts = (tuple(window.sinks), tuple(packed), tuple(exact), tuple(self.dropped))
        if self.rows == 1 and not hidden:
            return CacheView(*sides, *counts, hidden, held[0], exact[0] == keys.shape[2])
        return CacheView(*sides, *counts, hidden)
