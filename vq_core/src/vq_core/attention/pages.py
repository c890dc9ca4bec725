"""Packed pages of a batch of rows, as attention reads them."""

from __future__ import annotations

import attrs
import mlx.core as mx


@attrs.frozen(eq=False)
class Pages:
    """A reading of some rows' pages, what attention works on.

    Attributes:
        tile: Paged fields, (N, H, *field.shape), and fields of the sequence, (N or 1, H, *field.shape).
        count: N.
        depth: Pages of the longest row.
        row: For each page its row, (N,) int32; ``None`` with one row.
        table: For each row and depth the page, (B, depth) int32, 0 where a row has fewer; ``None`` where the
            pages lie depth by depth, row by row.
        held: With a table, whether row and depth have a page, (B, depth) bool.
        place: With a table, for each page its depth * B + its row, (N,) int32, -1 for a page not read.
    """

    tile: dict[str, mx.array]
    count: int
    depth: int
    row: mx.array | None
    table: mx.array | None = None
    held: mx.array | None = None
    place: mx.array | None = None

    def part(self, begin: int, end: int) -> dict[str, mx.array]:
        """The tile of pages ``begin`` to ``end`` as they lie in memory."""
        return {name: a[begin:end] if a.shape[0] == self.count else a for name, a in self.tile.items()}

    def depths(self, begin: int, end: int, rows: int) -> dict[str, mx.array]:
        """The tile of depths ``begin`` to ``end`` of every row, depth by depth, row by row."""
        if self.table is None:
            return self.part(begin * rows, end * rows)
        ids = self.table[:, begin:end].T.reshape(-1)
        return {name: mx.take(a, ids, axis=0) for name, a in self.tile.items()}
