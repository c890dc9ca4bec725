"""What turboquant_prod promises beyond the kit: unbiased scores, figures, bytes, bad input."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import PrepareContext, SettingsError, UnsupportedShapeError
from vq_core.plugins.binding import bind
from vq_core.plugins.reach import state_arrays
from vq_core.testing.kit import round_trip
from vq_turboquant import prod

DRAWS, PAIRS, DIM = 6, 2000, 128


def bound(text: str, dim: int, dtype: str = "float16", seed: int = 0) -> Any:
    ctx = PrepareContext("keys", 1, dim, dim, dtype, seed=seed)
    return bind(f"turboquant_prod:{text}", ctx, kernels="off")


# methods.md, section 3: unit queries and keys, independent. There 40 draws of P and S, here seeds 0 to 5, each with
# 2,000 pairs of numpy's generator (seed, 7); the mean over so many pairs is off by 1.5% or so.
@pytest.mark.parametrize(
    ("sketch", "bits", "figure"),
    [("gaussian", 1, 1.545), ("gaussian", 2, 0.559), ("gaussian", 3, 0.180), ("gaussian", 4, 0.0527),
     ("orthogonal", 1, 0.565), ("orthogonal", 2, 0.204), ("orthogonal", 3, 0.065), ("orthogonal", 4, 0.0193)],
)  # fmt: skip
def test_error_of_scores(sketch: str, bits: int, figure: float) -> None:
    errors, slopes = [], []
    for seed in range(DRAWS):
        rng = np.random.default_rng((seed, 7))
        keys, queries = rng.standard_normal((2, PAIRS, DIM))
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        queries /= np.linalg.norm(queries, axis=-1, keepdims=True)
        settings = prod.Settings(bits, sketch)
        state = prod.vq_prepare(PrepareContext("keys", 1, DIM, DIM, "float32", seed=seed), settings)
        x = mx.array(keys[None, None].astype(np.float32))
        decoded = np.array(prod.vq_decode(state, prod.vq_pack(state, prod.vq_encode(state, x))))[0, 0]
        errors.append(DIM * np.square(((decoded - keys) * queries).sum(-1)).mean())
        slopes.append((decoded * keys).sum(-1).mean())
    assert np.mean(errors) == pytest.approx(figure, rel=0.03)
    assert np.mean(slopes) == pytest.approx(1, abs=0.003)


def test_constants() -> None:
    """methods.md, section 5: with Gaussian rows' constant orthogonal ones give .20%, .39% and .78% too much."""
    gaussian = math.sqrt(math.pi / 2)
    assert prod.sketch_constant("gaussian", 128) == gaussian
    for dim, more in ((128, 0.0020), (64, 0.0039), (32, 0.0078)):
        assert gaussian / prod.sketch_constant("orthogonal", dim) - 1 == pytest.approx(more, abs=6e-5)


@pytest.mark.parametrize(
    ("dim", "bits", "stored"), [(128, 1, 1.125), (128, 2, 2.25), (128, 3, 3.25), (128, 4, 4.25), (64, 2, 2.5),
    (64, 4, 4.5), (80, 4, (3 * 96 + 96) / 80 + 0.4)],
)  # fmt: skip
def test_bits_per_number(dim: int, bits: int, stored: float) -> None:
    cache = PackedKVCache(keys=f"turboquant_prod:bits={bits}", values="turboquant_rvq:bits=1+1", residual=0)
    x = mx.ones((1, 1, 256, dim), mx.float16)
    cache.update_and_fetch(x, x)
    held, values = (
        cache.report().bytes,
        bind("turboquant_rvq:bits=1+1", PrepareContext("values", 1, dim, dim, "float16")),
    )
    both = 8 * (held.codes + held.metadata) / (256 * dim)
    assert both - sum(values.layout.bits_per_element(dim)) == pytest.approx(stored)


@pytest.mark.parametrize("bits", [1, 3])
def test_what_is_no_number_what_is_too_large_and_what_is_constant(bits: int) -> None:
    x = np.random.default_rng(5).standard_normal((1, 1, 8, 64)).astype(np.float32)
    x[..., 2, :], x[..., 5, 3], x[..., 6, 0], x[..., 7, :] = 0, np.nan, np.inf, 1e25
    got = np.array(round_trip(bound(f"bits={bits}", 64, "float32"), mx.array(x)))[0, 0]
    assert not got[2].any() and np.isnan(got[5]).all() and not np.isfinite(got[6:]).any()
    assert np.isfinite(got[[0, 1, 3, 4]]).all()
    one, rng = bound(f"bits={bits},sketch=orthogonal", 64), np.random.default_rng(6)
    large, limit = rng.choice([-60000.0, 60000.0], (1, 1, 50, 64)), (0.6, 0.0, 0.08)[bits - 1]
    for data in (large, np.full((1, 1, 50, 64), 7.0)):
        got = np.array(round_trip(one, mx.array(data.astype(np.float32)).astype(mx.float16)))
        assert np.square(got - data).sum() < limit * np.square(data).sum() * (1 if data is large else 2)


def test_what_is_refused() -> None:
    for text, said in (
        ("bits=5", "bits must be one of 1, 2, 3, 4"),
        ("sketch=hadamard", "sketch must be one of gaussian, orthogonal"),
        ("rotation=none", "rotation must be one of auto, hadamard, haar"),
    ):
        with pytest.raises(SettingsError, match=said):
            bound(text, 64)
    with pytest.raises(SettingsError, match="turboquant_prod"):
        bind("turboquant_prod", PrepareContext("values", 1, 64, 64, "float16"))
    with pytest.raises(UnsupportedShapeError, match="size 100: accepted are"):
        bound("rotation=hadamard", 100)
    with pytest.raises(UnsupportedShapeError, match="600 numbers: at most 512"):
        bound("bits=1", 600)


def test_constants_of_the_report() -> None:
    """The centroids that fused attention looks up, filled up to 8 float32, are counted besides the state's."""
    for bits, table in ((1, 0), (3, 8), (4, 8)):
        one = bound(f"bits={bits}", 64)
        more = sum(a.nbytes for a in one.constants) - sum(a.nbytes for a in state_arrays(one.state))
        assert more == table * 4
