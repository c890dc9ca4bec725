"""What the example promises beyond the kit: the error of the theory, and bytes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.kernels.golden import differences
from vq_core.plugins.offered import offered_kernels

GOLDEN = Path(__file__).parent / "golden"

# methods.md, section 2: unit vectors after a Haar rotation, Gaussian table.
MEASURED = {
    128: {1: 0.36086, 2: 0.11602, 3: 0.03397, 4: 0.00932},
    64: {1: 0.35830, 2: 0.11446, 3: 0.03344, 4: 0.00917},
}


def packed(x: np.ndarray, bits: int, **options: int) -> tuple[PackedKVCache, np.ndarray]:
    cache = PackedKVCache(method=f"example:bits={bits}", residual=0, **options)
    array = mx.array(x.astype(np.float32))
    cache.update_and_fetch(array, array)
    return cache, np.array(cache.decode()[0]).astype(np.float64)


@pytest.mark.parametrize("dim", MEASURED)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_error_of_the_theory(dim: int, bits: int) -> None:
    x = np.random.default_rng(3).standard_normal((1, 1, 20_000, dim))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    _, got = packed(x, bits)
    error = np.square(got - x).sum(axis=-1).mean()
    assert error == pytest.approx(MEASURED[dim][bits], rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_one_hot_vectors_are_as_good_as_any(bits: int) -> None:
    # Without a rotation a vector with one channel would be all zeros but one; the rotation spreads it.
    x = 20 * np.eye(128)[None, None]
    _, got = packed(x, bits)
    assert np.square(got - x).sum() / np.square(x).sum() == pytest.approx(MEASURED[128][bits], rel=0.1)


@pytest.mark.parametrize(
    ("dim", "bits", "stored"), [(128, 4, 4.25), (128, 3, 3.25), (64, 2, 2.5), (80, 3, 3 * 96 / 80 + 0.4)]
)
def test_bits_per_number(dim: int, bits: int, stored: float) -> None:
    cache, _ = packed(np.ones((1, 2, 1280, dim)), bits)
    held = cache.report().bytes
    assert 8 * (held.codes + held.metadata) / (2 * 2 * 1280 * dim) == pytest.approx(stored)


def test_keys_and_values_have_rotations_of_their_own() -> None:
    x = np.random.default_rng(4).standard_normal((1, 1, 64, 64))
    cache, _ = packed(x, 2)
    keys, values = (np.array(a) for a in cache.decode())
    assert not np.array_equal(keys, values)


def test_zero_and_nan() -> None:
    x = np.random.default_rng(5).standard_normal((1, 1, 8, 64))
    x[..., 2, :], x[..., 5, 3] = 0, np.nan
    _, got = packed(x, 3)
    assert not got[..., 2, :].any()
    assert np.isnan(got[..., 5, :]).all() and np.isfinite(np.delete(got, 5, axis=2)).all()


def test_golden_text() -> None:
    """Metal's text of fused attention with itself, for one shape."""
    found = differences([one.kernel for one in offered_kernels("example", one_pass=True)[0]], GOLDEN)
    assert not found, "\n".join([*found, f"if this is meant: python -m vq_core.kernels.golden example {GOLDEN}"])
