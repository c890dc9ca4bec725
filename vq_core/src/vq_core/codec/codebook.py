"""Lloyd-Max codebooks for N(0, 1), for Laplace's law and for what a first code leaves; coding by counting boundaries.

A unit vector of D coordinates, rotated at random and scaled by sqrt(D), has coordinates so near to N(0, 1) for
D of 64 and more that this one table loses less than 0.5% of the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import mlx.core as mx

from vq_core.errors import UnsupportedShapeError

_SETTLED = 1e-9


Part = Callable[[float], tuple[float, float]]
"""Of a law, symmetric about 0: up to how far out goes how much of it, and with which first moment, from any start."""


@cache
def gaussian_centroids(bits: int) -> tuple[float, ...]:
    """The 2**bits centroids with least squared error on N(0, 1), ascending and symmetric.

    Rounded to six decimals, so that every platform has the same table.

    Raises:
        UnsupportedShapeError: bits out of 1 to 6.
    """
    return _settled(bits, _normal)


@cache
def laplace_centroids(bits: int) -> tuple[float, ...]:
    """The same for Laplace's law of variance 1, whose mean magnitude is sqrt(1/2).

    Raises:
        UnsupportedShapeError: bits out of 1 to 6.
    """

    def part(edge: float) -> tuple[float, float]:
        tail = math.exp(-edge * math.sqrt(2)) / 2
        return -tail, -tail * (edge + math.sqrt(0.5)) if edge < math.inf else 0.0

    return _settled(bits, part)


@cache
def residual_centroids(first: int, bits: int) -> tuple[float, ...]:
    """The same for what N(0, 1) differs by from its nearest centroid of ``first`` bits.

    That law has a box in the middle and tails, so Lloyd's iteration has several ends: the best of two starts is
    taken, which a search over all tables confirms for 1 to 4 bits (tests/test_rotation_and_codebook.py).

    Raises:
        UnsupportedShapeError: bits out of 1 to 6.
    """
    centroids = gaussian_centroids(first)
    cells = list(zip(centroids, pairwise((-math.inf, *boundaries(centroids), math.inf)), strict=True))

    def part(edge: float) -> tuple[float, float]:
        mass = moment = 0.0
        for centre, (low, high) in cells:  # of each cell what lies below the edge
            end = max(low, min(high, centre + edge))
            (m1, f1), (m0, f0) = _normal(end), _normal(low)
            mass, moment = mass + m1 - m0, moment + (f1 - f0) - centre * (m1 - m0)
        return mass, moment

    spread = math.sqrt(gaussian_error(first))
    return _settled(bits, part, (spread, 4 * spread))


@cache
def gaussian_error(bits: int) -> float:
    """Mean squared error of :func:`gaussian_centroids` on N(0, 1): the variance of what the code leaves."""
    centroids = gaussian_centroids(bits)
    parts = [_normal(edge) for edge in (-math.inf, *boundaries(centroids), math.inf)]
    return 1 + sum(
        c * (c * (b[0] - a[0]) - 2 * (b[1] - a[1])) for c, (a, b) in zip(centroids, pairwise(parts), strict=True)
    )


def _normal(edge: float) -> tuple[float, float]:
    return NormalDist().cdf(edge), -NormalDist().pdf(edge) if math.isfinite(edge) else 0.0


def _settled(bits: int, part: Part, starts: tuple[float, ...] = (1.0,)) -> tuple[float, ...]:
    """Lloyd's iteration: a centroid is the mean of its cell, a cell ends half way between two centroids.

    Args:
        bits: Of a code.
        part: Of a law that is symmetric about 0, from some fixed point up to an edge: mass and first moment.
        starts: Factors on where the iteration starts; the end with the least error is taken.
    """
    import numpy as np  # here: listing methods imports their modules and should not pay for numpy

    if not 1 <= bits <= 6:
        raise UnsupportedShapeError(f"a codebook of {bits} bits: accepted are 1 to 6")
    half, normal = 2 ** (bits - 1), NormalDist()
    # Optimal centroids lie as the density to the power 1/3, that of N(0, 1) as N(0, 3): its inner half is a start.
    unit = np.array([math.sqrt(3) * normal.inv_cdf(0.5 + (i + 0.5) / (4 * half)) for i in range(half)])
    best, found = -1.0, unit
    for start in starts:
        levels = unit * start
        for _ in range(100_000):
            edges = [0.0, *((levels[1:] + levels[:-1]) / 2), math.inf]
            mass, moment = np.diff([part(e) for e in edges], axis=0).T
            new = moment / mass
            moved, levels = float(np.abs(new - levels).max()), new
            if moved < _SETTLED:
                break
        kept = float((moment * levels).sum())  # of the variance; the rest is the error
        if kept > best:
            best, found = kept, levels
    positive = [round(float(v), 6) for v in found]
    return (*(-v for v in reversed(positive)), *positive)


def boundaries(centroids: tuple[float, ...]) -> tuple[float, ...]:
    """Midpoints between neighbouring centroids."""
    return tuple((a + b) / 2 for a, b in pairwise(centroids))


def count_below(x: mx.array, edges: tuple[float, ...]) -> mx.array:
    """For each number how many of ``edges`` are strictly below it: the code of its nearest centroid.

    A number on an edge takes the lower code, NaN takes code 0; kernels must do the same.

    Args:
        x: Any shape, float32.
        edges: Ascending; a handful, since each costs one pass.

    Returns:
        uint32 of the shape of ``x``.
    """
    codes = mx.zeros(x.shape, mx.uint32)
    for edge in edges:
        codes = codes + (x > edge)
    return codes.astype(mx.uint32)
