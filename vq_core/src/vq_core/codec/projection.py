"""Dense projections whose sums are exact, so that no order of additions matters.

A matrix product has an order of its own on every backend, and on the CPU another one for other numbers of rows: codes
made from it would depend on how a prompt was chunked.  Here the factors are whole numbers of few bits, so that each
sum of products fits float32's 24 bits and is exact: a matrix product, a loop in a kernel and TF32 all give the same
bits.  With units of 2**-11 and 2**-20

    x = 2**-11 x1 + 2**-20 x2,    a = 2**-11 a1 + 2**-20 a2    (x1 = rint(2**11 x), x2 = rint of what it leaves)
    <x, a> = 2**-22 <x1, a1> + 2**-31 (<x1, a2> + <x2, a1>)

where each of the three sums is below 2**24 by Cauchy-Schwarz while x and the matrix's rows have norms of at most about
1.  What is left out is below 2**-20 of the norms, as much as float32's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.codec.rotation import random_orthogonal
from vq_core.errors import UnsupportedShapeError

HIGH, LOW = 2.0**11, 2.0**9
"""Units: of the first part, and of the second in it."""
MOST = 512
"""Largest D for which the sums are exact."""


def split(x: mx.array) -> tuple[mx.array, mx.array]:
    """Two parts, whole numbers in float32: x is near 2**-11 first + 2**-20 second."""
    scaled = x * HIGH
    first = mx.round(scaled)
    return first, mx.round((scaled - first) * LOW)


@attrs.frozen(eq=False)
class Projection:
    """A matrix, ready for exact sums.

    Attributes:
        matrix: (R, D) float32, what the rows are after their rounding to 2**-20 of ``scale``: the other side of a
            dot product takes this.
        first, second: (R, D) float32, the parts of matrix / scale.
        scale: A power of two that brings the rows' norms to at most 1.
    """

    matrix: mx.array
    first: mx.array
    second: mx.array
    scale: float

    @classmethod
    def of(cls, matrix: mx.array) -> Projection:
        """Split a matrix (R, D), any finite numbers.

        Raises:
            UnsupportedShapeError: D above 512.
        """
        if matrix.shape[-1] > MOST:
            raise UnsupportedShapeError(
                f"a dense projection of {matrix.shape[-1]} numbers: at most {MOST} are accepted"
            )
        # With 2**-10 to spare: an orthonormal row may have a norm just above 1.
        largest: Any = matrix.astype(mx.float32).square().sum(axis=-1).max().item()
        norm = math.sqrt(largest) * (1 - 2.0**-10)
        scale = 2.0 ** math.ceil(math.log2(norm)) if norm > 0 else 1.0
        first, second = split(matrix.astype(mx.float32) / scale)
        rounded = first / HIGH + second / (HIGH * LOW)
        # Split again: what lies between two units may go to either, and a kernel splits the rounded matrix.
        return cls(rounded * scale, *split(rounded), scale)

    def __call__(self, x: mx.array) -> mx.array:
        """x matrix^T.

        Args:
            x: (..., D) float32, each row of norm about 1: divide by the norm first. Sums are exact up to a norm of 2
                for D up to 256, of 1.4 for 512.

        Returns:
            (..., R) float32, which for a row depends on nothing but that row.
        """
        first, second = split(x)
        high = first @ self.first.T
        low = first @ self.second.T + second @ self.first.T
        return (high * (self.scale / HIGH**2)) + (low * (self.scale / (HIGH**2 * LOW)))


def fold_sum(x: mx.array) -> mx.array:
    """Sum along the last axis in one order, (..., n) to (..., 1): filled up with zeros to a power of two, then the
    second half is added to the first until one number is left."""
    count = int(x.shape[-1])
    half = 1 << max(count - 1, 0).bit_length()
    if half > count:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, half - count)])
    while half > 1:
        half //= 2
        x = x[..., :half] + x[..., half:]
    return x


@attrs.frozen(eq=False)
class DenseRotation:
    """A random orthogonal matrix with exact sums both ways, for any head size up to 512.

    Attributes:
        forward: The matrix P.
        back: P^T.
    """

    forward: Projection
    back: Projection

    @classmethod
    def drawn(cls, dim: int, seed: int | Sequence[int] = 0) -> DenseRotation:
        """From a seed, uniform over all rotations (:func:`vq_core.codec.rotation.random_orthogonal`).

        Raises:
            UnsupportedShapeError: a size below 1 or above 512.
        """
        forward = Projection.of(random_orthogonal(dim, seed))
        return cls(forward, Projection.of(forward.matrix.T))

    @property
    def matrix(self) -> mx.array:
        """(D, D) float32; ``x @ matrix.T`` is :meth:`rotate` but for rounding."""
        return self.forward.matrix

    def rotate(self, x: mx.array) -> mx.array:
        """x P^T for rows (..., D) of norm about 1."""
        return self.forward(x)

    def undo(self, y: mx.array) -> mx.array:
        """y P for rows (..., D) of norm about 1."""
        return self.back(y)
