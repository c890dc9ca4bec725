"""One scale a token, as the kernels compute it: the root mean square, and the vector over it."""

from __future__ import annotations

import math

import mlx.core as mx

from vq_core.codec.bits import WORD
from vq_core.codec.projection import fold_sum

FLOAT16_MAX = 65504.0


def root(dim: int) -> float:
    """sqrt(D) in float32."""
    import numpy as np  # here: listing methods imports their modules and should not pay for numpy

    return float(np.sqrt(np.float32(dim)))


def filled(count: int, bits: int) -> int:
    """Codes that fill whole words, ``count`` or more."""
    step = WORD // math.gcd(WORD, bits)
    return -(-count // step) * step


def unit_vectors(x: mx.array, dtype: str) -> tuple[mx.array, mx.array]:
    """Vectors of norm about 1, and their scales as stored.

    Args:
        x: (..., D), any float dtype.
        dtype: Of the scale.

    Returns:
        x over sqrt(D) times its scale, (..., D) float32, zeros where the scale is 0 or not finite; and the root mean
        square, (..., 1) ``dtype``.
    """
    x, dim = x.astype(mx.float32), x.shape[-1]
    scale = mx.sqrt(fold_sum(x.square()) / dim).astype(getattr(mx, dtype))
    size = scale.astype(mx.float32) * root(dim)
    usable = (size > 0) & (size < mx.inf)
    return mx.where(usable, x / mx.where(usable, size, 1), 0), scale


def narrowed(scale: mx.array, dtype: str) -> mx.array:
    """A scale as it is stored; of float16 at most the largest number where it is finite."""
    if dtype == "float32":
        return scale
    return mx.where((scale > FLOAT16_MAX) & (scale < mx.inf), FLOAT16_MAX, scale).astype(mx.float16)
