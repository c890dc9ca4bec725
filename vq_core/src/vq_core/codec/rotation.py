"""Random orthogonal matrices, for any head size.

Drawn from numpy's generator in float64, so that they depend on the seed alone and MLX's global random state
stays the user's.  ``mx.hadamard_transform`` is not used: on sizes it cannot do it corrupts memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vq_core.errors import UnsupportedShapeError

if TYPE_CHECKING:
    import numpy as np


def random_orthogonal(dim: int, seed: int | Sequence[int] = 0) -> mx.array:
    """A random orthogonal matrix, uniform over all of them (Haar).

    QR of a Gaussian matrix, each column's sign set so that R has a positive diagonal: without that the result
    is orthogonal but not uniform.

    Args:
        dim: D, any size from 1 on.
        seed: Seed, or several numbers that together are one.

    Returns:
        (D, D) float32; ``x @ P.T`` rotates rows x, ``y @ P`` undoes it.

    Raises:
        UnsupportedShapeError: a size below 1.
    """
    if dim < 1:
        raise UnsupportedShapeError(f"a rotation of size {dim}: the head size must be at least 1")
    import numpy as np  # here: listing methods imports their modules and should not pay for numpy

    parts = (seed,) if isinstance(seed, int) else tuple(seed)
    return mx.array(_haar(np.random.default_rng(parts).standard_normal((dim, dim))).astype(np.float32))


def _haar(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Q of the QR factorization of a square matrix with R's diagonal positive, by Householder reflections.

    LAPACK's took 2 s for D = 256 where its threads compete with MLX's, and its rounding depends on their number.
    """
    import numpy as np

    r, q = a.copy(), np.eye(len(a))
    for k in range(len(a) - 1):
        v = r[k:, k].copy()
        v[0] += np.copysign(np.sqrt(np.einsum("i,i->", v, v)), v[0])
        v *= np.sqrt(2 / np.einsum("i,i->", v, v))
        r[k:, k:] -= v[:, None] * np.einsum("i,ij->j", v, r[k:, k:])
        q[:, k:] -= np.einsum("ij,j->i", q[:, k:], v)[:, None] * v
    return np.asarray(q * np.where(np.diagonal(r) < 0, -1.0, 1.0))


def orthogonal_sketch(rows: int, dim: int, seed: int | Sequence[int] = 0) -> mx.array:
    """Rows of independent random orthogonal matrices, stacked and scaled to the norm of Gaussian ones.

    Rows of one matrix are orthogonal, which makes estimates from their signs several times less noisy than
    independent Gaussian rows do.

    Args:
        rows: m.
        dim: D.
        seed: Seed, or several numbers that together are one.

    Returns:
        (m, D) float32, each row of norm sqrt(D).
    """
    parts = (seed,) if isinstance(seed, int) else tuple(seed)
    stacked = [random_orthogonal(dim, (*parts, i)) for i in range(-(-rows // dim))]
    sketch: mx.array = mx.concatenate(stacked)[:rows] * dim**0.5
    return sketch


def gaussian_matrix(rows: int, dim: int, seed: int | Sequence[int] = 0) -> mx.array:
    """Independent N(0, 1) numbers, the published sketch.

    Args:
        rows: m.
        dim: D.
        seed: Seed, or several numbers that together are one.

    Returns:
        (m, D) float32.
    """
    import numpy as np

    parts = (seed,) if isinstance(seed, int) else tuple(seed)
    return mx.array(np.random.default_rng(parts).standard_normal((rows, dim)).astype(np.float32))
