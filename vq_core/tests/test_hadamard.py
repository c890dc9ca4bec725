"""Hadamard transforms: right, orthogonal, exactly transposed, in the stated order, for the stated sizes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core.codec.hadamard import (
    SignHadamard,
    hadamard,
    hadamard_sizes,
    normaliser,
    sign_vectors,
    small_hadamard,
    unhadamard,
)
from vq_core.errors import UnsupportedShapeError

SIZES = (1, 2, 12, 20, 24, 28, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 512)
Numbers = np.ndarray[Any, Any]


def dense(dim: int) -> Numbers:
    """H, made without the module's transform: the small matrix times Sylvester's."""
    m, power = hadamard_sizes(dim)
    assert m * power == dim
    h = np.array(small_hadamard(m), np.float64)
    for _ in range(power.bit_length() - 1):
        h = np.kron(h, [[1, 1], [1, -1]])
    return np.asarray(h / np.sqrt(dim))


def drawn(*shape: int) -> Numbers:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("m", [1, 12, 20, 28])
def test_small_matrices_are_hadamards(m: int) -> None:
    h = np.array(small_hadamard(m))
    assert set(h.flatten()) <= {1, -1} and np.array_equal(h @ h.T, m * np.eye(m))
    assert np.array_equal(h, h.T) == (m in (1, 28))


@pytest.mark.parametrize("dim", SIZES)
def test_it_is_the_matrix_and_the_inverse_its_transpose(dim: int) -> None:
    h, x = dense(dim), drawn(3, dim)
    assert np.abs(h @ h.T - np.eye(dim)).max() < 1e-12
    y = hadamard(mx.array(x))
    assert y.dtype == mx.float32 and y.shape == x.shape
    assert np.abs(np.array(y) - x @ h.T).max() < 2e-6
    assert np.abs(np.array(unhadamard(mx.array(x))) - x @ h).max() < 2e-6
    assert np.abs(np.array(unhadamard(y)) - x).max() < 2e-6


def test_it_runs_in_the_stated_order() -> None:
    """The docstring's three steps, in numpy, one number after the other."""
    for dim in (64, 80, 96, 112):
        m, power = hadamard_sizes(dim)
        v: list[Any] = list(drawn(dim) * np.float32(normaliser(dim)))
        stride = 1
        while stride < power:
            for i in range(dim):
                if not i & stride:
                    v[i], v[i + stride] = v[i] + v[i + stride], v[i] - v[i + stride]
            stride *= 2
        rows = small_hadamard(m)
        want = []
        for i in range(dim):
            total = rows[i // power][0] * v[i % power]
            for j in range(1, m):
                total = total + rows[i // power][j] * v[j * power + i % power]
            want.append(total)
        assert np.array_equal(np.array(hadamard(mx.array(drawn(dim)))), np.array(want, np.float32)), dim


@pytest.mark.parametrize("dim", [80, 128])
def test_a_vector_does_not_depend_on_its_neighbours(dim: int) -> None:
    x = mx.array(drawn(33, dim))
    x[7] = float("nan")
    whole = np.array(hadamard(x))
    for n in (1, 2, 5):
        parts = [np.array(hadamard(x[i : i + n])) for i in range(0, 33, n)]
        assert np.array_equal(np.concatenate(parts), whole, equal_nan=True)
    assert np.isnan(whole).any(axis=1).sum() == 1
    assert hadamard(mx.full((1, 128), 60000, mx.float16)).max().item() > 65504, "rotated in float32"


@pytest.mark.parametrize("dim", [0, -8, 3, 5, 10, 36, 72, 100, 120, 144, 288, 576, 2.0])
def test_other_sizes_are_refused(dim: Any) -> None:
    with pytest.raises(UnsupportedShapeError, match=r"accepted are m \* 2\*\*k with m of 1, 12, 20 and 28.*haar"):
        hadamard_sizes(dim)
    with pytest.raises(UnsupportedShapeError, match="Hadamard matrix of size 16"):
        small_hadamard(16)


def test_signs_are_of_the_seed_alone() -> None:
    mx.random.seed(1)
    before = mx.random.state[0].tolist()
    a = np.array(sign_vectors(2, 64, (3, 1)))
    assert mx.random.state[0].tolist() == before
    assert a.shape == (2, 64) and a.dtype == np.float32 and set(a.flatten()) == {1.0, -1.0}
    assert np.array_equal(a, np.array(sign_vectors(2, 64, (3, 1))))
    assert not np.array_equal(a, np.array(sign_vectors(2, 64, 3)))
    # Pinned: the stream is PCG64's, the same on every platform and with every version of numpy.
    assert "".join("+" if v > 0 else "-" for v in a[0, :16]) == "++++--+----++-++"
    assert abs(np.array(sign_vectors(100, 1000, 5)).mean()) < 4 / 316


@pytest.mark.parametrize("dim", [80, 112, 128])
def test_rounds(dim: int) -> None:
    x, turned = mx.array(drawn(5, dim)), SignHadamard.drawn(dim, (7, dim))
    p, h = np.array(turned.matrix, np.float64), dense(dim)
    signs = np.array(turned.signs, np.float64)
    assert signs.shape == (2, dim)
    assert np.abs(p - h @ np.diag(signs[1]) @ h @ np.diag(signs[0])).max() < 1e-6
    y = turned.rotate(x)
    assert np.abs(np.array(y) - np.array(x) @ p.T).max() < 5e-6
    assert np.abs(np.array(turned.undo(x)) - np.array(x) @ p).max() < 5e-6
    assert np.abs(np.array(turned.undo(y)) - np.array(x)).max() < 5e-6
    with pytest.raises(UnsupportedShapeError, match="size 72"):
        SignHadamard.drawn(72)
