"""Packed pages of a batch of rows, as attention reads them."""

from __future__ import annotations

import attrs
import mlx.core as mx


@attrs.define(eq=False)
class Pages:
    """A reading of some rows' pages, what attention works on; not to be changed.

    It can be kept and read again until the store is written to: the arrays are the store's own, whatever their
    capacity, and a tile is cut from them only where it is asked for.

    Attributes:
        count: N, the pages that are read: the first of the arrays.
        depth: Pages of the longest row.
        row: For each page its row, (N,) int32; ``None`` with one row.
        table: For each row and depth the page, (B, depth) int32, 0 where a row has fewer; ``None`` where the
            pages lie depth by depth, row by row.
        held: With a table, whether row and depth have a page, (B, depth) bool.
        place: With a table, for each page its depth * B + its row, (N,) int32, -1 for a page not read.
        paged: Paged fields as stored, (N or more, H, *field.shape).
        sequence: Fields of the sequence as stored, (B, H, *field.shape).
    """

    _tile: dict[str, mx.array] | None
    count: int
    depth: int
    row: mx.array | None
    table: mx.array | None = None
    held: mx.array | None = None
    place: mx.array | None = None
    paged: dict[str, mx.array] = attrs.Factory(dict)
    sequence: dict[str, mx.array] = attrs.Factory(dict)

    @property
    def tile(self) -> dict[str, mx.array]:
        """All pages: paged fields, (N, H, *field.shape), and fields of the sequence, (N or 1, H, *field.shape)."""
        if self._tile is not None:
            return self._tile
        count, row = self.count, self.row
        tile = {name: a if a.shape[0] == count else a[:count] for name, a in self.paged.items()}
        for name, array in self.sequence.items():
            tile[name] = array if row is None else mx.take(array, row, axis=0)
        return tile

    def stored(self, name: str) -> mx.array:
        """A field as stored: paged ones (N or more, H, *field.shape), those of the sequence (B, H, *field.shape)."""
        if self._tile is not None:
            return self._tile[name]
        found = self.paged.get(name)
        return self.sequence[name] if found is None else found

    def part(self, begin: int, end: int) -> dict[str, mx.array]:
        """The tile of pages ``begin`` to ``end`` as they lie in memory."""
        if self._tile is not None or self.row is not None:
            return {name: a[begin:end] if a.shape[0] == self.count else a for name, a in self.tile.items()}
        return {name: a[begin:end] for name, a in self.paged.items()} | self.sequence

    def depths(self, begin: int, end: int, rows: int) -> dict[str, mx.array]:
        """The tile of depths ``begin`` to ``end`` of every row, depth by depth, row by row."""
        if self.table is None:
            return self.part(begin * rows, end * rows)
        ids = self.table[:, begin:end].T.reshape(-1)
        return {name: mx.take(a, ids, axis=0) for name, a in self.tile.items()}
