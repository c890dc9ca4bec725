"""The pass on tensor cores, with the exact tokens in its launch, as its cases and reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.attention.choice import pair_of
from vq_core.attention.fused import NOTHING
from vq_core.attention.verifying.cases import SHAPES, cases
from vq_core.attention.verifying.reference import reference
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.kernel import Case, Kernel
from vq_core.kernels.skeleton.matrix_kernels import matrix_pair
from vq_core.plugins.binding import BoundSide

SERVED = tuple(shape for shape in SHAPES if shape.mask in ("", "causal") and not shape.wide)
"""Without masks that are arrays."""


def matrix_kernel(keys: BoundSide, values: BoundSide) -> Kernel:
    """The kernel of two sides in device form with a reference and cases; compared are the merged outputs.

    Raises:
        UnsupportedShapeError: a side holds its pages in no form for tensor cores.
    """
    for side in (keys, values):
        if side.held is None or side.held.matrix is None or side.snippet is None:
            raise UnsupportedShapeError(f"{side.choice.label} holds its {side.ctx.side} in no form for tensor cores")
    assert keys.held is not None and values.held is not None
    dtype = getattr(mx, keys.ctx.dtype)
    constants = {
        f"{m.prefix}_{name}": a for m in (keys.held.matrix, values.held.matrix) for name, a in m.constants.items()
    }
    # The portable skeleton reads the same form, so its inputs are these and its reference is this one's.
    portable = pair_of(keys, values, dtype)
    own = matrix_pair(keys.held.matrix, values.held.matrix, keys.ctx.dtype)
    told = reference(portable, keys, values)
    spare: dict[str, mx.array] = {"mask": NOTHING}  # what the portable skeleton takes besides
    for known in (portable.keys, portable.values):
        spare |= {f"{known.prefix}_{name}": array for name, array in known.snippet.constants.items()}

    def equals(*inputs: mx.array, folded: int, fresh: int, **numbers: Any) -> Sequence[mx.array]:
        a: dict[str, mx.array] = dict(zip(own.run.inputs, inputs, strict=True)) | spare
        if fresh:
            a |= {f"exact_{s}": mx.concatenate([a[f"exact_{s}"], a[f"new_{s}"]], axis=2) for s in "kv"}
        found = told(*(a[name] for name in portable.run.inputs), masked=0, **numbers)
        return merged(*found, *(a[f"exact_{s}"] if fresh else mx.zeros((1,)) for s in "kv"))

    def some() -> Iterator[Case]:
        for turn, case in enumerate(cases(portable, keys, values, SERVED)):
            a: dict[str, mx.array] = dict(zip(portable.run.inputs, case.inputs, strict=True)) | constants
            if own.prepare is not None:  # which may differ from the portable snippet's, by a power of two
                a["prepared"] = own.prepare(a["q"].astype(mx.float32))
            numbers = {name: case.parameters[name] for name in own.run.numbers if name not in ("folded", "fresh")}
            fits = 2 * numbers["exact_splits"] <= numbers["splits"]
            numbers["folded"] = (1, 3, 0)[turn % 3] if fits else 0
            for fresh in dict.fromkeys((0, *_fresh(a))):
                cut = a["exact_k"].shape[2] - fresh
                new = {f"new_{s}": mx.contiguous(a[f"exact_{s}"][:, :, cut:]) for s in "kv"}
                kept = {f"exact_{s}": mx.contiguous(a[f"exact_{s}"][:, :, :cut]) for s in "kv"}
                given = a | new | kept if fresh else a | {f"new_{s}": a[f"exact_{s}"] for s in "kv"}
                name = f"{case.name}, {fresh} of them new" if fresh else case.name
                yield Case(tuple(given[n] for n in own.run.inputs), numbers | {"fresh": fresh}, name)

    return attrs.evolve(own.run, equals=equals, cases=some, compared=merged)


def _fresh(a: Mapping[str, mx.array]) -> list[int]:
    """How many tokens of the window may be new ones: all rows must hold as many, and some must be old."""
    width, rows = a["exact_k"].shape[2], np.array(a["rows"])
    if width < 2 or (rows[:, 2] != width).any():
        return []
    L = a["q"].shape[2]
    return [n for n in (L, max(L, width // 2), width - 1) if L <= n < width]


def merged(sums: mx.array, tops: mx.array, *grown: mx.array) -> tuple[mx.array, ...]:
    """One softmax of all splits, (B, H, R * L, D) float32; a split without tokens has weights of zero.

    The window with new tokens as it is; what is not written, where there are none, is nothing.
    """
    top = mx.where(tops[..., 1] > 0, tops[..., 0], -3.0e38)
    share = mx.where(tops[..., 1] > 0, mx.exp((top - top.max(axis=2, keepdims=True)) * math.log(2)), 0)
    out = (sums * share[..., None]).sum(axis=2) / (tops[..., 1] * share).sum(axis=2)[..., None]
    return (out, *(x if x.ndim == 4 else mx.zeros((1,)) for x in grown))
