"""Shared mathematics: random rotations of every head size, Lloyd-Max tables, counting boundaries."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vq_core.codec.codebook import (
    boundaries,
    count_below,
    gaussian_centroids,
    gaussian_error,
    laplace_centroids,
    residual_centroids,
)
from vq_core.codec.rotation import orthogonal_sketch, random_orthogonal
from vq_core.errors import UnsupportedShapeError

SIZES = (1, 2, 12, 20, 24, 28, 40, 64, 72, 80, 96, 100, 112, 120, 128, 160, 192, 224, 256, 320, 576)


@pytest.mark.parametrize("dim", SIZES)
def test_rotation_is_orthogonal_at_every_size(dim: int) -> None:
    p = np.array(random_orthogonal(dim, 7)).astype(np.float64)
    assert p.shape == (dim, dim)
    assert np.abs(p @ p.T - np.eye(dim)).max() < 1e-5
    x = np.random.default_rng(0).standard_normal((50, dim))
    assert np.abs(np.linalg.norm(x @ p.T, axis=1) / np.linalg.norm(x, axis=1) - 1).max() < 1e-5


def test_the_check_above_finds_a_cut_hadamard_matrix() -> None:
    h = np.array([[1.0]])
    while len(h) < 128:
        h = np.block([[h, h], [h, -h]])
    cut = h[:80, :80] / np.sqrt(80)
    assert np.abs(cut @ cut.T - np.eye(80)).max() > 1e-3


def test_rotation_is_lapacks_with_the_signs_set() -> None:
    a = np.random.default_rng((5, 1)).standard_normal((96, 96))
    q, r = np.linalg.qr(a)
    want = q * np.where(np.diagonal(r) < 0, -1, 1)
    assert np.abs(np.array(random_orthogonal(96, (5, 1))) - want).max() < 1e-6


def test_rotation_is_uniform() -> None:
    # The trace of a Haar matrix has mean 0 and variance 1; without the signs its mean is far from 0.
    traces = [float(mx.trace(random_orthogonal(16, (9, i)))) for i in range(400)]
    assert abs(np.mean(traces)) < 4 / 20 and 0.8 < np.std(traces) < 1.2


def test_rotation_depends_on_the_seed_alone() -> None:
    mx.random.seed(1)
    before = mx.random.state[0].tolist()
    a = np.array(random_orthogonal(64, 3))
    assert mx.random.state[0].tolist() == before
    assert np.array_equal(a, np.array(random_orthogonal(64, (3,))))
    assert not np.array_equal(a, np.array(random_orthogonal(64, 4)))
    with pytest.raises(UnsupportedShapeError, match="0"):
        random_orthogonal(0)


@pytest.mark.parametrize("rows", [32, 80, 100, 256])
def test_sketch(rows: int) -> None:
    s = np.array(orthogonal_sketch(rows, 80, 3))
    assert s.shape == (rows, 80)
    assert np.allclose(np.linalg.norm(s, axis=1), np.sqrt(80), rtol=1e-5)
    first = s[: min(rows, 80)]
    assert np.allclose(first @ first.T, 80 * np.eye(len(first)), atol=1e-3)


@pytest.mark.parametrize(
    ("bits", "half", "error"),
    [
        (1, [0.79788], 0.36338),
        (2, [0.45278, 1.51042], 0.11748),
        (3, [0.24509, 0.75601, 1.34391, 2.15195], 0.03455),
        (4, [0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259], 0.00950),
        (5, None, 0.00250),
    ],
)
def test_codebook_is_lloyd_max(bits: int, half: list[float] | None, error: float) -> None:
    centroids = gaussian_centroids(bits)
    assert len(centroids) == 2**bits
    assert centroids == tuple(-c for c in reversed(centroids)) == tuple(sorted(centroids))
    if half is not None:
        assert np.allclose(centroids[2 ** (bits - 1) :], half, atol=1.1e-5)
    x = np.random.default_rng(0).standard_normal(400_000).astype(np.float32)
    codes = np.array(count_below(mx.array(x), boundaries(centroids)))
    assert np.isclose(np.square(x - np.array(centroids)[codes]).mean(), error, rtol=0.01)


@pytest.mark.parametrize(
    ("bits", "half", "error"),
    [
        (1, [0.70711], 0.5),
        (2, [0.41976, 1.83397], 0.1762),
        (3, [0.23340, 0.83296, 1.67247, 3.08669], 0.0545),
        (4, None, 0.0154),
    ],
)
def test_laplace_codebook_is_lloyd_max(bits: int, half: list[float] | None, error: float) -> None:
    centroids = laplace_centroids(bits)
    assert centroids == tuple(-c for c in reversed(centroids)) == tuple(sorted(centroids)) and len(centroids) == 2**bits
    if half is not None:
        assert np.allclose(centroids[2 ** (bits - 1) :], half, atol=1.1e-5)
    x = np.random.default_rng(0).laplace(0, 0.5**0.5, 2_000_000)
    assert np.isclose(np.square(x - nearest(x, centroids)).mean(), error, rtol=0.01)


# methods.md, section 4: N(0, 1), 2e6 samples, seed 0. At 4 bits its table is of another end of the iteration (.00019).
@pytest.mark.parametrize(
    ("bits", "spread", "error"), [(1, 0.6029, 0.1306), (2, 0.3430, 0.0197), (3, 0.1859, 0.00194), (4, 0.0975, 0.000179)]
)
def test_residual_codebook_is_the_best_of_all(bits: int, spread: float, error: float) -> None:
    x = np.random.default_rng(0).standard_normal(2_000_000)
    residual = x - nearest(x, gaussian_centroids(bits))
    assert residual.std() == pytest.approx(spread, rel=1e-3)
    assert gaussian_error(bits) == pytest.approx(residual.var(), rel=2e-3)
    found = np.square(residual - nearest(residual, residual_centroids(bits, bits))).mean()
    assert found == pytest.approx(error, rel=5e-3)
    # No table of any other cells, whose ends lie on a grid, is better.
    assert found < 1.005 * least_error(np.sort(np.abs(residual[:400_000])), 2 ** (bits - 1))


def nearest(x: np.ndarray, centroids: tuple[float, ...]) -> np.ndarray:
    return np.array(centroids)[np.searchsorted(boundaries(centroids), x)]


def least_error(x: np.ndarray, cells: int) -> float:
    """Of ascending numbers in so many runs, each run at its mean: by going through all choices of runs."""
    ends = np.unique(np.linspace(0, len(x), 800).astype(int))
    count, first, second = (np.concatenate([[0], np.cumsum(x**k)])[ends] for k in range(3))
    n, s, q = (a[None] - a[:, None] for a in (count, first, second))
    with np.errstate(all="ignore"):
        cost = np.where(n > 0, q - s * s / n, np.inf)
    best = cost[0]
    for _ in range(cells - 1):
        best = (best[:, None] + cost).min(axis=0)
    return float(best[-1]) / len(x)


@pytest.mark.parametrize("bits", [0, 7, -1])
def test_codebook_refuses(bits: int) -> None:
    for table in (gaussian_centroids, laplace_centroids, lambda b: residual_centroids(2, b)):
        with pytest.raises(UnsupportedShapeError, match=str(bits)):
            table(bits)


def test_counting_is_strict_and_nearest() -> None:
    centroids = gaussian_centroids(3)
    edges = boundaries(centroids)
    on = mx.array(np.array(edges, np.float32))
    # Ties go down; NaN counts nothing.
    assert count_below(on.astype(mx.float32), tuple(float(np.float32(e)) for e in edges)).tolist() == list(range(7))
    assert count_below(mx.array([float("nan"), float("inf"), -float("inf")]), edges).tolist() == [0, 7, 0]
    x = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    nearest = np.abs(x[:, None] - np.array(centroids, np.float32)).argmin(axis=1)
    codes = count_below(mx.array(x), edges)
    assert codes.dtype == mx.uint32 and codes.tolist() == nearest.tolist()
