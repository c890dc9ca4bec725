"""Hadamard transforms in one order of additions, for sizes m * 2**k with m of 1, 12, 20 and 28.

``mx.hadamard_transform`` is not used: on sizes it cannot do it corrupts memory, and its order is its own.  Here each
result has one order, so it depends on nothing but its vector, and a kernel
(:mod:`vq_core.kernels.standard.hadamard`) gives the same bits:

1. the numbers times 1 / sqrt(D), in float32;
2. within each run of 2**k numbers butterflies (a + b, a - b) of strides 1, 2, 4, ...;
3. for m above 1 at each place of the runs: plus or minus the number of run 0, then of run 1, ..., of run m - 1.

One transform with random signs leaves a one-hot vector with D numbers of one size, which a codebook serves badly
(relative error .26 instead of .117 at 2 bits); two behave as a random rotation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import attrs
import mlx.core as mx

from vq_core.errors import UnsupportedShapeError

ODD_PARTS = {1: 1, 3: 12, 5: 20, 7: 28}
"""m by the odd part of the size."""


def hadamard_sizes(dim: int) -> tuple[int, int]:
    """m and 2**k of a size.

    Raises:
        UnsupportedShapeError: a size that is no m * 2**k, naming those that are.
    """
    if isinstance(dim, int) and dim >= 1:
        power = dim & -dim
        m = ODD_PARTS.get(dim // power, 0)
        if m == 1 or (m and power >= 4):
            return m, dim // m
    raise UnsupportedShapeError(
        f"a Hadamard transform of size {dim}: accepted are m * 2**k with m of 1, 12, 20 and 28, such as 64, 80, 96, "
        f"112, 128, 160, 192, 224 and 256; a dense rotation (haar) takes any size up to 512"
    )


@cache
def small_hadamard(m: int) -> tuple[tuple[int, ...], ...]:
    """Rows of +1 and -1 of the m by m matrix: Paley's, of quadratic residues; 12 and 20 are not symmetric.

    Raises:
        UnsupportedShapeError: m that is not 1, 12, 20 or 28.
    """
    if m == 1:
        return ((1,),)
    if m in (12, 20):  # first construction: q = m - 1 is a prime of 3 modulo 4
        q = m - 1
        inner = [[_character(j - i, q) - (i == j) for j in range(q)] for i in range(q)]
        return ((1,) * m, *((1, *row) for row in inner))
    if m == 28:  # second construction: q = 13 is a prime of 1 modulo 4
        q = m // 2 - 1
        outer = [[0, *[1] * q], *([1, *(_character(j - i, q) for j in range(q))] for i in range(q))]
        blocks = {0: ((1, -1), (-1, -1)), 1: ((1, 1), (1, -1)), -1: ((-1, -1), (-1, 1))}
        return tuple(tuple(sign for entry in row for sign in blocks[entry][half]) for row in outer for half in (0, 1))
    raise UnsupportedShapeError(
        f"a Hadamard matrix of size {m}: accepted are {', '.join(map(str, ODD_PARTS.values()))}"
    )


def _character(a: int, q: int) -> int:
    """1 for squares modulo q, -1 for others, 0 for 0."""
    return 0 if a % q == 0 else 1 if pow(a, (q - 1) // 2, q) == 1 else -1


@cache
def normaliser(dim: int) -> float:
    """1 / sqrt(D): the root rounded to float32, then the quotient, as a kernel does it."""
    import numpy as np  # here: listing methods imports their modules and should not pay for numpy

    return float(np.float32(1) / np.sqrt(np.float32(dim)))


def hadamard(x: mx.array) -> mx.array:
    """x H^T along the last axis, H orthonormal.

    Args:
        x: (..., D), any float dtype; D = m * 2**k.

    Returns:
        (..., D) float32.

    Raises:
        UnsupportedShapeError: another size.
    """
    return _transform(x, transposed=False)


def unhadamard(y: mx.array) -> mx.array:
    """y H, which undoes :func:`hadamard`; for sizes of 12 and 20 times a power H is not symmetric."""
    return _transform(y, transposed=True)


def _transform(x: mx.array, transposed: bool) -> mx.array:
    dim = int(x.shape[-1])
    m, power = hadamard_sizes(dim)
    runs = (x.astype(mx.float32) * normaliser(dim)).reshape(*x.shape[:-1], m, power)
    for _ in range(power.bit_length() - 1):
        # Neighbours' sums go before their differences, so the next stride's partners are neighbours; after the last
        # stride each number is in its place.
        a, b = runs[..., 0::2], runs[..., 1::2]
        runs = mx.concatenate([a + b, a - b], axis=-1)
    if m > 1:
        signs = mx.array(small_hadamard(m), mx.float32)
        columns = signs if transposed else signs.T  # of run j: its sign in each result
        mixed = columns[0][:, None] * runs[..., 0:1, :]
        for j in range(1, m):
            mixed = mixed + columns[j][:, None] * runs[..., j : j + 1, :]
        runs = mixed
    return runs.reshape(x.shape)


def sign_vectors(rounds: int, dim: int, seed: int | Sequence[int] = 0) -> mx.array:
    """Random signs (rounds, D), +1 or -1 in float32: the top bits of numpy's PCG64, whose stream never changes."""
    import numpy as np

    parts = (seed,) if isinstance(seed, int) else tuple(seed)
    raw = np.random.default_rng(parts).bit_generator.random_raw(rounds * dim)
    top = np.asarray(raw >> np.uint64(63)).astype(np.float32)
    return mx.array((1 - 2 * top).reshape(rounds, dim))


@attrs.frozen(eq=False)
class SignHadamard:
    """Rounds of random signs, then a Hadamard transform: a rotation of D log D additions.

    Attributes:
        signs: (rounds, D), from :func:`sign_vectors`.
        matrix: (D, D) float32; ``x @ matrix.T`` is :meth:`rotate` but for rounding.
    """

    signs: mx.array
    matrix: mx.array

    @classmethod
    def drawn(cls, dim: int, seed: int | Sequence[int] = 0, rounds: int = 2) -> SignHadamard:
        """From a seed.

        Raises:
            UnsupportedShapeError: a size without Hadamard matrix.
        """
        hadamard_sizes(dim)
        signs = sign_vectors(rounds, dim, seed)
        return cls(signs, _rotate(mx.eye(dim), signs).T)

    def rotate(self, x: mx.array) -> mx.array:
        """(..., D) to (..., D) float32, each round the signs and then :func:`hadamard`."""
        return _rotate(x, self.signs)

    def undo(self, y: mx.array) -> mx.array:
        """The exact transpose of :meth:`rotate`, last round first."""
        for row in reversed(range(self.signs.shape[0])):
            y = unhadamard(y) * self.signs[row]
        return y


def _rotate(x: mx.array, signs: mx.array) -> mx.array:
    for row in range(signs.shape[0]):
        x = hadamard(x.astype(mx.float32) * signs[row])
    return x
