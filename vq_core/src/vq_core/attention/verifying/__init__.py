"""The pass kernels of fused attention, verified like every other kernel."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx

from vq_core.attention.choice import pair_of
from vq_core.attention.verifying.cases import FEW, SHAPES, Shape, cases
from vq_core.attention.verifying.reference import reference
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.kernel import Kernel
from vq_core.plugins.binding import BoundSide

COMMONEST = 128
"""The head size for which every shape is run."""


def pass_kernel(
    keys: BoundSide, values: BoundSide, shapes: Sequence[Shape] | None = None, wide: bool = False
) -> Kernel:
    """The pass kernel of two bound sides with a reference and cases.

    Args:
        keys, values: Sides that have snippets.
        shapes: What is run; by default all for a head size of 128, few for others.
        wide: Fields that may widen are in their wide dtype.

    Raises:
        UnsupportedShapeError: the skeleton cannot serve them, or nothing says what their stored basis is.
    """
    for side in (keys, values):
        if side.snippet is None:
            raise UnsupportedShapeError(side.without_snippet)
    assert values.snippet is not None
    if values.snippet.finish is not None and values.attend is None:
        raise UnsupportedShapeError(
            f"{values.choice.label} sums values in a basis of its own, and without vq_attend nothing says in which"
        )
    stored = (_wide(keys), _wide(values)) if wide else ((), ())
    pair = pair_of(keys, values, getattr(mx, keys.ctx.dtype), *stored)
    chosen = shapes or (SHAPES if keys.ctx.key_dim == COMMONEST else FEW)
    return attrs.evolve(pair.run, equals=reference(pair, keys, values), cases=lambda: cases(pair, keys, values, chosen))


def _wide(bound: BoundSide) -> tuple[mx.Dtype, ...]:
    return tuple(getattr(mx, field.wide or field.dtype) for field in bound.layout.fields)


__all__ = ["COMMONEST", "SHAPES", "Shape", "pass_kernel"]
