"""A consistent reading of one layer's cache, what attention and decoding work on."""

from __future__ import annotations

import attrs
import mlx.core as mx

from vq_core.attention.pages import Pages
from vq_core.plugins.binding import BoundSide

TILE_TOKENS = 1024


@attrs.frozen(eq=False)
class SideView:
    """One side: its method, its packed pages and its exact tokens.

    Attributes:
        bound: The method.
        pages: Packed pages.
        exact: Exact tokens, (B, H, W, D), each row's at the right.
        sinks: First tokens, (B, H, s, D), ``None`` where there are none.
    """

    bound: BoundSide
    pages: Pages
    exact: mx.array
    sinks: mx.array | None


@attrs.frozen(eq=False)
class CacheView:
    """Both sides, and where each row's tokens are.

    In order, row b's tokens are: ``sinks[b]`` first tokens, ``packed[b]`` packed ones, ``exact[b]`` exact ones.
    Rows of unequal length are aligned at the right: column T - 1 is the newest token of every row.

    Attributes:
        lengths: Tokens of each row.
        length: T, tokens of the longest row.
        even: Whether all rows hold the same numbers of tokens, so that columns need no look-up.
    """

    keys: SideView
    values: SideView
    sinks: tuple[int, ...]
    packed: tuple[int, ...]
    exact: tuple[int, ...]
    lengths: tuple[int, ...] = attrs.field(init=False)
    length: int = attrs.field(init=False)
    even: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        rows = list(zip(self.sinks, self.packed, self.exact, strict=True))
        lengths = tuple(map(sum, rows))
        even = all(row == rows[0] for row in rows) and self.exact[0] == self.keys.exact.shape[2]
        for name, value in (("lengths", lengths), ("length", max(lengths)), ("even", even)):
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> int:
        """B."""
        return len(self.packed)

    @property
    def heads(self) -> int:
        """KV heads."""
        return int(self.keys.exact.shape[1])


@attrs.frozen(eq=False)
class Columns:
    """Which tokens a run of score columns stands for.

    Attributes:
        start: First column of the mask, where all rows agree.
        count: Number of columns.
        index: Column of the mask for each row, (B, count), where rows differ.
        valid: Whether a row has a token there, (B, count), where rows differ.
    """

    start: int
    count: int
    index: mx.array | None = None
    valid: mx.array | None = None


def sink_columns(view: CacheView) -> Columns:
    """Columns of the first tokens."""
    return _columns(view, view.keys.sinks.shape[2] if view.keys.sinks is not None else 0, 0, view.sinks, left=True)


def packed_columns(view: CacheView, begin: int, end: int) -> Columns:
    """Columns of the packed tokens ``begin`` to ``end`` of each row."""
    held = tuple(min(max(n - begin, 0), end - begin) for n in view.packed)
    starts = tuple(s + begin for s in view.sinks)
    if view.even:
        return Columns(starts[0], held[0])
    return _lookup(view, starts, held, end - begin, left=True)


def exact_columns(view: CacheView, begin: int, end: int) -> Columns:
    """Columns ``begin`` to ``end`` of the exact window."""
    if view.even:
        return Columns(view.sinks[0] + view.packed[0] + begin, end - begin)
    width = view.keys.exact.shape[2]
    index = [[view.length - width + i for i in range(begin, end)]] * view.rows
    valid = [[i >= width - n for i in range(begin, end)] for n in view.exact]
    return Columns(0, end - begin, mx.array(index), mx.array(valid))


def _columns(view: CacheView, width: int, begin: int, held: tuple[int, ...], left: bool) -> Columns:
    if view.even:
        return Columns(begin, held[0])
    return _lookup(view, (begin,) * view.rows, held, width, left)


def _lookup(view: CacheView, starts: tuple[int, ...], held: tuple[int, ...], width: int, left: bool) -> Columns:
    pads = [view.length - n for n in view.lengths]
    index = [[pad + s + i if i < n else 0 for i in range(width)] for pad, s, n in zip(pads, starts, held, strict=True)]
    valid = [[i < n for i in range(width)] for n in held]
    return Columns(0, width, mx.array(index), mx.array(valid))


def decode_depths(view: CacheView, side: SideView, begin: int, end: int) -> mx.array:
    """Decode pages ``begin`` to ``end`` of every row: (B, H, tokens, D) float32; empty places are arbitrary."""
    x = decode_pages(view, side, begin, end)
    return x.transpose(1, 2, 0, 3, 4).reshape(view.rows, x.shape[2], -1, x.shape[-1])


def decode_pages(view: CacheView, side: SideView, begin: int, end: int) -> mx.array:
    """Decode pages ``begin`` to ``end`` of every row: (pages, B, H, page, D) float32."""
    page, rows = side.bound.layout.page, view.rows
    positions = None
    if side.bound.needs_positions:
        first = max(view.sinks)
        positions = first + mx.arange(begin * page, end * page, dtype=mx.int32).reshape(-1, 1, page)
        positions = mx.broadcast_to(positions, (end - begin, rows, page)).reshape(-1, page)
    x = side.bound.decode(side.pages.depths(begin, end, rows), positions)
    return x.reshape(end - begin, rows, *x.shape[1:])


def dense(view: CacheView, side: SideView, dtype: mx.Dtype | None = None) -> mx.array:
    """All tokens of a side in order, (B, H, T, D), rows of unequal length aligned at the right over zeros.

    Lazy.  The packed history takes a handful of operations; evaluating it makes the whole side dense.
    """
    dtype = dtype or side.exact.dtype
    depth = side.pages.depth
    packed = decode_depths(view, side, 0, depth).astype(dtype) if depth else None
    exact = side.exact.astype(dtype)
    if view.even:
        parts = [] if side.sinks is None or not view.sinks[0] else [side.sinks.astype(dtype)]
        if packed is not None:
            parts.append(packed if packed.shape[2] == view.packed[0] else packed[:, :, : view.packed[0]])
        return mx.concatenate([*parts, exact], axis=2) if parts else exact
    rows = []
    for b, (s, n, w) in enumerate(zip(view.sinks, view.packed, view.exact, strict=True)):
        width = exact.shape[2]
        pieces = [mx.zeros((1, exact.shape[1], view.length - s - n - w, exact.shape[3]), dtype)]
        if s and side.sinks is not None:
            pieces.append(side.sinks[b : b + 1, :, :s].astype(dtype))
        if n and packed is not None:
            pieces.append(packed[b : b + 1, :, :n])
        rows.append(mx.concatenate([*pieces, exact[b : b + 1, :, width - w :]], axis=2))
    return mx.concatenate(rows)
