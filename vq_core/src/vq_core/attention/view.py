"""A consistent reading of one layer's cache, what attention and decoding work on."""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import mlx.core as mx

from vq_core.attention.pages import Pages
from vq_core.plugins.binding import BoundSide

TILE_TOKENS = 1024


class Joining(Protocol):
    """A window whose newest tokens may not have joined it yet."""

    def exact(self, side: str) -> mx.array:
        """All tokens of a side, joined now if they were not."""

    def parts(self) -> Parts | None:
        """Old and new keys, old and new values, (B, H, ..., D); ``None`` where all are joined."""

    def settle(self, keys: mx.array, values: mx.array) -> None:
        """What attention has made of the parts while it read them."""


Parts = tuple[mx.array, mx.array, mx.array, mx.array]


@attrs.define(eq=False)
class SideView:
    """One side: its method, its packed pages and its exact tokens; not to be changed.

    Attributes:
        bound: The method.
        pages: Packed pages.
        sinks: First tokens, (B, H, s, D), ``None`` where there are none.
        window: Where the exact tokens come from if they are asked for; ``None``: they are given.
    """

    bound: BoundSide
    pages: Pages
    _exact: mx.array | None
    sinks: mx.array | None
    window: Joining | None = None

    @property
    def exact(self) -> mx.array:
        """Exact tokens, (B, H, W, D), each row's at the right."""
        if self._exact is None:
            assert self.window is not None
            self._exact = self.window.exact(self.bound.ctx.side)
        return self._exact

    @property
    def dtype(self) -> mx.Dtype:
        """Of the exact tokens."""
        dtype: mx.Dtype = (self._some()).dtype
        return dtype

    @property
    def dim(self) -> int:
        """D."""
        return int(self._some().shape[3])

    def _some(self) -> mx.array:
        """Exact tokens, perhaps not all."""
        parts = None if self.window is None or self._exact is not None else self.window.parts()
        return self.exact if parts is None else parts[0 if self.bound.ctx.side == "keys" else 2]


