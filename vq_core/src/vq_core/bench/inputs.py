"""Inputs of the kernels' benchmark, and the arms that take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import mlx.core as mx

from vq_core.api.facts import SIDES, Side
from vq_core.kernels.verify import relative
from vq_core.plugins.binding import BoundSide

Timed = Literal["encode+pack", "decode"]


@attrs.frozen(eq=False)
class Item:
    """One input of the pool: B = 1."""

    x: Mapping[Side, mx.array]
    positions: mx.array
    sequence: Mapping[Side, Mapping[str, mx.array]]
    packed: Mapping[Side, Mapping[str, mx.array]]
    copied: mx.array


def item_of(
    bounds: Mapping[Side, BoundSide], operation: Timed, sides: Sequence[Side], tokens: int, number: int
) -> Item:
    """The input of that number, evaluated: other numbers for another one."""
    positions = mx.arange(tokens, dtype=mx.int32)[None]
    x: dict[Side, mx.array] = {}
    sequence: dict[Side, Mapping[str, mx.array]] = {}
    packed: dict[Side, Mapping[str, mx.array]] = {}
    written = 0
    for side in sides:
        bound, ctx = bounds[side], bounds[side].ctx
        block = bound.layout.block
        x[side] = noise((1, ctx.kv_heads, tokens, ctx.head_dim), ctx.dtype, 2 * number + SIDES.index(side))
        sequence[side] = bound.start(x[side][:, :, :block], positions[:, :block])
        packed[side] = bound.pack(x[side], positions, sequence[side])
        # A decoded number takes 4 bytes.
        written += nbytes(packed[side]) if operation == "encode+pack" else 4 * x[side].size
    made = Item(x, positions, sequence, {} if operation == "encode+pack" else packed, positions)
    moved = bytes_read(made, operation, sides) + written
    copied = noise((max(8, moved // 4),), "float16", 1000 + number)
    made = attrs.evolve(made, copied=copied, x=x if operation == "encode+pack" else {})
    mx.eval(made.x, made.positions, made.sequence, made.packed, made.copied)
    return made


def noise(shape: tuple[int, ...], dtype: str, seed: int) -> mx.array:
    """N(0, 1), evaluated; a key of its own leaves MLX's global random state alone."""
    made = mx.random.normal(shape, key=mx.random.key(seed)).astype(getattr(mx, dtype))
    mx.eval(made)
    return made


def arm(operation: Timed, sides: Sequence[Side], bound: Mapping[Side, BoundSide]) -> Callable[[Item], Any]:
    """What is timed: an operation of these sides, by the calls that a cache makes; rows of each side."""

    def pack(item: Item) -> list[dict[str, mx.array]]:
        return [bound[side].pack(item.x[side], item.positions, item.sequence[side]) for side in sides]

    def decode(item: Item) -> list[dict[str, mx.array]]:
        return [
            {"x": bound[side].decode({**item.packed[side], **item.sequence[side]}, item.positions)} for side in sides
        ]

    return pack if operation == "encode+pack" else decode


def bytes_read(item: Item, operation: Timed, sides: Sequence[Side]) -> int:
    """Bytes that an operation reads, the positions left out."""
    given = [item.x[side] for side in sides] if operation == "encode+pack" else [item.packed[side] for side in sides]
    return nbytes([given, [item.sequence[side] for side in sides]])


def nbytes(tree: Any) -> int:
    """Bytes of all arrays in lists and mappings."""
    if isinstance(tree, mx.array):
        return int(tree.nbytes)
    return sum(nbytes(part) for part in (tree.values() if isinstance(tree, Mapping) else tree))


def differs(
    sides: Sequence[Side], got: Sequence[Mapping[str, mx.array]], want: Sequence[Mapping[str, mx.array]],
    tolerance: float,
) -> str:  # fmt: skip
    """Why a kernel must get no ratio: it computes something else than what it is compared with."""
    for side, a, b in zip(sides, got, want, strict=True):
        for name in b:
            if mx.array_equal(a[name], b[name]).item():
                continue
            difference = relative(a[name], b[name])
            if not difference <= tolerance:
                return f"{name} of the {side} differs from the plain operations' by {difference:.2e}, see `vq verify`"
    return ""
