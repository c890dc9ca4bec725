"""QJL in caches: bytes, known mistakes, bad input, what the report says, and the demo model. Needs vq-kivi."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import PrepareContext, SettingsError, UnsupportedShapeError
from vq_core.plugins.binding import BoundSide, bind
from vq_core.testing.observe import assert_same, gaussian
from vq_qjl.method import Qjl, Sketch, outlier_channels, vq_encode

REFERENCE_AND_KERNEL = pytest.mark.parametrize("kernels", ["off", "simulator"])


def keys(settings: str, dim: int = 128, dtype: str = "float16", kernels: str = "off", heads: int = 1) -> BoundSide:
    return bind(f"qjl:{settings}", PrepareContext("keys", heads, dim, dim, dtype), kernels=kernels)


def packed(bound: BoundSide, x: mx.array) -> dict[str, mx.array]:
    x = x.astype(getattr(mx, bound.ctx.dtype))
    return bound.pack(x, mx.broadcast_to(mx.arange(x.shape[2]), (x.shape[0], x.shape[2])), {})


def decoded(bound: BoundSide, x: mx.array) -> np.ndarray[Any, Any]:
    return np.array(bound.decode(packed(bound, x), None))


# ---- bytes


@pytest.mark.parametrize(
    ("dim", "settings", "stored"),
    [
        (128, "bits=1", 1.125), (128, "bits=2", 2.125), (64, "bits=1", 1.25), (64, "bits=2", 2.25),
        (128, "sketch=256", 2.125), (80, "bits=1", 1.2), (100, "bits=1", 1.2), (128, "sketch=8", 0.1875),
        (128, "outliers=8", 4.265625), (128, "sketch=512,outliers=8,outlier_sketch=128", 5.265625),
    ],
)  # fmt: skip
def test_bits_a_number(dim: int, settings: str, stored: float) -> None:
    """Acceptance 3, methods.md section 14: from the arrays held at 4,096 tokens; a sign is one bit."""
    cache = PackedKVCache(keys=f"qjl:{settings}", values="kivi:bits=2", residual=0)
    x = gaussian((1, 1, 4096, 128)), gaussian((1, 1, 4096, 128))
    cache.update_and_fetch(x[0][..., :dim], x[1])
    held = cache.report().bytes
    of_values = 4096 * 128 * 3 // 8
    got = 8 * (held.codes + held.metadata - of_values) / (4096 * dim)
    print(f"qjl:{settings}, d = {dim}: {got:.4f} bits a number, constants {held.constants} bytes, spare {held.spare}")
    assert got == pytest.approx(stored, rel=1e-3)


@pytest.mark.parametrize(("settings", "block"), [("bits=1", 1), ("bits=1,outliers=8", 32)])
def test_generated_tokens_are_packed_too(settings: str, block: int) -> None:
    """One at a time, as in generation."""
    cache = PackedKVCache(keys=f"qjl:{settings}", values="kivi:bits=2", residual=16)
    x = gaussian((1, 2, 300, 64))
    cache.update_and_fetch(x[:, :, :100], x[:, :, :100])
    for t in range(100, 300):
        cache.update_and_fetch(x[:, :, t : t + 1], x[:, :, t : t + 1])
    assert 300 - cache.report().packed in range(16, 16 + 32)
    bound = keys(settings, 64, heads=2)
    mine = bound.pack(x[:, :, :256], None, {})
    assert_same(cache.decode()[0][:, :, :256], bound.decode(mine, None).astype(mx.float16), "as packed at once")


# ---- known mistakes


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("factor", [100, 1000])
def test_loud_outliers_leave_the_others_alone(factor: int, dtype: str) -> None:
    """The inliers' signs and norm are those of the same key without loud channels, bit for bit.

    As the root of the difference of float16 norms, the published way, the norm is lost.
    """
    rng = np.random.default_rng(2)
    loud = rng.choice(128, 8, replace=False)
    x = rng.standard_normal((1, 1, 4096, 128)).astype(np.float16)
    x[..., loud] = np.copysign(np.clip(np.abs(x[..., loud]), 0.5, 60), x[..., loud]) * 4
    high = x.copy()
    high[..., loud] *= factor
    assert np.isfinite(high).all()
    bound = keys("outliers=8", dtype=dtype)
    rest, other = (packed(bound, mx.array(a)) for a in (x, high))
    assert (np.array(rest["channels"]) == np.sort(loud)).all()
    for name in ("signs", "weight", "channels"):
        assert_same(other[name], rest[name], name)
    inside = np.delete(x.astype(np.float64), loud, axis=-1)
    norm = np.array(other["weight"].astype(mx.float32))[..., 0] * math.sqrt(128)
    np.testing.assert_allclose(norm, np.linalg.norm(inside, axis=-1), rtol=2**-10)
    whole, out = (np.linalg.norm(a.astype(np.float64), axis=-1).astype(np.float16) for a in (high, high[..., loud]))
    difference = np.sqrt(np.maximum(whole.astype(np.float32) ** 2 - out.astype(np.float32) ** 2, 0))
    wrong = np.abs(difference / norm - 1)
    zero, off = (difference == 0).mean(), np.median(wrong)
    print(f"x {factor}: as a difference of float16 norms it is zero for {zero:.0%}, off by {off:.0%}")
    assert np.median(wrong) > 0.05


@pytest.mark.parametrize("kernels", ["off", "simulator"])
def test_zero_counts_as_minus_one(kernels: str) -> None:
    """sign(0), on both sides: numbers of which a row of the sketch says exactly nothing; zero vectors; -0."""
    rows = mx.array([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]] * 2) * 1024
    state = Qjl(Sketch(rows, mx.contiguous(rows.T), 1.0), "float32")
    x = mx.array([[3.0, 3.0], [0.0, 0.0], [-0.0, -0.0], [-2.0, -2.0]])[None, None]
    if kernels == "off":
        bits = np.array(vq_encode(state, x)["signs"])[0, 0]
    else:
        from vq_qjl.kernels import encode

        found = encode(state, x, "simulator")["signs"]
        bits = np.unpackbits(np.array(found), axis=-1, bitorder="little")[0, 0]
    assert bits[:, :4].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


@REFERENCE_AND_KERNEL
@pytest.mark.parametrize("settings", ["bits=2", "bits=2,outliers=8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_at_the_ends(dtype: str, settings: str, kernels: str) -> None:
    """Zero vectors decode to zeros, constant ones as any; norms beyond float16; NaN and Inf stay in their tokens."""
    bound, x = keys(settings, 64, dtype, kernels), np.array(gaussian((1, 1, 64, 64), "float32"))
    clean = decoded(bound, mx.array(x))
    x[:, :, 3], x[:, :, 4], x[:, :, 5] = 0.0, -0.0, 1.5
    x[:, :, 6] = np.copysign(60000.0, x[:, :, 6])
    got = decoded(bound, mx.array(x))
    assert not got[:, :, 3:5].any() and np.isfinite(got).all()
    for token in (5, 6):
        error = np.square(got[:, :, token] - x[:, :, token]).sum() / np.square(x[:, :, token]).sum()
        assert error < 0.6, f"token {token}: {error}"
    if "outliers" not in settings:
        assert np.array_equal(np.delete(got, [3, 4, 5, 6], axis=2), np.delete(clean, [3, 4, 5, 6], axis=2))
    else:  # a loud token may choose other channels for its own group, not for another
        assert np.array_equal(got[:, :, 32:], clean[:, :, 32:])
    for bad in (math.nan, math.inf, -math.inf, 3e38):
        hit = x.copy()
        hit[:, :, 40, 7] = bad
        spoilt = decoded(bound, mx.array(hit))
        if dtype == "float16" or bad != 3e38:
            assert not np.isfinite(spoilt[:, :, 40]).all()
        assert np.isfinite(np.delete(spoilt, 40, axis=2)).all()
        assert np.array_equal(spoilt[:, :, :32], got[:, :, :32])
    if dtype != "float16":  # squares overflow: documented, the norm is infinite
        hit = x.copy()
        hit[:, :, 40] = 3e38
        assert not np.isfinite(decoded(bound, mx.array(hit))[:, :, 40]).any()


def test_a_channel_with_a_nan_is_an_outlier() -> None:
    """So that the inliers of its token stay what they are."""
    x = gaussian((1, 1, 32, 64), "float32")
    hit = np.array(x)
    hit[:, :, 9, 50] = math.nan
    assert 50 in np.array(outlier_channels(mx.array(hit), 1)).ravel()
    fields = packed(keys("outliers=8", 64, "float32"), mx.array(hit))
    assert np.isnan(np.array(fields["outlier_weight"])).sum() == 1 and np.isfinite(np.array(fields["weight"])).all()


def test_of_equal_channels_the_first_are_chosen() -> None:
    x = np.ones((1, 2, 64, 80), np.float32)
    x[:, 1, 32:, 70] = -2
    got = np.array(outlier_channels(mx.array(x), 3))
    assert got.dtype == np.uint8 and got.shape == (1, 2, 2, 3)
    assert got[0, 0].tolist() == [[0, 1, 2]] * 2 and got[0, 1].tolist() == [[0, 1, 2], [0, 1, 70]]


@REFERENCE_AND_KERNEL
def test_channels_that_are_no_channels_reach_nothing(kernels: str) -> None:
    """What a page held before it was filled, or a damaged file: nothing is read or written beyond the head size."""
    bound = keys("outliers=8", 64, kernels=kernels)
    fields = packed(bound, gaussian((1, 1, 128, 64)))
    fields["channels"] = mx.full(fields["channels"].shape, 255, mx.uint8)
    assert bound.decode(fields, None).shape == (1, 1, 128, 64)
    assert bound.attend is not None
    scores = bound.attend.scores(bound.attend.prepare_query(gaussian((1, 1, 2, 64))), fields)
    mx.eval(scores)
    assert scores.shape == (1, 1, 2, 128)


# ---- bad input


@REFERENCE_AND_KERNEL
@pytest.mark.parametrize(
    ("settings", "dim", "error", "said"),
    [
        ("sketch=100", 64, SettingsError, r"sketch=100 is not accepted: sketch must be a multiple of 8, such as 104"),
        ("sketch=-8", 64, SettingsError, "sketch must be at least 0"),
        ("sketch=5000", 64, SettingsError, "at most 4096"),
        ("bits=5", 64, SettingsError, "bits must be one of 1, 2, 3, 4"),
        ("bits=1.5", 64, SettingsError, "cannot read bits='1.5' as int"),
        ("projection=haar", 64, SettingsError, "projection must be one of orthogonal, gaussian"),
        ("outliers=65", 64, SettingsError, "outliers=65 is not accepted: head size 64 .* at most outliers=64"),
        ("outliers=300", 64, SettingsError, "at most 256"),
        ("outliers=-1", 64, SettingsError, "at least 0"),
        ("outliers=8,outlier_sketch=40", 64, SettingsError, "outlier_sketch must be a multiple of 32, such as 64"),
        ("outlier_sketch=64", 64, SettingsError, "outlier_sketch=64 is of no use without outliers"),
        ("outliers=8", 320, UnsupportedShapeError, "head sizes up to 256, not 320; use outliers=0"),
        ("bits=1", 576, UnsupportedShapeError, "vectors of 576 numbers: at most 512"),
    ],
)
def test_refused(settings: str, dim: int, error: type[Exception], said: str, kernels: str) -> None:
    """Before the first token."""
    with pytest.raises(error, match=said):
        keys(settings, dim, kernels=kernels)


@pytest.mark.parametrize("dim", [1, 2, 8, 300])
def test_other_head_sizes_are_served(dim: int) -> None:
    x = gaussian((1, 1, 8, dim), "float32")
    got = decoded(keys("bits=4", dim, "float32"), x)
    assert np.square(got - np.array(x)).sum() < 0.6 * np.square(np.array(x)).sum()


# ---- attention


def test_why_outliers_have_no_snippet_is_said() -> None:
    x = gaussian((1, 2, 160, 64))
    cache = PackedKVCache(keys="qjl:outliers=8", values="kivi:bits=2", residual=16, kernels="simulator")
    cache.update_and_fetch(x, x)
    said = "has no snippet for its keys: with outliers each group of 32 tokens has a sketched query of its own"
    assert said in cache.report().attention
    cache.attend(gaussian((1, 4, 1, 64)), scale=0.125)
    assert said in cache.report().attention
    demanding = PackedKVCache(keys="qjl:outliers=8", values="kivi:bits=2", kernels="simulator", attention="kernel")
    with pytest.raises(UnsupportedShapeError, match=said):
        demanding.update_and_fetch(x, x)


# ---- the demo model


def test_keys_of_qjl_and_values_of_kivi_on_the_demo_model() -> None:
    """Teacher-forced on held-out text: more signs, less divergence; most keys that are attended to are packed."""
    from vq_core.demo import MODEL_PATH, heldout_text
    from vq_core.evaluate.divergence import divergences
    from vq_core.hosts.mlx_lm import compress
    from vq_core.hosts.mlx_lm.generate import load

    model, tokenizer = load(MODEL_PATH)
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode(heldout_text())[:280]
    caches = []
    for settings in ("bits=1", "bits=4,outliers=8"):
        handle = compress(model, keys=f"qjl:{settings}", values="kivi:bits=2", residual=32)
        caches.append(handle.make_cache())
    try:
        found = divergences(model, tokens, handle.plain_cache(), caches, prefill=240)
    finally:
        handle.undo()
    for one in found:
        print(one)
    assert all(one.packed_share > 0.75 for one in found)
    assert 0 < found[1].kl < found[0].kl
    assert found[1].perplexity < 1.5 * found[1].reference_perplexity
