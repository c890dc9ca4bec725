"""One side's half: the method's own attention on packed codes, or the core's by decoding tiles."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_map

from vq_core.attention import view as views
from vq_core.attention.view import TILE_TOKENS, CacheView, SideView


def compute_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Dtype of products with codes: float32, but float16 for float16 models on a GPU.

    On the CPU a float16 quantized product takes 50 times as long as a float32 one.
    """
    return mx.float16 if dtype == mx.float16 and mx.default_device() != mx.cpu else mx.float32


def product(a: mx.array, b: mx.array, *, transpose: bool) -> mx.array:
    """a @ b, or a @ b^T, in a's dtype."""
    b = b.astype(a.dtype)
    out: mx.array = a @ (b.swapaxes(-1, -2) if transpose else b)
    return out


def packed_scores(view: CacheView, q: mx.array) -> mx.array:
    """Scores of q (B, H, M, D), already scaled, with every packed key: (depth, B, H, M, page)."""
    side, pages = view.keys, view.keys.pages
    B, H, M, _ = q.shape
    attend = side.bound.attend
    if attend is None:
        return _decoded_scores(view, q)
    prepared = attend.prepare_query(q)
    runs = _runs(side, attend)
    if len(runs) > 1:
        found: list[mx.array] = []
        for begin, end in runs:
            tile = _after(pages.depths(begin, end, B), found[-1:])
            found.append(attend.scores(_by_page(prepared, end - begin, B), tile).reshape(end - begin, B, H, M, -1))
        return mx.concatenate(found)
    if pages.row is not None:
        row = pages.row
        prepared = tree_map(lambda a: mx.take(a, row, axis=0), prepared)
    scores: mx.array = attend.scores(prepared, pages.tile)
    if pages.table is not None:
        scores = mx.take(scores, pages.table.T.reshape(-1), axis=0)
    return scores.reshape(pages.depth, B, H, M, -1)


def packed_sums(view: CacheView, weights: mx.array) -> mx.array:
    """Sums (B, H, M, D_v) float32 of the packed values weighted by (depth, B, H, M, page of the keys)."""
    side, pages = view.values, view.values.pages
    weights = _repaged(weights, pages.depth, side.bound.layout.page)
    depth, B, H, M, page = weights.shape
    attend = side.bound.attend
    if attend is None:
        return _decoded_sums(view, weights)
    compute = compute_dtype(side.exact.dtype)
    flat = weights.reshape(depth * B, H, M, page)
    runs = _runs(side, attend)
    if len(runs) > 1:
        total = None
        for begin, end in runs:
            tile = _after(pages.depths(begin, end, B), [] if total is None else [total])
            part = attend.accumulate(flat[begin * B : end * B].astype(compute), tile).astype(mx.float32)
            part = part.reshape(end - begin, B, *part.shape[1:])
            if pages.held is not None:
                part = mx.where(pages.held[:, begin:end].T[:, :, None, None, None], part, 0)
            part = part.sum(axis=0)
            total = part if total is None else total + part
    elif pages.table is None or pages.place is None or pages.held is None:
        sums = attend.accumulate(flat.astype(compute), pages.tile).astype(mx.float32)
        total = sums if depth == 1 else sums.reshape(depth, B, *sums.shape[1:]).sum(axis=0)
    else:
        read = (pages.place >= 0)[:, None, None, None]
        flat = mx.where(read, mx.take(flat, mx.maximum(pages.place, 0), axis=0), 0)
        sums = attend.accumulate(flat.astype(compute), pages.tile).astype(mx.float32)
        held = pages.held[:, :, None, None, None]
        total = mx.where(held, mx.take(sums, pages.table, axis=0), 0).sum(axis=1)
    finished: mx.array = attend.finish(total)
    return finished.astype(mx.float32)


def _runs(side: SideView, attend: object) -> list[tuple[int, int]]:
    """Runs of depths that a method's attention is given at once: all, unless it asks for fewer tokens."""
    tokens = getattr(attend, "tile_tokens", None)
    step = side.pages.depth if tokens is None else max(1, tokens // side.bound.layout.page)
    return [(d, min(d + step, side.pages.depth)) for d in range(0, side.pages.depth, max(1, step))]


def _by_page(prepared: Any, depth: int, rows: int) -> Any:
    """Prepared queries, leading axis B, one for each page of a tile that lies depth by depth, row by row."""
    if rows == 1:
        return prepared
    row = mx.tile(mx.arange(rows, dtype=mx.int32), depth)
    return tree_map(lambda a: mx.take(a, row, axis=0), prepared)


def _after(tile: dict[str, mx.array], done: list[mx.array]) -> dict[str, mx.array]:
    """A tile that is not read before ``done`` is computed."""
    if not done:
        return tile
    return dict(zip(tile, mx.depends(list(tile.values()), done), strict=True))


def _repaged(weights: mx.array, depth: int, page: int) -> mx.array:
    """Weights by the values' pages, where they differ from the keys'."""
    if weights.shape[4] == page and weights.shape[0] == depth:
        return weights
    B, H, M = weights.shape[1:4]
    rows = weights.transpose(1, 2, 3, 0, 4).reshape(B, H, M, -1)
    short = depth * page - rows.shape[3]
    rows = mx.pad(rows, [(0, 0)] * 3 + [(0, short)]) if short > 0 else rows[..., : depth * page]
    return rows.reshape(B, H, M, depth, page).transpose(3, 0, 1, 2, 4)


def _tiles(side: SideView) -> list[tuple[int, int]]:
    step = max(1, TILE_TOKENS // side.bound.layout.page)
    return [(d, min(d + step, side.pages.depth)) for d in range(0, side.pages.depth, step)]


def _decoded_scores(view: CacheView, q: mx.array) -> mx.array:
    found: list[mx.array] = []
    for begin, end in _tiles(view.keys):
        keys = decode_after(view, view.keys, begin, end, found[-1:])
        found.append(product(q, keys, transpose=True))
    return mx.concatenate(found) if len(found) > 1 else found[0]


def _decoded_sums(view: CacheView, weights: mx.array) -> mx.array:
    total: mx.array | None = None
    for begin, end in _tiles(view.values):
        values = decode_after(view, view.values, begin, end, [] if total is None else [total])
        part = (weights[begin:end] @ values).sum(axis=0)
        total = part if total is None else total + part
    assert total is not None
    return total


def decode_after(view: CacheView, side: SideView, begin: int, end: int, after: list[mx.array]) -> mx.array:
    """Decode pages ``begin`` to ``end`` of every row, not before ``after`` is computed: (pages, B, H, page, D).

    Zero where a row holds no token: what decodes there may be NaN, which no weight of zero takes away.
    """
    if after:
        side = attrs.evolve(side, pages=attrs.evolve(side.pages, tile=_after(side.pages.tile, after)))
    x = views.decode_pages(view, side, begin, end)
    page = x.shape[3]
    if min(view.packed) >= end * page:
        return x
    places = mx.arange(begin * page, end * page).reshape(-1, 1, 1, page, 1)
    return mx.where(places < mx.array(view.packed).reshape(1, -1, 1, 1, 1), x, 0)
