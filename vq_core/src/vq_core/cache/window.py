"""The exact tokens of a layer: the newest ones, and the first few of each sequence."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import mlx.core as mx


def owned(x: mx.array, begin: int, end: int) -> mx.array:
    """Tokens ``begin`` to ``end`` of (B, H, S, D) in memory of their own."""
    if begin == end:  # nothing to copy: no launch of nothing
        return mx.contiguous(mx.take(x, mx.arange(begin, end, dtype=mx.int32), axis=2))
    # MLX copies unless the slice is in order and its memory little larger than it.
    return mx.contiguous(x if (begin, end) == (0, x.shape[2]) else x[:, :, begin:end])


class Joined:
    """Tokens that are held with new ones at their right, of which only what is asked for is put together.

    Attributes:
        width: Tokens.
    """

    def __init__(self, held: mx.array | None, new: mx.array):
        self._held, self._new = held, new
        self._before = 0 if held is None else held.shape[2]
        self.width: int = self._before + new.shape[2]

    def cut(self, begin: int, end: int) -> mx.array:
        """Tokens ``begin`` to ``end``, (B, H, end - begin, D); what was given, where that is all of it."""
        before = self._before
        if self._held is None or begin >= before:
            begin, end = begin - before, end - before
            return self._new if (begin, end) == (0, self._new.shape[2]) else self._new[:, :, begin:end]
        held = self._held if begin == 0 and end >= before else self._held[:, :, begin:end]
        if end <= before:
            return held
        new = self._new if end == self.width else self._new[:, :, : end - before]
        return mx.concatenate([held, new], axis=2)

    def owned(self, begin: int, end: int) -> mx.array:
        """The same in memory of its own."""
        before = self._before
        if self._held is None or begin >= before:
            return owned(self._new, begin - before, end - before)
        return owned(self._held, begin, end) if end <= before else self.cut(begin, end)

    def whole(self) -> mx.array:
        """All tokens, in memory of their own."""
        return self.owned(0, self.width)


Held = tuple[mx.array | None, mx.array | None, tuple[mx.array, mx.array] | None]
"""Keys, values, and keys and values that have not joined them."""


class Window:
    """Exact tokens, each row's aligned at the right.

    The tokens of the last step are held apart until somebody reads them: attention that reads all tokens anyway can
    write the joined window by the way, which saves a decode step four small copies.

    Attributes:
        counts: Tokens of each row.
        approximate: How many of them, the oldest that are no sink tokens, came back from codes by a trim.
        sink_keys, sink_values: (B, H, s, D) first tokens, ``None`` while no row has passed its first block.
        sinks: First tokens held there for each row, 0 or s.
        anchored: Whether ``keys`` was given dependencies, which then hold for all that comes after.
    """

    def __init__(self, rows: int):
        self._held: Held = (None, None, None)
        self._thread = 0
        self.counts = [0] * rows
        self.approximate = [0] * rows
        self.sink_keys: mx.array | None = None
        self.sink_values: mx.array | None = None
        self.sinks = [0] * rows
        self.anchored = False

    @property
    def keys(self) -> mx.array | None:
        """(B, H, W, D), ``None`` before the first update."""
        return self.together()[0]

    @keys.setter
    def keys(self, keys: mx.array | None) -> None:
        self._held = (keys, self.together()[1], None)

    @property
    def values(self) -> mx.array | None:
        """(B, H, W, D), ``None`` before the first update."""
        return self.together()[1]

    @values.setter
    def values(self, values: mx.array | None) -> None:
        self._held = (self.together()[0], values, None)

    def together(self) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values with the new tokens, which have joined them from now on.

        Not for another thread than that of the step, which gets arrays of its own: lazy arrays belong to a thread, and
        who looks at a cache must not leave it what its own thread cannot evaluate.
        """
        keys, values, new = self._held  # at once: another thread may put another tuple in its place
        if new is None or keys is None or values is None:
            return keys, values
        made = mx.concatenate([keys, new[0]], 2), mx.concatenate([values, new[1]], 2)
        if threading.get_ident() == self._thread:
            self.settle(*made)
        return made

    def exact(self, side: str) -> mx.array:
        """All tokens of a side."""
        found = self.keys if side == "keys" else self.values
        assert found is not None
        return found

    def parts(self) -> tuple[mx.array, mx.array, mx.array, mx.array] | None:
        """Old and new keys, old and new values; ``None`` where all have joined."""
        keys, values, new = self._held
        return None if new is None or keys is None or values is None else (keys, new[0], values, new[1])

    def settle(self, keys: mx.array, values: mx.array) -> None:
        """The same tokens, joined."""
        self._held = (keys, values, None)

    def depend(self, on: mx.array) -> None:
        """Let the held keys, and what is joined to them, be evaluated only together with an array."""
        assert self.keys is not None
        self.keys, self.anchored = mx.depends(self.keys, on), True

    def arrays(self) -> list[mx.array]:
        """Every array held."""
        return [a for a in (*self.together(), self.sink_keys, self.sink_values) if a is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, the new tokens joined."""
        keys, values, new = self._held
        return sum(a.nbytes for a in (keys, values, *(new or ()), self.sink_keys, self.sink_values) if a is not None)

    @property
    def width(self) -> int:
        """W."""
        keys, _, new = self._held
        return (0 if keys is None else keys.shape[2]) + (0 if new is None else new[0].shape[2])

    def spare_bytes(self) -> int:
        """Bytes at the left of rows that are shorter than the longest."""
        spare, width = 0, self.width
        first = 0 if self.sink_keys is None else self.sink_keys.shape[2]
        for held, counts, places in (
            (self._held[:2], self.counts, width),
            ((self.sink_keys, self.sink_values), self.sinks, first),
        ):
            for a in held:
                if a is not None:
                    spare += a.shape[1] * a.shape[3] * a.dtype.size * (a.shape[0] * places - sum(counts))
        return spare

    def joined(self, keys: mx.array, values: mx.array) -> tuple[Joined, Joined]:
        """The window with new tokens (B, H, L, D) at its right."""
        held = (self.keys, self.values) if self.width else (None, None)
        if self.anchored and self.keys is not None:
            # A part without the held tokens has nothing else that it would take their dependencies from.
            keys = mx.depends(keys, self.keys)
        return Joined(held[0], keys), Joined(held[1], values)

    def grown(self, keys: mx.array, values: mx.array, length: int) -> Window:
        """A window, not empty, with L new tokens at its right; this one stays as it is."""
        held = self.together()
        new = Window.__new__(Window)
        new.__dict__.update(self.__dict__)
        # Arrays of our own over the same numbers: the caller may write into his.
        new._held = (*held, (keys.astype(keys.dtype), values.astype(values.dtype)))
        new._thread = threading.get_ident()
        new.counts = [n + length for n in self.counts]
        return new

    def keep_sinks(self, rows: Sequence[int], keys: mx.array, values: mx.array) -> None:
        """Store the first tokens (len(rows), H, s, D) of rows that flush for the first time."""
        count = keys.shape[2]
        for name, new in (("sink_keys", keys), ("sink_values", values)):
            held = getattr(self, name)
            if len(rows) == len(self.counts):
                setattr(self, name, owned(new, 0, count))
                continue
            held = mx.zeros((len(self.counts), *new.shape[1:]), new.dtype) if held is None else held.reshape(held.shape)
            held[mx.array(list(rows))] = new
            setattr(self, name, held)
        for row in rows:
            self.sinks[row] = count

    def copy(self) -> Window:
        """A window that shares the arrays: none is changed in place."""
        new = Window.__new__(Window)
        new.__dict__.update(self.__dict__)
        new.counts, new.approximate, new.sinks = list(self.counts), list(self.approximate), list(self.sinks)
        return new

    def select(self, rows: Sequence[int]) -> Window:
        """Some rows, cut to their longest."""
        new = Window(len(rows))
        new.counts = [self.counts[r] for r in rows]
        new.approximate = [self.approximate[r] for r in rows]
        new.sinks = [self.sinks[r] for r in rows]
        if self.keys is not None and self.values is not None:
            pick, width = mx.array(list(rows), mx.int32), max(new.counts)
            new.keys = owned(mx.take(self.keys, pick, axis=0), self.width - width, self.width)
            new.values = owned(mx.take(self.values, pick, axis=0), self.width - width, self.width)
            if self.sink_keys is not None and self.sink_values is not None and any(new.sinks):
                new.sink_keys = mx.take(self.sink_keys, pick, axis=0)
                new.sink_values = mx.take(self.sink_values, pick, axis=0)
        return new

    @classmethod
    def join(cls, windows: Sequence[Window]) -> Window:
        """The rows of several windows, in order; shorter ones get zeros at their left."""
        new = cls(sum(len(w.counts) for w in windows))
        new.counts = [n for w in windows for n in w.counts]
        new.approximate = [n for w in windows for n in w.approximate]
        new.sinks = [n for w in windows for n in w.sinks]
        for name in ("keys", "values", "sink_keys", "sink_values"):
            held = [getattr(w, name) for w in windows]
            like = next((a for a in held if a is not None), None)
            if like is None:
                continue
            width = max(a.shape[2] for a in held if a is not None)
            blank = [mx.zeros((len(w.counts), like.shape[1], width, like.shape[3]), like.dtype) for w in windows]
            parts = [b if a is None else _left_padded(a, width) for a, b in zip(held, blank, strict=True)]
            setattr(new, name, mx.concatenate(parts))
        return new


def _left_padded(a: mx.array, width: int) -> mx.array:
    short = width - a.shape[2]
    return mx.pad(a, [(0, 0), (0, 0), (short, 0), (0, 0)]) if short else a
