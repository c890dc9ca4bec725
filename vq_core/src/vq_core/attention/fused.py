"""Few queries in one launch and one merge: the portable skeleton on a cache's reading."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

import mlx.core as mx

from vq_core.attention.choice import name_of
from vq_core.attention.masks import LOWEST, Mask
from vq_core.attention.view import CacheView, SideView
from vq_core.kernels.kernel import TINY
from vq_core.kernels.skeleton.kernels import FACTS, Pair
from vq_core.kernels.skeleton.portable import EXACT_UNIT, GROUPS, Side

THREADGROUPS = 528
"""How many a pass is split into where there is work for them: four for each of an H200's multiprocessors."""
MOST_EXACT_SPLITS = 32


def attend_fused(
    view: CacheView, kernels: Pair, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None, backend: Any
) -> mx.array:
    """Attention of up to 16 queries (B, H_q, L, D): (B, H_q, L, D_v) in their dtype."""
    B, heads, L, _ = queries.shape
    H = view.heads
    total = heads // H * L
    rows = rows_at_once(kernels, total)
    chunks = -(-total // rows)
    units = -(-max(view.packed) // kernels.unit)
    exact_units = -(-max(view.exact) // EXACT_UNIT) + -(-max(view.sinks) // EXACT_UNIT)
    exact_splits = min(-(-exact_units // GROUPS), MOST_EXACT_SPLITS)
    packed_splits = max(1, min(-(-units // GROUPS), THREADGROUPS // (B * H * chunks)))
    exact = view.keys.exact.dtype
    q = queries if queries.dtype in (exact, mx.float32) else queries.astype(mx.float32)
    # Each row's exact tokens are at the right, its first tokens at the left.
    exact_k, exact_v = _eight(view.keys.exact, 2, left=True), _eight(view.values.exact, 2, left=True)
    key_sinks = exact_k if view.keys.sinks is None else _eight(view.keys.sinks, 2)
    value_sinks = exact_v if view.values.sinks is None else _eight(view.values.sinks, 2)
    facts = row_facts(view.packed, view.sinks, view.exact, view.lengths, view.hidden, view.length)
    regular = view.keys.pages.table is None and view.values.pages.table is None
    inputs = [q]
    if kernels.keys.snippet.prepare is not None:
        inputs.append(kernels.keys.snippet.prepare(queries.astype(mx.float32)))
    inputs += [
        facts, NOTHING if mask.array is None else _eight(additive(mask.array, view.heads), 3),
        exact_k, exact_v, key_sinks, value_sinks,
        _table(view.keys, B, regular), _table(view.values, B, regular),
        *_arrays(view.keys, kernels.keys), *_arrays(view.values, kernels.values),
    ]  # fmt: skip
    sums, tops = kernels.run(
        *inputs, backend=backend, M=rows, scale_bits=_bits(scale * math.log2(math.e)), length=view.length,
        causal=int(mask.causal and L > 1), masked=int(mask.array is not None), regular=int(regular),
        splits=exact_splits + packed_splits, exact_splits=exact_splits,
    )  # fmt: skip
    logits = NO_LOGITS if sinks is None else sinks.astype(mx.float32)
    common = {"query_length": L, "with_logits": int(sinks is not None), "exact_splits": exact_splits}
    D = view.values.exact.shape[3]
    if not kernels.apart:
        out: mx.array = kernels.merge(sums, tops, logits, backend=backend, T=name_of(queries.dtype), D=D, **common)[0]
        return out
    finish = kernels.values.snippet.finish
    assert finish is not None
    plain, stored = kernels.merge(sums, tops, logits, backend=backend, D=D, width=kernels.values.width, **common)
    return (plain + finish(stored)).astype(queries.dtype)


def _table(side: SideView, rows: int, regular: bool) -> mx.array:
    """Where a side's pages lie; one flag tells of both sides, so a side that needs no look-up may have to have one."""
    if regular:
        return NO_TABLE
    pages = side.pages
    table = pages.table
    if table is None:
        table = mx.arange(pages.depth * rows, dtype=mx.int32).reshape(pages.depth, rows).T
    return _eight(table, 1)


def _eight(a: mx.array, axis: int, left: bool = False) -> mx.array:
    """An array of so few elements that Metal would keep it elsewhere, with places to spare."""
    if a.size >= TINY:
        return a
    return mx.pad(a, [((TINY, 0) if left else (0, TINY)) if i == axis else (0, 0) for i in range(a.ndim)])


def _arrays(side: SideView, known: Side) -> list[mx.array]:
    constants = known.snippet.constants
    return [constants[p.name] if p.name in constants else side.pages.tile[p.name] for p in known.pointers]


def rows_at_once(kernels: Pair, total: int) -> int:
    """Query rows that a threadgroup takes: as few groups as there must be, of one size."""
    return -(-total // -(-total // kernels.rows))


NOTHING = mx.zeros((1, 1, 1, 8), mx.float32)
NO_TABLE = mx.zeros((1, 8), mx.int32)
NO_LOGITS = mx.zeros((8,), mx.float32)


@lru_cache(maxsize=64)
def row_facts(
    packed: tuple[int, ...], sinks: tuple[int, ...], exact: tuple[int, ...], lengths: tuple[int, ...],
    hidden: tuple[int, ...], length: int,
) -> mx.array:  # fmt: skip
    """What the pass kernel knows of each row, (B, 8) int32; all layers of a step share one array."""
    rows = [
        [p, s, e, length - n, h, *[0] * (FACTS - 5)]
        for p, s, e, n, h in zip(packed, sinks, exact, lengths, hidden, strict=True)
    ]
    made = mx.array(rows, mx.int32)
    mx.eval(made)
    return made


def additive(mask: mx.array, heads: int) -> mx.array:
    """A mask (B, H, R, L, T), each but T perhaps 1, as (B, H_q, L, T) float32 to be added."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        mask = mask[:, :, 0]
    else:
        shape = (mask.shape[0], heads, mask.shape[2], *mask.shape[3:])
        mask = mx.broadcast_to(mask, shape).flatten(1, 2)
    return mx.where(mask, 0.0, LOWEST) if mask.dtype == mx.bool_ else mask.astype(mx.float32)


@lru_cache(maxsize=64)
def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
