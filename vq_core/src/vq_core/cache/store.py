"""The paged store: one side's packed history, for all rows of a batch.

Each field is one array whose leading axis is the page, (capacity, H, *field.shape).  A row (a sequence) owns
a list of page numbers and a count of tokens; its first token lies at the start of its first page whatever the
other rows hold, and padding is never stored.  Pages in front make every range of pages one contiguous piece of
memory: MLX's quantized operations copy a gapped slice on CPU and Metal and refuse it on CUDA.

Why not (B, H, pages, ...): appending would write between other heads' pages, rows of unequal length would store
padding, and a tile of pages would be a gapped slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from vq_core.api.layout import Field, Layout
from vq_core.attention.pages import Pages

SPARE_TOKENS = 128
SPARE_SHARE = 0.03


def spare_allowed(tokens: int) -> int:
    """Tokens' worth of capacity that a store of so many tokens may hold unused."""
    return max(SPARE_TOKENS, int(SPARE_SHARE * tokens))


def _leading(array: mx.array, n: int, copy: bool = False) -> mx.array:
    """The first n of the leading axis, in memory of their own; a slice would keep all of its array alive."""
    return array if n == array.shape[0] and not copy else mx.take(array, mx.arange(n, dtype=mx.int32), axis=0)


def _along(array: mx.array, axis: int, begin: int, end: int) -> mx.array:
    if (begin, end) == (0, array.shape[axis]):
        return array
    return array[(slice(None),) * axis + (slice(begin, end),)]


def _by_page(piece: mx.array, axis: int, length: int, depth: int) -> mx.array:
    """Rows (B, H, ...) of so many depths, the last perhaps not full, as pages (depth * B, H, *field.shape)."""
    shape = piece.shape
    short = depth * length - shape[axis]
    if short:
        piece = mx.pad(piece, [(0, short if i == axis else 0) for i in range(piece.ndim)])
    if depth == 1:
        return piece
    if shape[0] == 1:
        return piece.reshape(*shape[1:axis], depth, length, *shape[axis + 1 :]).moveaxis(axis - 1, 0)
    split = piece.reshape(*shape[:axis], depth, length, *shape[axis + 1 :])
    return mx.moveaxis(split, axis, 0).flatten(0, 1)


