"""What turboquant_rvq promises beyond the kit: figures, bytes, bad input."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import PrepareContext, SettingsError, UnsupportedShapeError
from vq_core.bench.kernels import Wanted, choices
from vq_core.codec.codebook import boundaries, gaussian_centroids
from vq_core.plugins.binding import bind
from vq_core.plugins.reach import state_arrays
from vq_core.testing.kit import round_trip
from vq_turboquant.rvq import BITS, ERRORS, stage2_centroids


def bound(text: str, dim: int, side: str = "keys", dtype: str = "float16"):
    return bind(f"turboquant_rvq:{text}", PrepareContext(side, 1, dim, dim, dtype), kernels="off")


def error(text: str, x: np.ndarray, dtype: str = "float16") -> float:
    """Relative squared error of vectors (n, D)."""
    one = bound(text, x.shape[-1], dtype=dtype)
    got = np.array(round_trip(one, mx.array(x[None, None].astype(np.float32)).astype(getattr(mx, dtype))))[0, 0]
    return float(np.square(got - x).sum() / np.square(x).sum())


# methods.md, section 4: N(0, 1), 2e6 samples, seed 0, scale matched to the residual's standard deviation. The fitted
# table of 4 bits is a better one than its (.00019).
SCALAR = {"laplace": (0.1338, 0.0260, 0.00270, 0.00034), "fitted": (0.1306, 0.0197, 0.00194, 0.000179)}


@pytest.mark.parametrize("table", SCALAR)
def test_figures_of_the_tables(table: str) -> None:
    x = np.random.default_rng(0).standard_normal(2_000_000)
    for bits, want in enumerate(SCALAR[table], 1):
        residual = x
        for centroids in (gaussian_centroids(bits), stage2_centroids(bits, table)):
            residual = residual - np.array(centroids)[np.searchsorted(boundaries(centroids), residual)]
        assert np.square(residual).mean() == pytest.approx(want, rel=0.01)
    assert SCALAR["laplace"] == ERRORS["laplace"]


# Vectors of N(0, 1), seed 3, head size 128, 20,000 of them (haar: 2,000). The coordinates of a sphere have shorter
# tails than N(0, 1): 1% to 3% less error at 1+1 and 2+2, up to a fifth less where tails are all that is left of it.
LEAST = {"1+1": 0.97, "2+2": 0.94, "3+3": 0.9, "4+4": 0.77}


@pytest.mark.parametrize(("rotation", "table"), [("hadamard", "laplace"), ("hadamard", "fitted"), ("haar", "laplace")])
def test_figures_of_the_method(rotation: str, table: str) -> None:
    x = np.random.default_rng(3).standard_normal((2_000 if rotation == "haar" else 20_000, 128))
    found = {bits: error(f"bits={bits},stage2={table},rotation={rotation}", x) for bits in BITS}
    for bits, want in zip(BITS, SCALAR[table], strict=True):
        assert LEAST[bits] * want <= found[bits] <= want, (bits, found)
    if table == "laplace":
        assert 0.131 <= found["1+1"] <= 0.134 and 0.97 * 0.026 <= found["2+2"] <= 0.0285
    else:
        # Both codes are stored, so this is a method of 2 b bits, and one code of as many bits is better.
        assert found["2+2"] <= 0.0200 and found["1+1"] > 1.05 * 0.1175 and found["2+2"] > 1.9 * 0.0095


@pytest.mark.parametrize(("rotation", "room"), [("haar", 0.05), ("hadamard", 0.12)])
def test_structured_vectors(rotation: str, room: float) -> None:
    """One number among zeros, and four channels 20 times as large: as good as any others."""
    loud = np.random.default_rng(4).standard_normal((4000, 128)) * np.where(np.arange(128) < 4, 20, 1)
    for x in (20 * np.eye(128), loud):
        for bits in ("1+1", "2+2"):
            usual = ERRORS["laplace"][BITS.index(bits)] * 0.98
            assert error(f"bits={bits},rotation={rotation}", x) == pytest.approx(usual, rel=room)


@pytest.mark.parametrize(
    ("dim", "bits", "stored"),
    [(128, "1+1", 2.125), (128, "2+2", 4.125), (128, "3+3", 6.125), (128, "4+4", 8.125), (64, "1+1", 2.25),
     (64, "2+2", 4.25), (80, "3+3", 6 * 96 / 80 + 0.2)],
)  # fmt: skip
def test_bits_per_number(dim: int, bits: str, stored: float) -> None:
    cache = PackedKVCache(method=f"turboquant_rvq:bits={bits}", residual=0)
    x = mx.ones((1, 1, 256, dim), mx.float16)
    cache.update_and_fetch(x, x)
    held = cache.report().bytes
    assert 8 * (held.codes + held.metadata) / (2 * 256 * dim) == pytest.approx(stored)
    assert sum(bound(f"bits={bits}", dim).layout.bits_per_element(dim)) == pytest.approx(stored)


def test_keys_and_values_have_rotations_of_their_own() -> None:
    x = mx.array(np.random.default_rng(4).standard_normal((1, 1, 64, 64)).astype(np.float16))
    keys, values = (np.array(round_trip(bound("bits=1+1", 64, side), x)) for side in ("keys", "values"))
    assert not np.array_equal(keys, values)


@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
def test_what_is_no_number_what_is_too_large_and_what_is_constant(rotation: str) -> None:
    """Zeros decode to zeros, NaN and Inf stay in their token, a squared norm beyond float32 is Inf; a norm beyond
    float16 is none of these."""
    x = np.random.default_rng(5).standard_normal((1, 1, 8, 64)).astype(np.float32)
    x[..., 2, :], x[..., 5, 3], x[..., 6, 0], x[..., 7, :] = 0, np.nan, np.inf, 1e25
    got = np.array(round_trip(bound(f"rotation={rotation}", 64, dtype="float32"), mx.array(x)))[0, 0]
    assert not got[2].any() and np.isnan(got[5]).all() and not np.isfinite(got[6:]).any()
    assert np.isfinite(got[[0, 1, 3, 4]]).all()
    large = np.random.default_rng(6).choice([-60000.0, 60000.0], (50, 64))
    assert error(f"rotation={rotation}", large) == pytest.approx(ERRORS["laplace"][1], rel=0.1)
    assert error(f"rotation={rotation}", np.full((1, 64), 7.0)) < 0.1


def test_bad_settings() -> None:
    for text, said in (
        ("bits=2", r"bits='2' is not accepted: bits must be one of 1\+1, 2\+2, 3\+3, 4\+4"),
        ("bits=2+1", "is not accepted"),
        ("stage2=gauss", "stage2 must be one of laplace, fitted"),
        ("rotation=none", "rotation must be one of auto, hadamard, haar"),
        ("scale=raw", "has no setting 'scale'"),
    ):
        with pytest.raises(SettingsError, match=said):
            bound(text, 64)
    with pytest.raises(UnsupportedShapeError, match="size 100: accepted are"):
        bound("rotation=hadamard", 100)
    with pytest.raises(UnsupportedShapeError, match="600 numbers: at most 512"):
        bound("rotation=haar", 600)


def test_head_sizes_beyond_the_kernels_say_so() -> None:
    one = bind("turboquant_rvq", PrepareContext("keys", 1, 1024, 1024, "float16"), kernels="simulator")
    assert any("head size 1024 is above 512" in reason for part in one.operations for reason in part.declined)


def test_the_bench_lists_it() -> None:
    """Its bits are a text, which a sweep over numbers of bits leaves alone."""
    (found,), left_out = choices(Wanted(methods=("turboquant_rvq",)))
    assert found[0].startswith("turboquant_rvq:bits=2+2") and found[1] == "2+2" and not left_out
    swept, _ = choices(Wanted(methods=("turboquant_prod",)))
    assert [bits for _, bits, _ in swept] == [2, 4]


@pytest.mark.parametrize(("bits", "table"), [("1+1", 8), ("2+2", 16), ("4+4", 256)])
def test_constants_of_the_report(bits: str, table: int) -> None:
    """Those of the state and the sums that fused attention looks up, float32, once however many caches there are."""
    one = bound(f"bits={bits},rotation=haar", 64)
    held = {id(a): a.nbytes for a in one.constants}
    assert len(held) == len(one.constants) and one.state.sums.size == 4 ** int(bits[0])
    assert sum(held.values()) - sum(a.nbytes for a in state_arrays(one.state)) == table * 4
    caches = [PackedKVCache(method=f"turboquant_rvq:bits={bits},rotation=haar", residual=0) for _ in range(2)]
    told = set()
    for cache in caches:
        x = mx.zeros((1, 1, 40, 64), mx.float16)
        cache.update_and_fetch(x, x)
        report = cache.report()
        assert report.bytes.constants == sum({id(a): a.nbytes for a in report.constants}.values())
        told |= {id(a) for a in report.constants}
    assert told == {id(a) for a in caches[0].report().constants}
