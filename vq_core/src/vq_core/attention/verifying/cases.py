"""Caches of random numbers, as the pass kernel takes them: uneven rows, ragged pages, windows, first tokens, masks.

What a cache does not hold is NaN where it can be: the rest of a page, places left of a row's window.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.attention.fused import NO_TABLE, NOTHING, additive, row_facts, rows_at_once
from vq_core.kernels.kernel import Case
from vq_core.kernels.skeleton.kernels import Pair
from vq_core.kernels.skeleton.portable import Side
from vq_core.plugins.binding import BoundSide


@attrs.frozen
class Shape:
    """One case.

    Attributes:
        repeats: Query heads of each KV head, R.
        queries: L.
        packed: Packed tokens of each row, about: whole blocks are.
        first: First tokens of each row.
        recent: Window of each row.
        hidden: Of each row, tokens that have left a sliding window.
        mask: ``""``, ``"causal"``, ``"additive"``, ``"bool"`` or ``"split"``: nothing of a split is seen.
        splits: Of the exact tokens, of the packed ones.
        scattered: Pages are looked up in a table.
        wide: Queries are float32 whatever the model's dtype is.
    """

    repeats: int
    queries: int
    packed: tuple[int, ...]
    first: tuple[int, ...] = ()
    recent: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    mask: str = ""
    splits: tuple[int, int] = (1, 2)
    scattered: bool = False
    wide: bool = False


SHAPES = (
    # Two lengths of one variant, for what would be compiled anew.
    Shape(1, 1, (300,), recent=(9,)),
    Shape(1, 1, (700, 700), recent=(40, 40), first=(4, 4), splits=(1, 3)),
    Shape(4, 1, (390, 140), recent=(70, 7), first=(40, 0), mask="additive", splits=(2, 1), scattered=True),
    Shape(1, 2, (200, 0), recent=(2, 5), mask="causal", scattered=True),
    Shape(3, 1, (256,), splits=(0, 1), mask="bool"),
    Shape(3, 2, (70, 260), recent=(6, 33), mask="bool", splits=(1, 1), scattered=True),
    Shape(7, 2, (450,), recent=(130,), first=(3,), mask="causal", splits=(1, 2)),
    Shape(4, 1, (300, 300), recent=(20, 20), first=(4, 4), hidden=(9, 90), splits=(1, 1)),
    Shape(4, 1, (1100,), recent=(3,), mask="split", splits=(1, 4)),
    Shape(4, 1, (150, 150), recent=(9, 4), mask="additive", wide=True),
)
FEW = tuple(SHAPES[i] for i in (0, 1, 2, 6, 7))
"""One row and four at once only, for all sizes but the commonest: each variant takes a GPU seconds to compile."""


def cases(pair: Pair, keys: BoundSide, values: BoundSide, shapes: Sequence[Shape]) -> Iterator[Case]:
    """Inputs of the pass kernel for two bound sides."""
    for seed, shape in enumerate(shapes):
        yield _case(pair, keys, values, shape, np.random.default_rng(seed))


def _case(pair: Pair, keys: BoundSide, values: BoundSide, shape: Shape, rng: np.random.Generator) -> Case:
    block = math.lcm(keys.layout.block, values.layout.block)
    B, H, L = len(shape.packed), keys.ctx.kv_heads, shape.queries
    heads, none = H * shape.repeats, (0,) * B
    packed = tuple(-(-n // block) * block for n in shape.packed)
    first, recent, hidden = shape.first or none, shape.recent or none, shape.hidden or none
    lengths = tuple(p + s + w - h for p, s, w, h in zip(packed, first, recent, hidden, strict=True))
    length = max(lengths)
    dtype = getattr(mx, keys.ctx.dtype)
    q = _normal(rng, (B, heads, L, keys.ctx.key_dim), mx.float32 if shape.wide else dtype)
    inputs = [q]
    if pair.keys.snippet.prepare is not None:
        inputs.append(pair.keys.snippet.prepare(q.astype(mx.float32)))
    mask = _mask(rng, shape, (B, heads, L, length), pair.unit)
    inputs += [row_facts(packed, first, recent, lengths, hidden, length), mask]
    for counts, right in ((recent, True), (first, False)):
        dims = (keys.ctx.key_dim, values.ctx.value_dim)
        inputs += [_exact(rng, (B, H, max(*counts, 1), d), counts, right, dtype) for d in dims]
    sides = [
        _pages(rng, bound, side, packed, max(first), H, shape.scattered)
        for bound, side in ((keys, pair.keys), (values, pair.values))
    ]
    inputs += [table for _, table in sides]
    for (tile, _), side in zip(sides, (pair.keys, pair.values), strict=True):
        inputs += [side.snippet.constants[p.name] if not p.size else tile[p.name] for p in side.pointers]
    numbers = {
        "M": rows_at_once(pair, shape.repeats * L), "length": length, "causal": int(shape.mask == "causal"),
        "scale_bits": struct.unpack("<I", struct.pack("<f", math.log2(math.e) * keys.ctx.key_dim**-0.5))[0],
        "masked": int(shape.mask not in ("", "causal")), "regular": int(not shape.scattered),
        "splits": sum(shape.splits), "exact_splits": shape.splits[0],
    }  # fmt: skip
    said = f"{packed} packed, {first} first and {recent} window tokens, {heads}:{H} heads, {L} queries"
    said += f", mask {shape.mask}" if shape.mask else ""
    return Case(tuple(inputs), numbers, said)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)


def _exact(
    rng: np.random.Generator, shape: tuple[int, ...], counts: tuple[int, ...], right: bool, dtype: mx.Dtype
) -> mx.array:
    """Exact tokens of rows at the right or at the left, NaN in the other places."""
    x = rng.standard_normal(shape, np.float32)
    for row, count in zip(x, counts, strict=True):
        row[:, : shape[2] - count] = np.nan if right else row[:, : shape[2] - count]
        row[:, count:] = row[:, count:] if right else np.nan
    return mx.array(x).astype(dtype)


def _mask(rng: np.random.Generator, shape: Shape, full: tuple[int, int, int, int], unit: int) -> mx.array:
    B, heads, L, length = full
    if shape.mask == "additive":
        added = rng.standard_normal((B, 1, 1, length), np.float32)
        added[rng.random(added.shape) < 0.2] = -np.inf
        return mx.array(added)
    if shape.mask not in ("bool", "split"):
        return NOTHING
    seen = rng.random((1, heads, L, length)) < 0.7
    if shape.mask == "split":  # the packed tokens begin at column 0
        seen[..., : 4 * unit] = False
    array = mx.array(seen).reshape(1, heads // shape.repeats, shape.repeats, L, length)
    return additive(array, heads // shape.repeats)


def _pages(
    rng: np.random.Generator, bound: BoundSide, side: Side, packed: tuple[int, ...], begin: int, heads: int,
    scattered: bool,
) -> tuple[Mapping[str, mx.array], mx.array]:  # fmt: skip
    """Fields of all rows' pages, and the table."""
    layout, rows = bound.layout, len(packed)
    depths = [-(-n // layout.page) for n in packed]
    count = sum(depths) + 2 if scattered else max(depths) * rows
    order = rng.permutation(count)
    table = np.zeros((rows, max(8, *depths)), np.int32)
    dtypes = {p.name: getattr(mx, p.dtype) for p in side.pointers}
    # Fields of the sequence have one place a row, the others one a page.
    places_of = {f.name: rows if f.axis is None else count for f in layout.fields}
    fields = {
        f.name: [_junk(rng, (heads, *f.shape), dtypes[f.name]) for _ in range(places_of[f.name])] for f in layout.fields
    }
    for b, (n, depth) in enumerate(zip(packed, depths, strict=True)):
        if not n:
            continue
        x = _normal(rng, (1, heads, n, bound.ctx.head_dim), getattr(mx, bound.ctx.dtype))
        positions = mx.arange(begin, begin + n, dtype=mx.int32)[None]
        sequence = bound.start(x[:, :, : layout.block], positions[:, : layout.block])
        found = dict(bound.pack(x, positions, sequence)) | dict(sequence)
        places = [order[sum(depths[:b]) + d] if scattered else d * rows + b for d in range(depth)]
        table[b, :depth] = places
        for field in layout.fields:
            held = found[field.name][0].astype(dtypes[field.name])
            for d, place in enumerate([b] if field.axis is None else places):
                fields[field.name][place] = _page(rng, field, held, d)
    return {name: mx.stack(pages) for name, pages in fields.items()}, mx.array(table) if scattered else NO_TABLE


def _page(rng: np.random.Generator, field: Any, x: mx.array, depth: int) -> mx.array:
    """One page of a row's field (H, ...), filled up."""
    if field.axis is None:
        return x
    axis, size = field.axis + 1, field.shape[field.axis]
    held = mx.take(x, mx.arange(depth * size, min((depth + 1) * size, x.shape[axis])), axis=axis)
    short = size - held.shape[axis]
    if not short:
        return held
    shape = [short if i == axis else n for i, n in enumerate(held.shape)]
    return mx.concatenate([held, _junk(rng, tuple(shape), x.dtype)], axis=axis)


def _junk(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """What was there before: NaN, or any bits."""
    if mx.issubdtype(dtype, mx.floating):
        return mx.full(shape, np.nan, dtype)
    return mx.array(rng.integers(0, 2**31, shape)).astype(dtype)
