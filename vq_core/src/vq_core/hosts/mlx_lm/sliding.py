"""Sliding-window layers: when packing them pays, and why one stays the model's own.

Ours keeps the newest tokens exact and lets whole packed pages go, so a small window would hold more bytes than
mlx-lm's ring.  The rule is worst-case arithmetic on the layout that the methods really have.
"""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx

from vq_core.cache.store import spare_allowed

Windows = Literal["auto", "packed", "native"]
PAYS = 0.75
"""Share of the native window's bytes that the packed one may hold at most, to be worth its work."""


def native_reason(window: int) -> str:
    """Why such a layer keeps its own cache, first part."""
    return f"RotatingKVCache: a sliding window of {window} tokens, bounded already"


def why_not(cache: Any, windows: Windows) -> str:
    """Why a packed window that the trial run has bound should rather stay the model's own; empty if it should not."""
    window: int = cache.sliding
    if cache.reads.fetches:
        return f"{native_reason(window)}; another layer reads its tokens again"
    if windows == "packed":
        return ""
    ours, native = worst_bytes(cache)
    if ours <= PAYS * native:
        return ""
    return f"{native_reason(window)}; packed it would hold up to {ours:,} bytes against {native:,}"


def worst_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of a full window of one sequence: the most that ours holds, and what mlx-lm's ring does."""
    history, window, residual = cache._history, cache.sliding, cache.policy.residual
    ctx = history.bound["keys"].ctx
    itemsize = getattr(mx, ctx.dtype).size
    token = ctx.kv_heads * (ctx.key_dim + ctx.value_dim) * itemsize
    ours = token * (residual + history.block - 1)
    for bound in history.bound.values():
        page = bound.layout.page
        packed = max(0, window + history.unit - 1 - residual)
        pages = -(-packed // page) + spare_allowed(packed) // page
        ours += bound.ctx.kv_heads * pages * sum(field.nbytes for field in bound.layout.paged)
        ours += bound.ctx.kv_heads * sum(field.nbytes for field in bound.layout.sequence)
    return ours, token * window
