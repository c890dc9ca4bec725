"""turboquant_mse: the published figures, what is stored, bad input, and what its settings are for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import PrepareContext, SettingsError, Side, UnsupportedShapeError
from vq_core.plugins.binding import BoundSide, bind
from vq_core.testing.kit import pack, round_trip
from vq_turboquant import mse

Numbers = np.ndarray[Any, Any]
FIGURES = {128: (0.3609, 0.1160, 0.0340, 0.0093), 64: (0.3583, 0.1145, 0.0334, 0.0092)}
"""Relative squared error of unit vectors, shared/methods.md section 2: Haar, the Gaussian table."""


def bound(text: str, dim: int = 128, dtype: str = "float32", side: Side = "keys", seed: int = 0, heads: int = 1) -> Any:
    """Without kernels."""
    return bind(f"turboquant_mse:{text}", PrepareContext(side, heads, dim, dim, dtype, seed=seed), kernels="off")


def decoded(one: BoundSide, x: Numbers) -> Numbers:
    """x (n, D) after a round trip."""
    dtype = getattr(mx, "float16" if one.layout.fields[1].dtype == "float16" else "float32")
    return np.array(round_trip(one, mx.array(x.astype(np.float32)).astype(dtype)[None, None]), np.float64)[0, 0]


def error(got: Numbers, want: Numbers) -> float:
    """Relative squared error."""
    return float(np.square(got - want).sum() / np.square(want).sum())


def units(dim: int, count: int, seed: int = 0) -> Numbers:
    x = np.random.default_rng(seed).standard_normal((count, dim))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


# ---- figures


@pytest.mark.parametrize("dim", FIGURES)
@pytest.mark.parametrize("rotation", ["haar", "hadamard"])
def test_error_of_unit_vectors(dim: int, rotation: str) -> None:
    """The published figures to 3% for both rotations, seeds 0 and 1, 1500 vectors each."""
    for bits, want in enumerate(FIGURES[dim], 1):
        found = []
        for seed in (0, 1):
            one, x = bound(f"bits={bits},rotation={rotation},scale=raw", dim, seed=seed), units(dim, 1500, seed)
            found.append(error(decoded(one, x), x))
        assert abs(np.mean(found) / want - 1) < 0.03, (bits, found)


def structured(kind: str) -> Numbers:
    if kind == "one-hot":
        return np.eye(128)
    x = np.random.default_rng(4).standard_normal((256, 128))
    x[:, :4] *= 20
    return x


@pytest.mark.parametrize("kind", ["one-hot", "four channels"])
@pytest.mark.parametrize(("rotation", "within"), [("haar", 0.05), ("hadamard", 0.12)])
def test_error_of_structured_vectors(kind: str, rotation: str, within: float) -> None:
    """One-hot vectors, and 4 channels of 20 times the size: theory to 5% and 12%; mean of seeds 0 to 7."""
    x = structured(kind)
    for bits, want in enumerate(FIGURES[128], 1):
        found = [
            error(decoded(bound(f"bits={bits},rotation={rotation},scale=raw", seed=seed), x), x) for seed in range(8)
        ]
        assert abs(np.mean(found) / want - 1) < within, (bits, np.mean(found), want)


def test_one_round_is_not_enough() -> None:
    """The same with one sign-Hadamard round: 2 bits lose twice the theory, which the test above would see."""
    import attrs

    state = bound("bits=2,rotation=hadamard,scale=raw").state
    (part,) = state.parts
    once = attrs.evolve(part, rotation=attrs.evolve(part.rotation, signs=part.rotation.signs[:1]))
    x = mx.eye(128)
    codes, scale = mse.quantize(once, x, "raw", "float32")
    got = mse.dequantize(once, mse.pack_bits(codes, 2), scale)
    assert error(np.array(got, np.float64), np.eye(128)) > 0.24


def test_dot_products_with_the_unbiased_scale() -> None:
    """d times the error of <y, x> for independent unit vectors to 3%, and slope 1.000 to 0.003; seeds 0 to 3."""
    for bits, want in enumerate((0.568, 0.130, 0.0346, 0.0093), 1):
        errors, slopes = [], []
        for seed in range(4):
            x, y = units(128, 600, seed), units(128, 500, seed + 100)
            got = decoded(bound(f"bits={bits},scale=unbiased,rotation=haar", seed=seed), x)
            true, found = y @ x.T, y @ got.T
            errors.append(128 * np.square(found - true).mean())
            slopes.append((got * x).sum(axis=1).mean())
        assert abs(np.mean(errors) / want - 1) < 0.03, (bits, errors)
        assert abs(np.mean(slopes) - 1) < 0.003, (bits, slopes)


def test_what_the_scales_keep() -> None:
    """raw the norm, matched the norm of what is read, unbiased the product with the vector; auto by side."""
    x = units(128, 64) * np.random.default_rng(2).uniform(0.1, 50, (64, 1))
    norms = np.linalg.norm(x, axis=1)
    for bits in (1, 3):
        got = {mode: decoded(bound(f"bits={bits},scale={mode}"), x) for mode in mse.MODES}
        assert np.allclose(np.linalg.norm(got["matched"], axis=1), norms, rtol=1e-5)
        assert np.allclose((got["unbiased"] * x).sum(axis=1), norms**2, rtol=1e-5)
        assert (np.linalg.norm(got["raw"], axis=1) / norms).mean() < 0.99
        stored = np.array(pack(bound(f"bits={bits},scale=raw"), mx.array(x.astype(np.float32))[None, None])["scale"])
        assert np.allclose(stored[0, 0, :, 0] * 2 * np.sqrt(128), norms, rtol=1e-5)
        sides: tuple[tuple[Side, str], ...] = (("keys", "matched"), ("values", "unbiased"))
        for side, mode in sides:
            auto, named = (decoded(bound(f"bits={bits},scale={s}", side=side), x) for s in ("auto", mode))
            assert np.array_equal(auto, named), side


def test_fractional_bits_lie_between() -> None:
    """Error between those of the widths around it; both groups are coded with their own number of bits."""
    x = np.random.default_rng(3).standard_normal((600, 128))
    two, half, three = (error(decoded(bound(f"bits={b},scale=raw"), x), x) for b in (2, 2.5, 3))
    assert abs(half - (0.25 * 0.034 + 0.75 * 0.116)) < 0.004 and three < half < two
    for dim in (128, 192, 256):
        parts = bound("bits=2.5", dim).state.parts
        assert [(p.bits, p.dim) for p in parts] == [(3, dim // 2 - 32), (2, dim // 2 + 32)]
        channels = np.concatenate([np.array(p.channels) for p in parts])
        assert np.array_equal(np.sort(channels), np.arange(dim))
    # Loud channels in a group of their own spoil no others: that is what a second scale is for.
    channels = np.array(bound("bits=2.5").state.parts[0].channels)
    loud, quiet = x.copy(), [c for c in range(128) if c not in channels]
    loud[:, channels] *= 100
    got = decoded(bound("bits=2.5,scale=raw"), loud)
    assert error(got[:, quiet], loud[:, quiet]) < 0.13
    assert error(decoded(bound("bits=3,scale=raw"), loud)[:, quiet], loud[:, quiet]) > 50


# ---- what is stored


@pytest.mark.parametrize(("bits", "dim", "want"), [
    (1, 128, 1.125), (2, 128, 2.125), (3, 128, 3.125), (4, 128, 4.125), (1, 64, 1.25), (2, 64, 2.25), (3, 64, 3.25),
    (4, 64, 4.25), (2.5, 128, 2.5), (3.5, 128, 3.5), (2.5, 256, 2.5), (3.5, 192, 3.5),
])  # fmt: skip
def test_bits_per_element(bits: float, dim: int, want: float) -> None:
    """shared/methods.md section 14, from the arrays that 4,096 tokens give; the mean adds what it says."""
    x = mx.zeros((1, 1, 4096, dim), mx.float16)
    for mean in ("none", "first"):
        one = bound(f"bits={bits},mean={mean}", dim, "float16")
        packed = pack(one, x)
        paged = sum(packed[field.name].nbytes for field in one.layout.paged)
        assert paged * 8 == want * 4096 * dim
        assert sum(packed[field.name].nbytes for field in one.layout.sequence) == (8 * dim if mean == "first" else 0)


# ---- the mean


def test_the_mean_is_exact_and_helps() -> None:
    """Keys with 4 channels far from zero: the error of the scores falls to a third and less."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((512, 128))
    x[:, :4] += 15 * np.sign(rng.standard_normal(4))
    q = rng.standard_normal((64, 128))
    found = {}
    for mean in ("none", "first"):
        got = decoded(bound(f"bits=3,mean={mean}"), x)
        wrong = q @ (got - x).T
        # What is the same for all keys of a query does not change a softmax.
        found[mean] = np.square(wrong - wrong.mean(axis=1, keepdims=True)).mean()
    assert found["first"] < 0.15 * found["none"], found


