"""Few queries in one launch and one merge: the portable and the matrix skeleton on a cache's reading."""

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
from vq_core.kernels.skeleton.combine import MOST_SPLITS
from vq_core.kernels.skeleton.kernels import FACTS, MERGE, Pair
from vq_core.kernels.skeleton.matrix_kernels import COLUMNS, MatrixPair
from vq_core.kernels.skeleton.portable import EXACT_UNIT, Side
from vq_core.kernels.skeleton.summing import GROUPS

THREADGROUPS = 384
"""How many a pass is split into where there is work for them: as many as an H200 runs at once, about three for each of
its multiprocessors, so that none waits for another."""
MOST_EXACT_SPLITS = 32


def attend_fused(
    view: CacheView, kernels: Pair, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None, backend: Any
) -> mx.array:
    """Attention of up to 16 queries (B, H_q, L, D): (B, H_q, L, D_v) in their dtype."""
    B, heads, L, _ = queries.shape
    total = heads // view.heads * L
    rows = rows_at_once(kernels, total)
    groups, exact_splits = B * view.heads * -(-total // rows), exact_split(view)
    splits = exact_splits + packed_split(max(view.packed), kernels.unit, THREADGROUPS // groups)
    exact = view.keys.exact.dtype
    inputs = [queries if queries.dtype in (exact, mx.float32) else queries.astype(mx.float32)]
    if kernels.keys.snippet.prepare is not None:
        inputs.append(kernels.keys.snippet.prepare(queries.astype(mx.float32)))
    (exact_k, key_sinks), (exact_v, value_sinks) = exact_arrays(view.keys), exact_arrays(view.values)
    inputs += [
        facts_of(view), NOTHING if mask.array is None else _eight(additive(mask.array, view.heads), 3),
        exact_k, exact_v, key_sinks, value_sinks, table_of(view.keys), table_of(view.values),
        *field_arrays(view.keys, kernels.keys), *field_arrays(view.values, kernels.values),
    ]  # fmt: skip
    sums, tops = kernels.run(
        *inputs, backend=backend, M=rows, scale_bits=_bits(scale * math.log2(math.e)), length=view.length,
        causal=int(mask.causal and L > 1), masked=int(mask.array is not None), regular=_regular(view),
        splits=splits, exact_splits=exact_splits,
    )  # fmt: skip
    if not kernels.apart:
        return _merged(view, sums, tops, queries, sinks, exact_splits, backend)
    finish, D = kernels.values.snippet.finish, view.values.exact.shape[3]
    assert finish is not None
    plain, stored = kernels.merge(
        sums, tops, NO_LOGITS if sinks is None else sinks.astype(mx.float32), backend=backend, D=D,
        width=kernels.values.width, query_length=L, with_logits=int(sinks is not None), exact_splits=exact_splits,
    )  # fmt: skip
    return (plain + finish(stored)).astype(queries.dtype)


def attend_matrix(
    view: CacheView, kernels: MatrixPair, queries: mx.array, scale: float, causal: bool, sinks: mx.array | None,
    backend: Any,
) -> mx.array:  # fmt: skip
    """The same on tensor cores, without masks that are arrays."""
    B, heads, L, _ = queries.shape
    groups = B * view.heads * -(-(heads // view.heads * L) // COLUMNS)
    exact_splits = exact_split(view)
    splits = exact_splits + packed_split(max(view.packed), kernels.step, kernels.slots // groups)
    (exact_k, key_sinks), (exact_v, value_sinks) = exact_arrays(view.keys), exact_arrays(view.values)
    sums, tops = kernels.run(
        queries, facts_of(view), exact_k, exact_v, key_sinks, value_sinks, table_of(view.keys), table_of(view.values),
        *map(view.keys.pages.stored, kernels.fields[0]), *map(view.values.pages.stored, kernels.fields[1]),
        backend=backend, scale_bits=_bits(scale * math.log2(math.e)), length=view.length, causal=int(causal and L > 1),
        regular=_regular(view), splits=splits, exact_splits=exact_splits,
    )  # fmt: skip
    return _merged(view, sums, tops, queries, sinks, exact_splits, backend)


def exact_split(view: CacheView) -> int:
    """Splits for the exact tokens."""
    units = -(-max(view.exact) // EXACT_UNIT) + -(-max(view.sinks) // EXACT_UNIT)
    return min(-(-units // GROUPS), MOST_EXACT_SPLITS)


def packed_split(tokens: int, unit: int, most: int) -> int:
    """Splits for so many packed tokens: each SIMD group takes a unit at least."""
    return max(1, min(-(-tokens // (unit * GROUPS)), most, MOST_SPLITS - MOST_EXACT_SPLITS))


def _merged(
    view: CacheView, sums: mx.array, tops: mx.array, queries: mx.array, sinks: mx.array | None, exact_splits: int,
    backend: Any,
) -> mx.array:  # fmt: skip
    out: mx.array = MERGE(
        sums, tops, NO_LOGITS if sinks is None else sinks.astype(mx.float32), backend=backend,
        T=name_of(queries.dtype), D=view.values.exact.shape[3], query_length=queries.shape[2],
        with_logits=int(sinks is not None), exact_splits=exact_splits,
    )[0]  # fmt: skip
    return out


def _regular(view: CacheView) -> int:
    return int(view.keys.pages.table is None and view.values.pages.table is None)


def facts_of(view: CacheView) -> mx.array:
    """What the kernels know of each row."""
    return row_facts(view.packed, view.sinks, view.exact, view.lengths, view.hidden, view.length)


def table_of(side: SideView) -> mx.array:
    """Pages by row and depth, where they do not lie regularly."""
    return NO_TABLE if side.pages.table is None else _eight(side.pages.table, 1)


def _eight(a: mx.array, axis: int, left: bool = False) -> mx.array:
    """An array of so few elements that Metal would keep it elsewhere, with places to spare."""
    if a.size >= TINY:
        return a
    return mx.pad(a, [((TINY, 0) if left else (0, TINY)) if i == axis else (0, 0) for i in range(a.ndim)])


def exact_arrays(side: SideView) -> tuple[mx.array, mx.array]:
    """Window and first tokens as kernels take them: each row's at the right of the one, at the left of the other.

    Without first tokens the window stands for them: no row has any there.
    """
    exact = _eight(side.exact, 2, left=True)
    return exact, exact if side.sinks is None else _eight(side.sinks, 2)


def field_arrays(side: SideView, known: Side) -> list[mx.array]:
    """What a snippet's texts see: fields as stored, with more pages perhaps than are read, and constants."""
    constants = known.snippet.constants
    return [constants[p.name] if p.name in constants else side.pages.stored(p.name) for p in known.pointers]


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
