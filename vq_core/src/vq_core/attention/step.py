"""One step: few queries, all scores at once, no decoding.

Scores of packed tokens stay in the order of the pages, (depth, B, H, M, page), from the keys' product to the
values' product: nothing is transposed or joined, so the transient memory is the scores themselves, one copy of
the queries a page, and one sum a page.  The softmax runs over the parts: packed, sink tokens, window.
"""

from __future__ import annotations

import mlx.core as mx

from vq_core.attention import view as views
from vq_core.attention.masks import LOWEST, Mask, apply
from vq_core.attention.sides import packed_scores, packed_sums, product
from vq_core.attention.view import CacheView, Columns


def attend_step(view: CacheView, q: mx.array, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Attention of a few queries q (B, H, R, L, D), scaled: (B, H, R, L, D_v) float32."""
    B, H, R, L, _ = q.shape
    folded = q.reshape(B, H, R * L, -1)
    packed = _packed(view, folded, mask, (R, L)) if view.keys.pages.depth else None
    exact = [
        (_masked(product(folded, keys, transpose=True), mask.block(columns, 0, L), (R, L)), values)
        for keys, values, columns in _exact(view)
    ]
    tops = [scores.max(axis=-1, keepdims=True) for scores, _ in exact]
    if packed is not None:
        tops.append(packed.max(axis=(0, 4))[..., None])
    logit = None
    if sinks is not None:
        logit = mx.repeat(sinks.astype(mx.float32).reshape(1, H, R, 1), L, axis=2).reshape(1, H, R * L, 1)
        tops.append(mx.broadcast_to(logit, (B, H, R * L, 1)))
    top = tops[0]
    for other in tops[1:]:
        top = mx.maximum(top, other)
    total = 0.0 if logit is None else mx.exp(logit - top)
    out: mx.array | None = None
    if packed is not None:
        weights = mx.exp(packed - top)
        total = total + weights.sum(axis=(0, 4))[..., None]
        out = packed_sums(view, weights)
    for scores, values in exact:
        weights = mx.exp(scores - top)
        total = total + weights.sum(axis=-1, keepdims=True)
        part = product(weights.astype(q.dtype), values, transpose=False).astype(mx.float32)
        out = part if out is None else out + part
    assert out is not None
    return (out / total).reshape(B, H, R, L, -1)


def _exact(view: CacheView) -> list[tuple[mx.array, mx.array, Columns]]:
    """Keys, values and columns of the exact tokens."""
    parts = [(view.keys.exact, view.values.exact, views.exact_columns(view, 0, view.keys.exact.shape[2]))]
    if view.keys.sinks is not None and view.values.sinks is not None:
        parts.append((view.keys.sinks, view.values.sinks, views.sink_columns(view)))
    return [part for part in parts if part[0].shape[2] and part[2].count]


def _masked(scores: mx.array, block: mx.array | None, shape: tuple[int, int]) -> mx.array:
    """Scores (B, H, M, n) in float32 under a block of a mask (B, H, R, L, n)."""
    scores = scores.astype(mx.float32)
    if block is None:
        return scores
    B, H, M, n = scores.shape
    return apply(scores.reshape(B, H, *shape, n), block).reshape(B, H, M, n)


def _packed(view: CacheView, q: mx.array, mask: Mask, shape: tuple[int, int]) -> mx.array:
    """Scores of all packed tokens, (depth, B, H, M, page) float32, masked where a page holds no token."""
    scores = packed_scores(view, q).astype(mx.float32)
    depth, page = scores.shape[0], scores.shape[4]
    places = depth * page
    columns = views.packed_columns(view, 0, places)
    block = mask.block(columns, 0, shape[1])
    if block is None:
        if columns.count == places:
            return scores
        block = mx.ones((1, 1, 1, 1, columns.count), mx.bool_)
    if block.shape[-1] < places:
        fill = False if block.dtype == mx.bool_ else LOWEST
        block = mx.pad(block, [(0, 0)] * 4 + [(0, places - block.shape[-1])], constant_values=fill)
    rows, heads = block.shape[:2]
    if block.shape[2:4] != (1, 1):
        block = mx.broadcast_to(block, (rows, heads, *shape, places))
    paged = block.reshape(rows, heads, -1, depth, page).transpose(3, 0, 1, 2, 4)
    return apply(scores, paged)