def test_the_mean_is_of_the_first_block() -> None:
    one = bound("bits=4,mean=first", 64)
    assert one.layout.block == mse.BLOCK and bound("bits=4").layout.block == 1
    x = np.random.default_rng(6).standard_normal((1, 2, 32, 64)).astype(np.float32) + 5
    found = one.start(mx.array(x), mx.zeros((1, 32), mx.int32))
    assert np.allclose(np.array(found["mean"]), x.mean(axis=2), atol=1e-5)
    assert np.allclose(np.array(found["turned"]), x.mean(axis=2) @ np.array(one.state.matrix).T, atol=1e-5)
    x[0, 1, 3, 7], x[0, 1, 4, 7], x[0, 0, :, 5] = np.nan, np.inf, -np.inf
    again = np.array(one.start(mx.array(x), mx.zeros((1, 32), mx.int32))["mean"])
    left = np.delete(x[0, 1, :, 7], [3, 4]).mean()
    assert np.isclose(again[0, 1, 7], left, atol=1e-5) and again[0, 0, 5] == 0 and np.isfinite(again).all()


@pytest.mark.parametrize("size", [1e25, 3e38, np.inf])
def test_one_token_without_a_norm_leaves_the_others(size: float) -> None:
    """A token whose squares overflow, among those of the mean, reads as no numbers and spoils no other."""
    x = np.random.default_rng(12).standard_normal((64, 64))
    x[3] = size
    got = decoded(bound("bits=4,mean=first", 64), x)
    assert not np.isfinite(got[3]).any() and np.isfinite(np.delete(got, 3, axis=0)).all()
    assert error(np.delete(got, 3, axis=0), np.delete(x, 3, axis=0)) < 0.02


