"""What VecInfer promises beyond the kit: figures, exact products and bytes, what is learnt and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import (
    SIDES,
    Artifact,
    Calibration,
    PluginError,
    PrepareContext,
    SettingsError,
    Side,
    UnsupportedShapeError,
)
from vq_core.calibration.stand_in import completed
from vq_core.plugins import binding
from vq_core.plugins.binding import BoundSide
from vq_core.testing.kit import round_trip
from vq_vecinfer import method
from vq_vecinfer.kmeans import kmeans
from vq_vecinfer.method import FLOOR, HEAD_DIMS, VecInferSettings

Numbers = np.ndarray[Any, Any]


def context(side: Side = "keys", heads: int = 2, dim: int = 64, **more: Any) -> PrepareContext:
    return PrepareContext(side=side, kv_heads=heads, key_dim=dim, value_dim=dim, dtype="float16", **more)


def given(x: Numbers, rounds: int = 25) -> Calibration:
    """Of tokens (H, n, D)."""
    x = x.astype(np.float32)
    low, high, mean = (mx.array(f(axis=1)) for f in (x.min, x.max, x.mean))
    return Calibration(mx.array(x), x.shape[1], low, high, mean, rounds)


def normal(*shape: int, seed: int = 0) -> Numbers:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def prepared(ctx: PrepareContext, settings: VecInferSettings, calibration: Calibration) -> Any:
    return method.vq_prepare(ctx, settings, Artifact(method.vq_calibrate(ctx, settings, calibration), "x"))


def error(state: Any, x: mx.array) -> float:
    """Relative squared error of a round trip."""
    sequence = {} if state.mean is None else method.vq_start(state, x)
    packed = method.vq_pack(state, method.vq_encode(state, x, sequence))
    got = np.array(method.vq_decode(state, {**packed, **sequence}))
    return float(np.square(got - np.array(x)).sum() / np.square(np.array(x)).sum())


# ---- figures


@pytest.mark.parametrize(("sub", "figure"), [(8, 0.3260), (4, 0.0977)])
@pytest.mark.parametrize("side", SIDES)
def test_the_figures_on_normal_numbers(side: Side, sub: int, figure: float) -> None:
    """methods.md, section 6: 256 centroids from 32,768 sub-vectors, seed 0, 15 rounds; on as many others, seed 1.

    docs/results/vecinfer-errors.py has these, and 4,096 centroids, from more.
    """
    settings = VecInferSettings(sub=sub, centroids=256)
    state = prepared(context(side), settings, given(normal(2, 2**15 * sub // 128, 64), 15))
    x = mx.array(normal(1, 2, 2**15 * sub // 128, 64, seed=1))
    assert error(state, x) == pytest.approx(figure, rel=0.05)


def test_a_mean_taken_off_pays_where_channels_have_one() -> None:
    """methods.md, section 6(c): a mean offset in some channels is what mean=true is for, and smoothing is not."""
    x, fresh = normal(2, 2048, 64), normal(1, 2, 1024, 64, seed=1)
    for numbers in (x, fresh):
        numbers[..., [3, 17, 30, 52]] += (15, -15, 15, 15)
    plain, centred = (
        error(prepared(context(), VecInferSettings(sub=4, centroids=256, mean=mean), given(x, 8)), mx.array(fresh))
        for mean in (False, True)
    )
    assert centred < 0.8 * plain, (centred, plain)


def test_codebooks_of_places_serve_channels_that_differ() -> None:
    x, fresh = normal(2, 2048, 64), normal(1, 2, 1024, 64, seed=1)
    spread = np.exp(np.linspace(-2, 2, 64))
    shared, apart = (
        error(
            prepared(context("values"), VecInferSettings(sub=4, centroids=256, codebooks=books), given(x * spread, 8)),
            mx.array((fresh * spread).astype(np.float32)),
        )
        for books in ("shared", "subspace")
    )
    assert apart < 0.8 * shared


# ---- the transform


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("repeats", [1, 3, 4, 7])
def test_products_of_transformed_queries_and_keys_are_exact(dim: int, repeats: int) -> None:
    rng = np.random.default_rng(dim)
    keys = normal(2, 512, dim) * np.exp(rng.standard_normal((2, 1, dim)))
    state = prepared(context(dim=dim), VecInferSettings(sub=8, centroids=256), given(keys, 1))
    k, q = mx.array(keys[None, :, :40]), normal(1, 2 * repeats, 3, dim, seed=2)
    stored = np.array(state.stored(k, {})).astype(np.float64)
    asked = np.array(state.prepare_query(mx.array(q))).astype(np.float64)
    for head in range(2 * repeats):  # of the KV head head // repeats
        got = asked[0, head] @ stored[0, head // repeats].T
        want = q[0, head].astype(np.float64) @ keys[head // repeats, :40].astype(np.float64).T
        size = np.linalg.norm(q[0, head], axis=1).max() * np.linalg.norm(keys[head // repeats, :40], axis=1).max()
        assert np.abs(got - want).max() < 2e-6 * size


def test_lambda_is_of_the_kv_head_and_channel_with_a_floor() -> None:
    x = normal(3, 2048, 64)
    x[1, :, 5] *= 100
    x[2, :, 7] = 0
    smooth = np.array(
        method.vq_calibrate(context(heads=3), VecInferSettings(sub=8, centroids=256), given(x, 1))["smooth"]
    )
    want = np.maximum(np.sqrt(np.abs(x).max(axis=1)), FLOOR)
    assert smooth.dtype == np.float32 and np.allclose(smooth, want, rtol=1e-6) and smooth[2, 7] == np.float32(FLOOR)
    # A large lambda does not overflow a float16 query.
    state = prepared(context(heads=3), VecInferSettings(sub=8, centroids=256), given(x * 1e7, 1))
    assert np.isfinite(np.array(state.prepare_query(mx.full((1, 3, 1, 64), 60000.0, mx.float16)))).all()


# ---- bytes


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("sub", "centroids"), [(8, 256), (8, 1024), (4, 256), (4, 1024), (4, 4096), (2, 256)])
def test_bits_a_number_are_exact(dim: int, sub: int, centroids: int) -> None:
    state = method.VecInfer(
        "values",
        dim,
        int(math.log2(centroids)),
        mx.zeros((1, centroids, sub)),
        mx.zeros((1, centroids)),
        None,
        None,
        None,
    )
    assert method.vq_layout(state).bits_per_element(dim) == (math.log2(centroids) / sub, 0)


@pytest.mark.parametrize(("text", "bits"), [("sub=8,centroids=256", 1.0), ("sub=4,centroids=256", 2.0)])
@pytest.mark.parametrize("dim", [128, 64])
def test_bytes_held_at_4096_tokens(text: str, bits: float, dim: int) -> None:
    """methods.md, section 14, from the arrays held; shared constants apart."""
    cache = PackedKVCache(method=completed(f"vecinfer:{text}", [(1, dim)]), residual=0)
    x = mx.array(normal(1, 1, 4096, dim)).astype(mx.float16)
    cache.update_and_fetch(x, x)
    held = cache.report().bytes
    assert 8 * (held.codes + held.metadata) / (2 * 4096 * dim) == bits and held.spare <= held.codes / 32
    assert held.constants > 0


# ---- codes


def with_book(book: Numbers, dim: int, bits: int) -> Any:
    halves = np.square(book.astype(np.float64)).sum(-1) / 2
    return method.VecInfer("values", dim, bits, mx.array(book), mx.array(halves.astype(np.float32)), None, None, None)


def test_of_equals_the_lowest_number_wins() -> None:
    book = np.zeros((1, 256, 2), np.float32)
    book[0, 7] = book[0, 9] = (1, 0)
    book[0, 5] = (-1, 0)
    codes = method.nearest(with_book(book, 4, 8), mx.array([[1.0, 0, 0.5, 0], [0, 3, 0, 0], [-0.5, 1, 9, 9]]))
    assert codes.tolist() == [[7, 0], [0, 0], [0, 7]]


def test_nan_and_infinity_get_code_0_and_stay_in_their_sub_vector() -> None:
    state = with_book(normal(1, 256, 4) + 2, 16, 8)
    state.codebook[:, 0] = 0
    x = normal(1, 16) + 2
    clean = method.nearest(state, mx.array(x)).tolist()[0]
    for bad in (math.nan, math.inf, -math.inf):
        hit = x.copy()
        hit[0, 5] = bad
        assert method.nearest(state, mx.array(hit)).tolist()[0] == [clean[0], 0, *clean[2:]]


def bound(text: str, side: Side, dtype: str, kernels: Any = "off") -> BoundSide:
    ctx = attrs.evolve(context(side), dtype=dtype)
    return binding.bind(completed(text, [(2, 64)]), ctx, kernels=kernels)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kernels", ["off", "simulator"])
def test_degenerate_tokens_on_reference_and_kernel_alike(side: Side, kernels: str) -> None:
    """Zeros, constants, norms beyond float16, NaN, infinity: a documented result, never an exception."""
    one = bound("vecinfer:sub=8,centroids=256", side, "bfloat16", kernels)
    x = normal(1, 2, 8, 64)
    x[:, :, 0], x[:, :, 1], x[:, :, 2], x[:, :, 3] = 0, 3.5, 1e25, -3e38
    x[:, :, 4, 3], x[:, :, 5, 60], x[:, :, 6] = math.nan, math.inf, 1e-30
    got = np.array(round_trip(one, mx.array(x).astype(mx.bfloat16)))
    assert np.isfinite(got).all() and not got[:, :, 0].any() and np.abs(got[:, :, 6]).max() < 1e-3
    if side == "keys":  # the transform spreads it over its token, which comes back as zeros
        assert not got[:, :, 4:6].any()
    else:
        assert not got[:, :, 4, :8].any() and not got[:, :, 5, 56:].any() and got[:, :, 4, 8:].any()
    # The large ones are served by the centroids that point their way.
    assert np.einsum("bhd,bhd->bh", got[:, :, 2].astype(np.float64), x[:, :, 2].astype(np.float64)).min() > 0


# ---- k-means


def test_kmeans_keeps_the_origin_serves_every_vector_and_repeats() -> None:
    x = normal(5000, 4)
    book = kmeans(x, 64, 25, (0, 1))
    assert np.array_equal(book, kmeans(x, 64, 25, (0, 1))) and not np.array_equal(book, kmeans(x, 64, 25, (0, 2)))
    assert not book[0].any() and book.dtype == np.float32
    distances = np.square(x[:, None] - book).sum(-1)
    members = np.bincount(distances.argmin(1), minlength=64)
    assert members.min() > 0
    # Settled: each centroid but the first is the mean of its members.
    for i in range(1, 64):
        assert np.abs(x[distances.argmin(1) == i].mean(0) - book[i]).max() < 0.1


def test_centroids_that_no_vector_is_near_go_where_they_are_needed() -> None:
    """Half of the vectors are one vector: most centroids drawn from them are one, and none of their copies stays."""
    x = normal(4000, 2) * 5
    x[:3000] = (9, 9)
    book = kmeans(x, 64, 50, (0,))
    assert len(np.unique(book.round(6), axis=0)) == 64
    error = np.square(x[3000:, None] - book).sum(-1).min(1).mean()
    assert error < 0.04 * np.square(x[3000:]).sum(1).mean()


def test_fewer_distinct_vectors_than_centroids_are_served_exactly() -> None:
    x = np.repeat(normal(40, 4), 100, axis=0)
    book = kmeans(x, 64, 25, (0,))
    assert np.isfinite(book).all() and np.square(x[:, None] - book).sum(-1).min(1).max() < 1e-9


def test_encoding_takes_bounded_memory() -> None:
    """Eight times the tokens take as much on the way: sums with every centroid are held for some at a time."""
    state = with_book(normal(1, 4096, 4), 64, 12)
    peaks = []
    for tokens in (128, 1024):
        y = mx.array(normal(1, 1, tokens, 64))
        mx.eval(y, state.codebook, state.halves)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(method.nearest(state, y))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 1.25 * peaks[0] and peaks[1] < 48 * 2**20


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "heads", "tokens", "needed"),
    [
        (VecInferSettings(), 2, 511, 512),
        (VecInferSettings(sub=8, centroids=256), 1, 127, 128),
        (VecInferSettings(sub=8, centroids=256, codebooks="subspace"), 2, 511, 512),
    ],
)
def test_too_few_tokens_are_refused_with_the_number_that_is_needed(
    settings: VecInferSettings, heads: int, tokens: int, needed: int
) -> None:
    ctx = context(heads=heads)
    with pytest.raises(SettingsError, match=f"{tokens} tokens are too few .* at least {needed} are needed"):
        method.vq_calibrate(ctx, settings, given(normal(heads, tokens, 64), 1))
    assert method.vq_calibrate(ctx, settings, given(normal(heads, needed, 64), 1))["codebook"].size


@pytest.mark.parametrize("dim", [1, 20, 72, 100, 120])
def test_head_sizes_without_a_transform_are_refused(dim: int) -> None:
    assert dim not in HEAD_DIMS
    for side in SIDES:
        with pytest.raises(UnsupportedShapeError, match=f"head size {dim} .*accepted are 16, 32, 48, 64, 80"):
            method.vq_calibrate(context(side, dim=dim), VecInferSettings(), given(normal(2, 8, dim)))
        with pytest.raises(UnsupportedShapeError, match=f"head size {dim} .*accepted are 16, 32, 48, 64, 80"):
            binding.bind("vecinfer", context(side, dim=dim))  # and no artifact is asked for


def test_every_head_size_that_is_accepted_has_a_transform() -> None:
    for dim in HEAD_DIMS:
        assert dim % 8 == 0 and method.hadamard(mx.zeros((1, dim))).shape == (1, dim)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("codebook"), "codebook of the artifact is None"),
        (lambda a: a.pop("smooth"), "smooth of the artifact is None"),
        (lambda a: a.update(mean=mx.zeros((2, 64))), r"mean of the artifact is \(2, 64\), not None"),
        (lambda a: a.update(codebook=mx.zeros((1, 256, 4))), r"\(1, 256, 4\), not \(1, 256, 8\)"),
        (lambda a: a.update(smooth=mx.zeros((1, 64))), r"\(1, 64\), not \(2, 64\)"),
        (lambda a: a.update(codebook=a["codebook"].astype(mx.float16)), "codebook of the artifact is None"),
    ],
)
def test_arrays_of_another_shape_are_refused(change: Any, said: str) -> None:
    settings = VecInferSettings(sub=8, centroids=256)
    arrays = dict(method.vq_calibrate(context(), settings, given(normal(2, 512, 64), 1)))
    change(arrays)
    with pytest.raises(PluginError, match=said):
        method.vq_prepare(context(), settings, Artifact(arrays, "x"))


@pytest.mark.parametrize("wrong", ["sub=3", "centroids=512", "codebooks=all", "mean=perhaps", "bits=2"])
def test_settings_that_are_none(wrong: str) -> None:
    with pytest.raises(SettingsError, match=wrong.split("=")[0]):
        PackedKVCache(method=f"vecinfer:{wrong}")


def test_without_an_artifact_it_refuses_to_run(tmp_path: Path) -> None:
    cache = PackedKVCache(method="vecinfer")
    x = mx.zeros((1, 2, 8, 64), mx.float16)
    with pytest.raises(SettingsError, match=r"needs an artifact.* vq calibrate MODEL --method vecinfer:sub=0"):
        cache.update_and_fetch(x, x)
    assert cache.empty()
