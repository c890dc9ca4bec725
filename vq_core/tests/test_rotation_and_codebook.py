"""Shared mathematics: random rotations of every head size, Lloyd-Max tables, counting boundaries."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vq_core.codec.codebook import boundaries, count_below, gaussian_centroids
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


@pytest.mark.parametrize("bits", [0, 7, -1])
def test_codebook_refuses(bits: int) -> None:
    with pytest.raises(UnsupportedShapeError, match=str(bits)):
        gaussian_centroids(bits)


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