# ---- constants


def test_constants_are_of_the_seed_alone() -> None:
    """Sides and seeds differ; MLX's random state stays; a code of a pinned vector, the same on every platform."""
    mx.random.seed(3)
    before = mx.random.state[0].tolist()
    for rotation in ("hadamard", "haar"):
        mats = [
            np.array(bound(f"bits=2,rotation={rotation}", 64, side=side, seed=seed).state.matrix)
            for side, seed in (("keys", 0), ("keys", 0), ("values", 0), ("keys", 1))
        ]
        assert np.array_equal(mats[0], mats[1])
        assert not np.array_equal(mats[0], mats[2]) and not np.array_equal(mats[0], mats[3])
    assert mx.random.state[0].tolist() == before
    x = mx.arange(64).astype(mx.float32)[None, None, None] - 20.3
    words = {kind: pack(bound(f"bits=1,rotation={kind}", 64), x)["codes"].tolist() for kind in ("hadamard", "haar")}
    assert words == {"hadamard": [[[[1269322343, 3366696553]]]], "haar": [[[[3115047664, 3291240271]]]]}


# ---- bad input


@pytest.mark.parametrize(("text", "said"), [
    ("bits=5", "bits must be one of 1, 2, 2.5, 3, 3.5, 4"), ("bits=0", "one of 1, 2"), ("bits=1.5", "one of 1, 2"),
    ("bits=nan", "one of 1, 2"), ("bits=two", "cannot read bits='two' as float"), ("scale=best", "raw, matched"),
    ("rotation=dct", "auto, hadamard, haar"), ("mean=all", "none, first"), ("group_size=32", "no setting 'group_size'"),
])  # fmt: skip
def test_settings_that_are_not_accepted(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        bound(text)


@pytest.mark.parametrize(("text", "dim", "said"), [
    ("bits=2.5", 64, "2.5 bits at head size 64.*128, 192, 256.*give 2 or 3 bits"),
    ("bits=3.5", 80, "3.5 bits at head size 80.*give 3 or 4 bits"),
    ("bits=2.5", 96, "2.5 bits at head size 96"),
    ("bits=2", 513, "head size 513: turboquant_mse accepts up to 512"),
    ("rotation=hadamard", 100, "size 100.*such as 64, 80.*haar"),
    ("rotation=hadamard", 72, "size 72.*haar"),
    ("bits=2.5,rotation=hadamard", 512, "size 288.*haar"),
])  # fmt: skip
def test_head_sizes_that_are_not_accepted(text: str, dim: int, said: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=said):
        bound(text, dim)


@pytest.mark.parametrize("dim", [1, 36, 72, 80, 100, 120, 512])
def test_other_head_sizes_are_served(dim: int) -> None:
    x = np.random.default_rng(8).standard_normal((40, dim))
    found = [error(decoded(bound(f"bits={bits},scale=raw", dim), x), x) for bits in (2, 4)]
    assert found[1] < 0.013 and found[1] < found[0] <= (0.13 if dim > 1 else 0.3)


@pytest.mark.parametrize("mode", mse.MODES)
@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
def test_norms_that_the_store_cannot_hold(mode: str, rotation: str) -> None:
    """Vectors of float16's largest number, zeros, and what is too small or too large, one beside the other."""
    text = f"bits=4,scale={mode},rotation={rotation}"
    rows = np.ones((4, 64)) * np.array([[65504], [0], [2.0**-24], [1]])
    got = decoded(bound(text, 64, "float16"), rows)
    assert np.isfinite(got).all() and not got[1].any() and np.abs(got[2]).max() < 2e-7
    for row in (0, 3):
        assert np.square(got[row] / rows[row, 0] - 1).mean() < 0.03
    wide = bound(text, 64, "bfloat16")
    for size, lost in ((1e15, False), (1e-12, False), (1e30, True)):
        row = np.random.default_rng(9).standard_normal((1, 64)) * size
        got = decoded(wide, np.concatenate([row, rows[3:]]))
        assert not np.isfinite(got[0]).any() if lost else error(got[:1], row) < 0.02
        assert np.square(got[1] - 1).mean() < 0.03
