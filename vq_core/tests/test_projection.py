"""Dense projections: near the product, and the same bits whatever the number of rows and the order."""

from __future__ import annotations

from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from vq_core.codec.projection import MOST, Projection, fold_sum, split
from vq_core.codec.rotation import gaussian_matrix, orthogonal_sketch, random_orthogonal
from vq_core.errors import UnsupportedShapeError


def units(dim: int, count: int = 120) -> mx.array:
    """Unit vectors: random ones, axes, and rows of one size."""
    x = np.random.default_rng(dim).standard_normal((count, dim))
    x[: min(dim, 30)] *= np.eye(dim)[: min(dim, 30)]
    x[30:40] = np.sign(x[30:40])
    return mx.array((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32))


@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256, 512])
def test_it_is_the_product(dim: int) -> None:
    p = random_orthogonal(dim, 3)
    made, x = Projection.of(p), units(dim)
    assert made.scale == 1 and mx.abs(made.matrix - p).max().item() < 2**-20
    m = np.array(made.matrix, np.float64)
    assert np.abs(m @ m.T - np.eye(dim)).max() < 3e-6
    assert np.abs(np.array(made(x)) - np.array(x, np.float64) @ m.T).max() < 4e-6


@pytest.mark.parametrize("dim", [80, 128])
def test_rows_do_not_depend_on_their_number(dim: int) -> None:
    made, x = Projection.of(random_orthogonal(dim, 3)), units(dim)
    x[50] = float("nan")
    whole = np.array(made(x))
    for n in (1, 3, 7, 40):
        parts = [np.array(made(x[i : i + n])) for i in range(0, 120, n)]
        assert np.array_equal(np.concatenate(parts), whole, equal_nan=True)
    assert np.isnan(whole).any(axis=1).sum() == 1
    assert np.array_equal(np.array(made(x.reshape(4, 30, dim))).reshape(120, -1), whole, equal_nan=True)


@pytest.mark.parametrize("dim", [128, MOST])
def test_sums_are_exact(dim: int) -> None:
    """In any order: here from the last to the first in float32, and in float64; for the worst row, a copy of x."""
    made = Projection.of(mx.concatenate([random_orthogonal(dim, 3)[:16], units(dim)[28:44]]))
    x = mx.concatenate([units(dim)[:60], made.matrix[:16]])
    rows, parts = np.array(x), [np.array(part) for part in split(x)]
    highs, lows = np.array(made.first), np.array(made.second)
    sums = []
    for a, b in ((parts[0], highs), (parts[0], lows), (parts[1], highs)):
        want = a.astype(np.float64) @ b.astype(np.float64).T
        backwards = np.zeros(want.shape, np.float32)
        for j in reversed(range(dim)):
            backwards = backwards + a[:, j : j + 1] * b[:, j]
        assert np.array_equal(backwards, want) and np.abs(want).max() < 2**24
        sums.append(want.astype(np.float32))
    low = sums[1] + sums[2]
    assert np.array_equal(np.array(made(x)), sums[0] * np.float32(2.0**-22) + low * np.float32(2.0**-31))
    assert all(np.abs(part).max() <= 2**11 for part in (*parts, highs, lows)), "TF32 holds them"
    assert np.abs(rows - (parts[0] / 2**11 + parts[1] / 2**20)).max() <= 2**-21


@pytest.mark.parametrize("sketch", [gaussian_matrix, orthogonal_sketch])
def test_sketches_are_scaled_by_a_power_of_two(sketch: object) -> None:
    s = sketch(200, 128, 5)  # type: ignore[operator]
    made, x = Projection.of(s), units(128)
    assert made.scale == 16 and np.linalg.norm(np.array(made.matrix) / made.scale, axis=1).max() <= 1
    assert np.abs(np.array(made(x)) - np.array(x, np.float64) @ np.array(made.matrix, np.float64).T).max() < 1e-4
    assert np.array_equal(np.array(Projection.of(s * 4)(x)), np.array(made(x)) * 4)
    zero = Projection.of(mx.zeros((3, 8)))
    assert zero.scale == 1 and not mx.any(zero(units(8))).item()


def test_gaussian_matrix() -> None:
    a = np.array(gaussian_matrix(300, 200, (3, 1)))
    assert a.shape == (300, 200) and a.dtype == np.float32
    assert abs(a.mean()) < 4 / 245 and abs(a.var() - 1) < 0.03
    assert np.array_equal(a, np.random.default_rng((3, 1)).standard_normal((300, 200)).astype(np.float32))


def test_too_long_rows_are_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="projection of 513 numbers: at most 512"):
        Projection.of(mx.zeros((2, MOST + 1)))


@pytest.mark.parametrize("count", [1, 2, 3, 80, 100, 128])
def test_fold_sum(count: int) -> None:
    x = np.random.default_rng(count).standard_normal((5, count)).astype(np.float32)
    found = np.array(fold_sum(mx.array(x)))
    assert found.shape == (5, 1)
    whole = [float(sum(Fraction(float(v)) for v in row)) for row in x]
    assert np.abs(found[:, 0] - whole).max() < 1e-5
    for row, total in zip(x, found, strict=True):
        numbers = [*row, *[np.float32(0)] * ((1 << (count - 1).bit_length()) - count)]
        while len(numbers) > 1:
            half = len(numbers) // 2
            numbers = [a + b for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        assert numbers[0] == total[0]
