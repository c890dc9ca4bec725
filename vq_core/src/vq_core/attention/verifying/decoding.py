"""The kernels that decode a side for long queries, with their cases; equal to what the hooks decode, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.attention.choice import pair_of
from vq_core.attention.verifying.cases import SHAPES, cases
from vq_core.kernels.kernel import Case, Kernel
from vq_core.kernels.skeleton.gather import gather
from vq_core.kernels.skeleton.portable import Side
from vq_core.plugins.binding import BoundSide

SERVED = tuple(shape for shape in SHAPES if shape.mask in ("", "causal") and not shape.wide)


def decoding_kernels(keys: BoundSide, values: BoundSide) -> tuple[Kernel, Kernel]:
    """Those of two bound sides with snippets.

    Raises:
        UnsupportedShapeError: a side's numbers are in a basis of their own, or the skeleton cannot serve them.
    """
    pair = pair_of(keys, values, getattr(mx, keys.ctx.dtype))
    made = []
    for bound, side in ((keys, pair.keys), (values, pair.values)):
        kernel = gather(side, bound.ctx.head_dim, bound.ctx.dtype)

        def some(kernel: Kernel = kernel, side: Side = side) -> Iterator[Case]:
            for case in cases(pair, keys, values, SERVED):
                a = dict(zip(pair.run.inputs, case.inputs, strict=True))
                a |= {"exact": a[f"exact_{side.prefix}"], "sinks": a[f"sink_{side.prefix}"]}
                facts = np.array(a["rows"])
                depth = -(-int(facts[:, 0].max()) // side.page)
                numbers = {"length": case.parameters["length"], "regular": case.parameters["regular"], "depth": depth}
                numbers["before"] = int(facts[:, 3].max())
                yield Case(tuple(a[name] for name in kernel.inputs), numbers, case.name)

        made.append(attrs.evolve(kernel, equals=_decoded(kernel, bound, side), cases=some))
    return made[0], made[1]


def _decoded(kernel: Kernel, bound: BoundSide, side: Side) -> Callable[..., Sequence[mx.array]]:
    def equals(*inputs: mx.array, length: int, regular: int, **numbers: Any) -> Sequence[mx.array]:
        a = dict(zip(kernel.inputs, inputs, strict=True))
        facts, dtype = np.array(a["rows"]), a["exact"].dtype
        rows = []
        for b, (packed, first, recent, pad, hidden) in enumerate(facts[:, :5].tolist()):
            parts = [a["sinks"][b, :, :first]]
            if packed:
                depth = -(-packed // side.page)
                table = np.array(a[f"{side.prefix}_table"])
                places = np.arange(depth) * len(facts) + b if regular else table[b, :depth]
                tile = {}
                for p in side.pointers:
                    if p.size:
                        x = a[f"{side.prefix}_{p.name}"]
                        tile[p.name] = x[b : b + 1] if p.sequence else x[mx.array(places.astype(np.int32))]
                positions = mx.arange(depth * side.page, dtype=mx.int32).reshape(depth, -1)
                x = bound.decode(tile, positions)
                x = x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3])[:, :packed]
                parts.append(x.astype(dtype))
            parts.append(a["exact"][b, :, a["exact"].shape[2] - recent :])
            row = mx.concatenate(parts, axis=1)[:, hidden:]
            rows.append(mx.pad(row, [(0, 0), (length - row.shape[1], 0), (0, 0)]))
            assert row.shape[1] + pad == length
        return [mx.stack(rows)]

    return equals
