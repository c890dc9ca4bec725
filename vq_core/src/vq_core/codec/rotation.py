"""Random orthogonal matrices, for any head size.

Drawn from numpy's generator in float64, so that they depend on the seed alone and MLX's global random state
stays the user's.  ``mx.hadamard_transform`` is not used: on sizes it cannot do it corrupts memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from vq_core.errors import UnsupportedShapeError


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
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    signs = np.where(np.diagonal(r) < 0, -1.0, 1.0)
    return mx.array((q * signs).astype(np.float32))


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
    return mx.concatenate(stacked)[:rows] * dim**0.5