@attrs.define(eq=False, init=False)
class CacheView:
    """Both sides, and where each row's tokens are; not to be changed.

    In order, row b's tokens are: ``sinks[b]`` first tokens, ``packed[b]`` packed ones, ``exact[b]`` exact ones.
    Rows of unequal length are aligned at the right: column T - 1 is the newest token of every row.

    In a sliding window the first ``dropped[b]`` tokens of the sequence are gone, and the first ``hidden[b]`` of those
    that are held have left the window and have no column: whole pages go at once.

    Attributes:
        length: T, columns: tokens of the longest row.
        even: Whether all rows hold the same numbers of tokens.
        plain: Whether they do and nothing is hidden, so that columns need no look-up.
        steady: What readings of one cache share until tokens are packed, see
            :class:`~vq_core.attention.ready.Steadiness`; ``None``: nothing.
    """

    keys: SideView
    values: SideView
    sinks: tuple[int, ...]
    packed: tuple[int, ...]
    exact: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    length: int = attrs.field(init=False)
    even: bool = attrs.field(init=False)
    plain: bool = attrs.field(init=False)
    steady: Any = None

    # Written out: one is made for each layer and step.
    def __init__(
        self, keys: SideView, values: SideView, sinks: tuple[int, ...], packed: tuple[int, ...],
        exact: tuple[int, ...], dropped: tuple[int, ...] = (), hidden: tuple[int, ...] = (),
        length: int | None = None, even: bool | None = None, steady: Any = None,
    ):  # fmt: skip
        """``length`` and ``even``: where the caller knows them."""
        self.keys, self.values = keys, values
        self.sinks, self.packed, self.exact = sinks, packed, exact
        none = (0,) * len(packed)
        self.dropped, self.hidden = dropped or none, hidden or none
        if even is None:  # then the exact tokens are given
            rows = set(zip(sinks, packed, exact, self.dropped, self.hidden, strict=True))
            even = len(rows) == 1 and exact[0] == keys.exact.shape[2]
        self.length = max(self.lengths) if length is None else length
        self.even, self.plain, self.steady = even, even and not (hidden and any(hidden)), steady

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row that have a column."""
        rows = zip(self.sinks, self.packed, self.exact, self.hidden, strict=True)
        return tuple([s + n + w - h for s, n, w, h in rows])

    @property
    def rows(self) -> int:
        """B."""
        return len(self.packed)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.keys.bound.ctx.kv_heads


def latent(view: CacheView) -> CacheView:
    """The reading in which the key side is both keys and values, as latent attention (MLA) uses it in a decode step.

    A method's own attention is for one side, so the values are decoded, tile by tile.
    """
    held = view.keys.bound.held
    held = held and attrs.evolve(held, matrix=None)
    bound = attrs.evolve(view.keys.bound, attend=None, snippet=None, held=held)
    return attrs.evolve(view, values=attrs.evolve(view.keys, bound=bound), steady=None)


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
    if view.plain:
        return Columns(0, view.sinks[0])
    width = view.keys.sinks.shape[2] if view.keys.sinks is not None else 0
    return _lookup(view, (0,) * view.rows, view.sinks, width)


def packed_columns(view: CacheView, begin: int, end: int) -> Columns:
    """Columns of the packed tokens ``begin`` to ``end`` of each row."""
    held = tuple(min(max(n - begin, 0), end - begin) for n in view.packed)
    starts = tuple(s + begin for s in view.sinks)
    if view.plain:
        return Columns(starts[0], held[0])
    return _lookup(view, starts, held, end - begin)


def exact_columns(view: CacheView, begin: int, end: int) -> Columns:
    """Columns ``begin`` to ``end`` of the exact window."""
    if view.plain:
        return Columns(view.sinks[0] + view.packed[0] + begin, end - begin)
    width = view.keys.exact.shape[2]
    # Each row's tokens are at the right of the window; what is before a row's first column is hidden.
    first = [max(width - n, width - t) for n, t in zip(view.exact, view.lengths, strict=True)]
    places = mx.arange(begin, end)
    index = mx.broadcast_to(places + (view.length - width), (view.rows, end - begin))
    valid = places >= mx.array(first)[:, None]
    return Columns(0, end - begin, mx.where(valid, index, 0), valid)


def _lookup(view: CacheView, starts: tuple[int, ...], held: tuple[int, ...], width: int) -> Columns:
    """Columns of ``width`` places, of which row b's first ``held[b]`` are its tokens from ``starts[b]`` on."""
    shift = [view.length - n - h + s for n, h, s in zip(view.lengths, view.hidden, starts, strict=True)]
    first = [h - s for h, s in zip(view.hidden, starts, strict=True)]
    places = mx.arange(width)
    valid = (places < mx.array(held)[:, None]) & (places >= mx.array(first)[:, None])
    return Columns(0, width, mx.where(valid, places + mx.array(shift)[:, None], 0), valid)


def decode_depths(view: CacheView, side: SideView, begin: int, end: int) -> mx.array:
    """Decode pages ``begin`` to ``end`` of every row: (B, H, tokens, D) float32; empty places are arbitrary."""
    x = decode_pages(view, side, begin, end)
    return x.transpose(1, 2, 0, 3, 4).reshape(view.rows, x.shape[2], -1, x.shape[-1])


def decode_pages(view: CacheView, side: SideView, begin: int, end: int) -> mx.array:
    """Decode pages ``begin`` to ``end`` of every row: (pages, B, H, page, D) float32."""
    page, rows = side.bound.layout.page, view.rows
    positions = None
    if side.bound.needs_positions:
        first = max(view.sinks) + mx.array(view.dropped, mx.int32).reshape(1, -1, 1)
        positions = first + mx.arange(begin * page, end * page, dtype=mx.int32).reshape(-1, 1, page)
        positions = positions.reshape(-1, page)
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
        whole = mx.concatenate([*parts, exact], axis=2) if parts else exact
        return whole if view.plain else whole[:, :, view.hidden[0] :]
    rows, lengths = [], view.lengths
    for b, (s, n, w) in enumerate(zip(view.sinks, view.packed, view.exact, strict=True)):
        width = exact.shape[2]
        pieces = []
        if s and side.sinks is not None:
            pieces.append(side.sinks[b : b + 1, :, :s].astype(dtype))
        if n and packed is not None:
            pieces.append(packed[b : b + 1, :, :n])
        row = mx.concatenate([*pieces, exact[b : b + 1, :, width - w :]], axis=2)[:, :, view.hidden[b] :]
        rows.append(mx.pad(row, [(0, 0), (0, 0), (view.length - lengths[b], 0), (0, 0)]))
    return mx.concatenate(rows)