class PageStore:
    """Packed history of one side.

    Args:
        layout: The method's layout.
        heads: KV heads, H.
        rows: Rows of the batch, B.

    Attributes:
        tokens: Tokens held of each row.
        gone: Tokens of each row that were dropped from its front, whole pages.
        owned: Page numbers of each row.
    """

    def __init__(self, layout: Layout, heads: int, rows: int):
        self.layout = layout
        self.heads = heads
        self.tokens = [0] * rows
        self.gone = [0] * rows
        self.owned: list[list[int]] = [[] for _ in range(rows)]
        self.paged: dict[str, mx.array] = {}
        self.sequence: dict[str, mx.array] = {}
        self.capacity = 0
        self._views: dict[tuple[int, ...], Pages] = {}

    def copy(self) -> PageStore:
        """A store of its own that shares the arrays: no array is ever changed in place."""
        new = PageStore.__new__(PageStore)
        new.layout, new.heads, new.capacity, new._views = self.layout, self.heads, self.capacity, {}
        new.tokens, new.gone, new.owned = list(self.tokens), list(self.gone), [list(o) for o in self.owned]
        new.paged, new.sequence = dict(self.paged), dict(self.sequence)
        return new

    @property
    def rows(self) -> int:
        """B."""
        return len(self.tokens)

    @property
    def used(self) -> int:
        """Pages that hold tokens."""
        return sum(map(len, self.owned))

    def arrays(self) -> list[mx.array]:
        """Every array held, spare capacity included, and the page tables that attention on a batch uses."""
        return [*self.paged.values(), *self.sequence.values(), *self._tables()]

    def _tables(self) -> list[mx.array]:
        views = list(self._views.values())  # another thread may ask, too
        return [a for v in views for a in (v.row, v.table, v.held, v.place) if a is not None]

    def nbytes(self, codes: bool | None = None) -> int:
        """Bytes held, spare capacity included; of codes or of metadata only where asked."""
        kinds = {f.name: f.codes for f in self.layout.fields}
        held = [*self.paged.items(), *self.sequence.items()]
        tables = 0 if codes else sum(a.nbytes for a in self._tables())
        return tables + sum(a.nbytes for name, a in held if codes is None or kinds[name] == codes)

    def spare_bytes(self, codes: bool | None = None) -> int:
        """Bytes of capacity that no token uses; of codes or of metadata only where asked."""
        kinds = {f.name: f.codes for f in self.layout.fields}
        places = self.capacity * self.layout.page
        return sum(
            array.nbytes - array.nbytes * sum(self.tokens) // places
            for name, array in self.paged.items()
            if codes is None or kinds[name] == codes
        )

    # ---- writing

    def append(self, rows: Sequence[int], data: Mapping[str, mx.array], n: int) -> None:
        """Add n tokens, whole blocks, to each of ``rows``; all of them must be filled to the same place of a page.

        Args:
            rows: Row numbers, ascending.
            data: Paged fields (len(rows), H, *field.shape), n tokens along the token axis.
            n: Tokens.
        """
        self._views.clear()
        page = self.layout.page
        fill = self.tokens[rows[0]] % page
        head = min(n, page - fill) if fill else 0
        depth = -(-(n - head) // page)
        first = self.used
        if head:
            self._write_partial([self.owned[r][-1] for r in rows], data, fill, head)
        if depth:
            total = sum(self.tokens) + n * len(rows)
            self._extend(data, head, n, depth, first, first + depth * len(rows), total)
            for i, row in enumerate(rows):
                self.owned[row].extend(range(first + i, first + depth * len(rows), len(rows)))
        for row in rows:
            self.tokens[row] += n

    def start(self, rows: Sequence[int], data: Mapping[str, mx.array]) -> None:
        """Set the fields of the sequence of ``rows``, (len(rows), H, *field.shape)."""
        self._views.clear()
        for field in self.layout.sequence:
            value = data[field.name]
            if len(rows) == self.rows:
                self.sequence[field.name] = _leading(value, self.rows, copy=True)
                continue
            old = self.sequence.get(field.name)
            if old is None:
                old = mx.zeros((self.rows, *value.shape[1:]), value.dtype)
            new = old.reshape(old.shape)  # a wrapper of its own: what was handed out must not change
            new[mx.array(list(rows))] = value
            self.sequence[field.name] = new

    def _write_partial(self, ids: list[int], data: Mapping[str, mx.array], fill: int, n: int) -> None:
        together = ids == list(range(ids[0], ids[0] + len(ids)))
        runs = [(0, len(ids))] if together else [(i, i + 1) for i in range(len(ids))]
        page = self.layout.page
        for field, axis, length in self.layout.rows:
            rows = data[field.name]
            old = self._widen(field, rows)
            new = old.reshape(old.shape)
            begin, end = length * fill // page, length * (fill + n) // page
            piece = _along(rows, axis, 0, end - begin)
            for a, b in runs:
                place = (slice(ids[a], ids[b - 1] + 1), *(slice(None),) * (axis - 1), slice(begin, end))
                new[place] = piece if together else piece[a:b]
            self.paged[field.name] = new

    def _extend(
        self, data: Mapping[str, mx.array], begin: int, end: int, depth: int, used: int, needed: int, total: int
    ) -> None:
        """Write tokens ``begin`` to ``end`` of ``data`` as new pages ``used`` to ``needed``."""
        page, rows = self.layout.page, (needed - used) // depth
        full, inside = (end - begin) // page, needed <= self.capacity
        spare = 0 if inside else self._spare_pages(needed, total)
        blank = needed - used - full * rows
        for field, axis, length in self.layout.rows:
            piece = data[field.name]
            if begin:
                piece = _along(piece, axis, length * begin // page, length * end // page)
            old = self._widen(field, piece)
            if inside:
                new = old.reshape(old.shape)
                new[used:needed] = _by_page(piece, axis, length, depth)
            else:
                first, rest = piece, None
                if blank:
                    first, rest = (
                        _along(piece, axis, 0, full * length),
                        _along(piece, axis, full * length, piece.shape[axis]),
                    )
                parts = [old if used == old.shape[0] else old[:used]] if used else []
                if full:
                    whole = _by_page(first, axis, length, full)
                    parts.append(whole if whole.dtype == old.dtype else whole.astype(old.dtype))
                if blank or (spare and parts[-1].shape[0] < spare):
                    parts.append(mx.zeros((blank + spare, self.heads, *field.shape), old.dtype))
                elif spare:
                    parts.append(parts[-1][:spare])  # anything: a page is written as a whole; zeros are a launch more
                new = mx.concatenate(parts) if len(parts) > 1 else mx.contiguous(parts[0])
                if rest is not None:
                    new[(slice(needed - rows, needed), *(slice(None),) * (axis - 1), slice(0, rest.shape[axis]))] = rest
            self.paged[field.name] = new
        if not inside:
            self.capacity = new.shape[0]

    def _widen(self, field: Field, rows: mx.array) -> mx.array:
        """The field's array, converted to the wide dtype if these rows need it."""
        old = self.paged.get(field.name)
        if old is None:
            old = mx.zeros((0, self.heads, *field.shape), rows.dtype)
        dtype = rows.dtype
        return old if old.dtype == dtype or dtype.size <= old.dtype.size else old.astype(dtype)

    def _spare_pages(self, needed: int, tokens: int) -> int:
        """Pages to add beyond the needed ones, so that capacity not used stays within 128 tokens or 3%."""
        page = self.layout.page
        allowed = spare_allowed(tokens) - (needed * page - tokens)
        return max(0, allowed // page)

    # ---- cutting, selecting, joining

    def cut(self, tokens: Sequence[int]) -> None:
        """Keep the first ``tokens[b]`` tokens, whole blocks, of each row; what follows them is zeroed or freed."""
        keep = [owned[: -(-n // self.layout.page)] for owned, n in zip(self.owned, tokens, strict=True)]
        self._keep(keep, list(tokens), range(self.rows))
        for row, n in enumerate(tokens):
            if n % self.layout.page:
                # A stale scale of NaN would turn the zero weight of an empty place into NaN.
                self._write_partial([self.owned[row][-1]], self._blank(n), n % self.layout.page, -n % self.layout.page)

    def drop(self, tokens: Sequence[int]) -> None:
        """Let go of the first ``tokens[b]`` tokens, whole pages, of each row."""
        page = self.layout.page
        self.gone = [before + n for before, n in zip(self.gone, tokens, strict=True)]
        owned = [pages[n // page :] for pages, n in zip(self.owned, tokens, strict=True)]
        self._keep(owned, [have - n for have, n in zip(self.tokens, tokens, strict=True)], range(self.rows))

    def select(self, rows: Sequence[int]) -> PageStore:
        """A store of its own with copies of some rows, in the order given."""
        new = PageStore(self.layout, self.heads, len(rows))
        new.paged, new.capacity = dict(self.paged), self.capacity
        new.sequence, new.gone = dict(self.sequence), [self.gone[r] for r in rows]
        new._keep([self.owned[r] for r in rows], [self.tokens[r] for r in rows], rows)
        return new

    @classmethod
    def join(cls, stores: Sequence[PageStore]) -> PageStore:
        """All rows of several stores of one layout, in order."""
        first = stores[0]
        new = cls(first.layout, first.heads, sum(s.rows for s in stores))
        offsets, total = [], 0
        for store in stores:
            offsets.append(total)
            total += store.used
        new.tokens = [n for s in stores for n in s.tokens]
        new.gone = [n for s in stores for n in s.gone]
        compact = [s.select(range(s.rows)) for s in stores]
        new.owned = [[p + o for p in owned] for s, o in zip(compact, offsets, strict=True) for owned in s.owned]
        for field in first.layout.fields:
            if field.axis is None:
                held = [s.sequence.get(field.name) for s in compact]
                like = next((a for a in held if a is not None), None)
                if like is not None:
                    blank = [mx.zeros((s.rows, *like.shape[1:]), like.dtype) for s in compact]
                    new.sequence[field.name] = mx.concatenate(
                        [b if a is None else a for a, b in zip(held, blank, strict=True)]
                    )
            else:
                parts = [_leading(s.paged[field.name], s.used) for s in compact if s.used]
                if parts:
                    widest = max((p.dtype for p in parts), key=lambda d: d.size)
                    new.paged[field.name] = mx.concatenate([p.astype(widest) for p in parts])
        new.capacity = total
        return new

    def _keep(self, owned: list[list[int]], tokens: list[int], rows: Iterable[int]) -> None:
        """Make ``owned`` (page numbers of today) the whole content, pages in depth-first order."""
        self._views.clear()
        order = [(d, b) for d in range(max(map(len, owned), default=0)) for b in range(len(owned)) if d < len(owned[b])]
        ids = [owned[b][d] for d, b in order]
        tidy = ids == list(range(len(ids)))
        spare = self.capacity * self.layout.page - sum(tokens)
        if ids and not (tidy and spare <= spare_allowed(sum(tokens))):
            take = mx.array(ids, mx.int32)
            self.paged = {name: mx.take(array, take, axis=0) for name, array in self.paged.items()}
            self.capacity = len(ids)
        elif not ids:
            self.paged, self.capacity = {}, 0
        self.owned = [[] for _ in owned]
        for number, (_, b) in enumerate(order):
            self.owned[b].append(number)
        self.tokens = tokens
        which = list(rows)
        if not any(tokens) and not any(self.gone):  # a row's sequence starts anew with its first block
            self.sequence = {}
        if self.sequence and which != list(range(next(iter(self.sequence.values())).shape[0])):
            pick = mx.array(which, mx.int32)
            self.sequence = {name: mx.take(array, pick, axis=0) for name, array in self.sequence.items()}

    def _blank(self, n: int) -> dict[str, mx.array]:
        rest = -n % self.layout.page
        blank = {}
        for field in self.layout.paged:
            shape = list(field.shape)
            shape[field.axis or 0] = self.layout.units(field, rest)
            blank[field.name] = mx.zeros((1, self.heads, *shape), self.paged[field.name].dtype)
        return blank

    # ---- reading

    def view(self, tokens: Sequence[int] | None = None) -> Pages:
        """The pages of the first ``tokens[b]`` tokens of each row (all by default); kept until the next write."""
        tokens = tuple(self.tokens if tokens is None else tokens)
        if tokens not in self._views:
            self._views[tokens] = self._read(tokens)
        return self._views[tokens]

    def _read(self, tokens: tuple[int, ...]) -> Pages:
        pages = [-(-n // self.layout.page) for n in tokens]
        depth, rows = max(pages), self.rows
        regular = all(owned[: pages[b]] == list(range(b, b + depth * rows, rows)) for b, owned in enumerate(self.owned))
        count = depth * rows if regular else self.used
        row = None
        extra: dict[str, mx.array] = {}
        if rows > 1:
            of, place = [0] * count, [-1] * count
            for b, owned in enumerate(self.owned):
                for d, number in enumerate(owned):
                    if number < count:
                        of[number] = b
                        place[number] = d * rows + b if d < pages[b] else -1
            row = mx.array(of, mx.int32)
            if not regular:
                extra = {
                    "table": mx.array([(o[:n] + [0] * depth)[:depth] for o, n in zip(self.owned, pages, strict=True)]),
                    "held": mx.array([[d < n for d in range(depth)] for n in pages]),
                    "place": mx.array(place, mx.int32),
                }
        # Copies: a later write exchanges arrays in the store's own dictionaries.
        return Pages(None, count, depth, row, paged=dict(self.paged), sequence=dict(self.sequence), **extra)
