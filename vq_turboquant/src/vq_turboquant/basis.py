"""Rotations of turboquant_rvq and turboquant_prod: vectors of norm about 1, and one result whatever their number."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx

from vq_core.api import UnsupportedShapeError
from vq_core.codec.hadamard import SignHadamard, hadamard_sizes
from vq_core.codec.projection import Projection
from vq_core.codec.rotation import random_orthogonal

ROTATIONS = ("auto", "hadamard", "haar")


@attrs.frozen(eq=False)
class Haar:
    """A dense rotation by exact sums: :mod:`vq_core.codec.projection`.

    Attributes:
        forward, back: The matrix P, and its transpose.
    """

    forward: Projection
    back: Projection

    @classmethod
    def drawn(cls, dim: int, seed: Sequence[int]) -> Haar:
        """From a seed."""
        matrix = random_orthogonal(dim, seed)
        return cls(Projection.of(matrix), Projection.of(matrix.T))

    @property
    def matrix(self) -> mx.array:
        """(D, D); ``x @ matrix.T`` is :meth:`rotate` but for rounding."""
        return self.forward.matrix

    def rotate(self, x: mx.array) -> mx.array:
        """(..., D) of norm about 1."""
        return self.forward(x)

    def undo(self, y: mx.array) -> mx.array:
        """(..., D) of norm about 1."""
        return self.back(y)


def rotation_for(kind: str, dim: int, seed: Sequence[int]) -> SignHadamard | Haar:
    """Two sign-Hadamard rounds, or a Haar matrix; ``auto``: the first where the head size has a Hadamard matrix.

    Raises:
        UnsupportedShapeError: ``hadamard`` for a head size without one.
    """
    if kind == "haar" or (kind == "auto" and not _has_hadamard(dim)):
        return Haar.drawn(dim, seed)
    return SignHadamard.drawn(dim, seed)


def _has_hadamard(dim: int) -> bool:
    try:
        hadamard_sizes(dim)
    except UnsupportedShapeError:
        return False
    return True
