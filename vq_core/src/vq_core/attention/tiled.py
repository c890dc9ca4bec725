"""Long queries: the history decoded tile by tile, with an online softmax.

Each tile is made to depend on the sums so far, so that MLX cannot schedule the decoding of many tiles first; the
transient memory is one tile of keys and values and a bounded number of scores, whatever the history.
"""

from __future__ import annotations

import math

import mlx.core as mx

from vq_core.attention import view as views
from vq_core.attention.masks import Mask, apply
from vq_core.attention.sides import decode_after
from vq_core.attention.view import TILE_TOKENS, CacheView, Columns

SCORE_BUDGET = 1 << 23
"""Scores (float32 numbers) held at once: 32 MB."""


class _Sums:
    """Online softmax of one run of queries: largest score, sum of weights, weighted values."""

    def __init__(self, q: mx.array, begin: int):
        self.q, self.begin, self.end = q, begin, begin + q.shape[3]
        self.top: mx.array | None = None
        self.total: mx.array | None = None
        self.values: mx.array | None = None

    def add(self, keys: mx.array, values: mx.array, mask: mx.array | None) -> None:
        """Attend to one tile, keys (B, H, n, D) and values (B, H, n, D_v)."""
        scores = apply((self.q @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32), mask)
        top = scores.max(axis=-1, keepdims=True)
        if self.top is not None:
            top = mx.maximum(top, self.top)
        weights = mx.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        mixed = (weights.astype(values.dtype) @ values[:, :, None]).astype(mx.float32)
        if self.top is not None and self.total is not None and self.values is not None:
            shrink = mx.exp(self.top - top)
            total, mixed = total + self.total * shrink, mixed + self.values * shrink
        self.top, self.total, self.values = top, total, mixed

    def finish(self, sinks: mx.array | None) -> mx.array:
        """The attention output, (B, H, R, l, D_v) float32."""
        assert self.top is not None and self.total is not None and self.values is not None
        if sinks is None:
            return self.values / self.total
        logit = sinks.astype(mx.float32).reshape(1, *self.q.shape[1:3], 1, 1)
        top = mx.maximum(self.top, logit)
        shrink = mx.exp(self.top - top)
        return self.values * shrink / (self.total * shrink + mx.exp(logit - top))


def attend_tiled(view: CacheView, q: mx.array, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Attention of any number of queries q (B, H, R, L, D), scaled: (B, H, R, L, D_v) float32."""
    B, H, R, L, _ = q.shape
    run = max(1, SCORE_BUDGET // (B * H * R * TILE_TOKENS))
    states = [_Sums(q[..., i : i + run, :], i) for i in range(0, L, run)]
    last: list[mx.array] = []

    def visit(keys: mx.array, values: mx.array, columns: Columns) -> None:
        keys, values = keys.astype(q.dtype), values.astype(q.dtype)
        for state in states:
            if mask.causal and columns.index is None and columns.start > mask.length - L + state.end - 1:
                continue  # the whole tile lies after these queries
            if last:
                state.q = mx.depends([state.q], last)[0]
            state.add(keys, values, mask.block(columns, state.begin, state.end))
            assert state.values is not None and state.total is not None
            # Both: what is summed up last keeps the weights of its tile until then.
            last[:] = [state.values, state.total]

    if view.keys.sinks is not None and view.values.sinks is not None:
        visit(view.keys.sinks, view.values.sinks, views.sink_columns(view))
    key_page, value_page = view.keys.bound.layout.page, view.values.bound.layout.page
    step = _common(key_page, value_page)
    for begin in range(0, max(view.packed), step):
        end = min(begin + step, max(view.packed))
        columns = views.packed_columns(view, begin, end)
        keys = _rows(decode_after(view, view.keys, begin // key_page, -(-end // key_page), last))
        values = _rows(decode_after(view, view.values, begin // value_page, -(-end // value_page), last))
        visit(keys[:, :, : columns.count], values[:, :, : columns.count], columns)
    width = view.keys.exact.shape[2]
    for begin in range(0, width, TILE_TOKENS):
        end = min(begin + TILE_TOKENS, width)
        keys, values = view.keys.exact[:, :, begin:end], view.values.exact[:, :, begin:end]
        visit(keys, values, views.exact_columns(view, begin, end))
    outs = [state.finish(sinks) for state in states]
    return mx.concatenate(outs, axis=3) if len(outs) > 1 else outs[0]


def _rows(pages: mx.array) -> mx.array:
    """(pages, B, H, page, D) to (B, H, tokens, D)."""
    return pages.transpose(1, 2, 0, 3, 4).reshape(*pages.shape[1:3], -1, pages.shape[4])


def _common(a: int, b: int) -> int:
    """Tokens of a tile that is whole pages on both sides."""
    both = math.lcm(a, b)
    return both * max(1, TILE_TOKENS // both)
