"""KIVI against a numpy reference written from the paper's formula, and its published figures."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import PrepareContext, SettingsError
from vq_core.plugins.binding import BoundSide, bind

BITS, GROUPS = (2, 3, 4, 8), (32, 64, 128)
SIDES = ("keys", "values")


def side(which: str, dim: int, bits: int = 2, group: int = 32, dtype: str = "float16", heads: int = 2) -> BoundSide:
    ctx = PrepareContext(which, heads, dim, dim, dtype)  # type: ignore[arg-type]
    return bind(f"kivi:bits={bits},group_size={group}", ctx)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def reference(x: np.ndarray, which: str, bits: int, group: int, metadata: Any) -> tuple[np.ndarray, ...]:
    """Codes, scale, zero and decoded values of x (..., n, D), from methods.md section 1, in numpy alone.

    Keys: groups of consecutive tokens of a channel, stored (D, n).  Values: groups of consecutive channels of a
    token, the last group filled up with the edge value.
    """
    x = x.astype(np.float32)
    dim = x.shape[-1]
    if which == "keys":
        x = x.swapaxes(-1, -2)
    else:
        x = np.concatenate([x, np.repeat(x[..., -1:], -dim % group, axis=-1)], axis=-1)
    grouped = x.reshape(*x.shape[:-1], -1, group)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    with np.errstate(all="ignore"):
        scale = ((high - low) / np.float32(2**bits - 1)).astype(metadata)
        zero = low.astype(metadata)
        step = scale.astype(np.float32)[..., None]
        codes = np.rint((grouped - zero.astype(np.float32)[..., None]) / np.where(step > 0, step, np.float32(1)))
        codes = np.where(step > 0, np.clip(codes, 0, 2**bits - 1), 0).astype(np.uint32)
    decoded = codes.astype(np.float32) * step + zero.astype(np.float32)[..., None]
    decoded = decoded.reshape(x.shape)
    decoded = decoded.swapaxes(-1, -2) if which == "keys" else decoded[..., :dim]
    return codes.reshape(x.shape), scale, zero, decoded


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    flat = ((codes[..., None] >> np.arange(bits, dtype=np.uint32)) & 1).reshape(*codes.shape[:-1], -1)
    return np.packbits(flat.astype(np.uint8), axis=-1, bitorder="little").view("<u4")


def packed(bound: BoundSide, x: mx.array) -> dict[str, mx.array]:
    positions = mx.broadcast_to(mx.arange(x.shape[2]), (x.shape[0], x.shape[2]))
    return bound.pack(x, positions, {})


def decoded(bound: BoundSide, x: mx.array) -> np.ndarray:
    return np.array(bound.decode(packed(bound, x), None))


def error(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.square(x.astype(np.float64) - y).sum() / np.square(x.astype(np.float64)).sum())


# ---- bit for bit


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize(("bits", "group"), list(itertools.product(BITS, GROUPS)))
def test_bit_for_bit(bits: int, group: int, which: str, dtype: str) -> None:
    """Codes, scale, zero and decoding; head sizes that do not fill a group; groups larger than the head size."""
    metadata = np.float32 if dtype == "float32" else np.float16
    for dim in (8, 64, 80, 96, 128):
        x = mx.array(numbers(2, 2, 128, dim, seed=dim) * 3 + 1).astype(getattr(mx, dtype))
        bound = side(which, dim, bits, group, dtype)
        exact = np.array(x.astype(mx.float32))
        codes, scale, zero, values = reference(exact, which, bits, group, metadata)
        rows = packed(bound, x)
        np.testing.assert_array_equal(np.array(rows["codes"]), words(codes, bits))
        for name, want in (("scale", scale), ("zero", zero)):
            assert np.array(rows[name]).dtype == metadata
            np.testing.assert_array_equal(np.array(rows[name]), want)
        np.testing.assert_allclose(decoded(bound, x), values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("bits", BITS)
def test_halves_go_to_the_even_code(bits: int, which: str) -> None:
    """rint: group of 0, 1, 2, ... whose scale is exactly 2, so that every odd number is a half."""
    top = 2 * (2**bits - 1)
    x = np.zeros((1, 1, 32, 32), np.float32)
    line = np.minimum(np.arange(32), top).astype(np.float32) if top < 512 else np.arange(32, dtype=np.float32)
    line[-1] = top
    x[:] = line[None, None, :, None] if which == "keys" else line
    codes, scale, _, values = reference(x, which, bits, 32, np.float16)
    assert (scale == 2).all() and sorted({*codes.ravel()[:32]})[0] == 0
    got = decoded(side(which, 32, bits, heads=1), mx.array(x).astype(mx.float16))
    np.testing.assert_array_equal(got, values)
    np.testing.assert_array_equal(got, np.clip(2 * np.rint(x / 2), 0, top))


@pytest.mark.parametrize("which", SIDES)
def test_blocks_at_once_equal_blocks_one_by_one(which: str) -> None:
    bound, x = side(which, 80, 3), mx.array(numbers(2, 2, 128, 80)).astype(mx.float16)
    whole = packed(bound, x)
    for name, field in ((f.name, f) for f in bound.layout.paged):
        parts = [packed(bound, x[:, :, i : i + 32])[name] for i in range(0, 128, 32)]
        assert mx.array_equal(mx.concatenate(parts, axis=2 + (field.axis or 0)), whole[name])
        alone = packed(bound, x[1:])[name]
        assert mx.array_equal(alone, whole[name][1:])


def test_two_processes_give_the_same_codes() -> None:
    """Case 42."""
    code = (
        "import hashlib, sys, mlx.core as mx, numpy as np\n"
        "from vq_core import PackedKVCache\n"
        "x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 300, 80), np.float32))\n"
        "c = PackedKVCache(method='kivi:bits=3'); c.update_and_fetch(x, x)\n"
        "h = hashlib.sha256()\n"
        "[h.update(bytes(memoryview(a))) for a in c.state[1:]]\n"
        "print(h.hexdigest())\n"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != ""


# ---- figures


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize(
    ("bits", "group", "figure"), [(2, 32, 0.1545), (2, 64, 0.2027), (2, 128, 0.2505), (4, 32, 0.0061), (4, 64, 0.0081)]
)
def test_figures_on_gaussian_data(which: str, bits: int, group: int, figure: float) -> None:
    """Acceptance 4: relative squared error of N(0, 1), 4096 x 128, within 2%."""
    x = numbers(1, 1, 4096, 128)
    got = error(x, decoded(side(which, 128, bits, group, "float32", 1), mx.array(x)))
    assert got == pytest.approx(figure, rel=0.02)


def test_keys_with_outlier_channels() -> None:
    """Acceptance 4: four channels of mean +-15; the axis of the groups is why."""
    x = numbers(1, 1, 4096, 128)
    x[..., [3, 40, 77, 100]] += np.array([15, -15, 15, -15], np.float32)
    assert error(x, decoded(side("keys", 128, heads=1), mx.array(x).astype(mx.float16))) <= 0.022
    assert error(x, decoded(side("values", 128, heads=1), mx.array(x).astype(mx.float16))) > 0.3


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("group", GROUPS)
def test_error_falls_as_bits_rise(which: str, group: int) -> None:
    """Case 42 (constants that are right for one width only)."""
    x = numbers(1, 2, 512, 128)
    errors = [error(x, decoded(side(which, 128, bits, group, "float32"), mx.array(x))) for bits in BITS]
    assert errors == sorted(errors, reverse=True)
    assert all(a > 3 * b for a, b in itertools.pairwise(errors))


def test_scaled_outlier_channels_leave_the_others_alone() -> None:
    """Case 16: channels 5 and 77 times 30 and 100; the rest may get at most twice as bad. It does not change."""
    plain = numbers(1, 2, 512, 128)
    loud = plain * np.where(np.arange(128) == 5, 30, np.where(np.arange(128) == 77, 100, 1)).astype(np.float32)
    rest = [c for c in range(128) if c not in (5, 77)]
    before, after = (decoded(side("keys", 128), mx.array(x).astype(mx.float16)) for x in (plain, loud))
    np.testing.assert_array_equal(before[..., rest], after[..., rest])


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.99), (2, 0.92)])
def test_keys_with_a_huge_bias(bits: int, bound: float) -> None:
    """Case 15: a constant a channel, three of them +-300; correlation of the logits with those of exact keys.

    At 2 bits 1 / sqrt(1 + .1545) = .93, as without a bias: the bias goes into the zeros.
    """
    x = numbers(1, 1, 512, 128)
    x += numbers(128, seed=5)
    x[..., [7, 50, 99]] += np.array([300, -300, 300], np.float32)
    q = numbers(64, 128, seed=9)
    y = decoded(side("keys", 128, bits, heads=1), mx.array(x).astype(mx.float16))
    logits, got = (q.astype(np.float64) @ a[0, 0].T for a in (x, y))
    # A constant a query is invisible to softmax, and would make any correlation look good: it is taken out.
    logits, got = (a - a.mean(axis=1, keepdims=True) for a in (logits, got))
    assert np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(logits, got, strict=True)]) > bound


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_eight_times_the_input_is_eight_times_the_output(which: str, dtype: str) -> None:
    """Case 42 (scales that are not delivered); 8 is a power of two, so it is exact."""
    x = mx.array(numbers(1, 2, 128, 64)).astype(getattr(mx, dtype))
    bound = side(which, 64, dtype=dtype)
    np.testing.assert_array_equal(decoded(bound, 8 * x), 8 * decoded(bound, x))


# ---- shapes


@pytest.mark.parametrize("dim", (64, 80, 96, 100, 112, 120, 128, 192, 256, 576))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", (1, *BITS))
def test_every_head_size_or_a_refusal_before_the_first_token(dim: int, group: int, bits: int) -> None:
    """Case 1."""
    if bits not in BITS:
        with pytest.raises(SettingsError, match="bits must be one of 2, 3, 4, 8"):
            PackedKVCache(method=f"kivi:bits={bits},group_size={group}")
        return
    cache = PackedKVCache(method=f"kivi:bits={bits},group_size={group}", residual=0)
    x = mx.array(numbers(1, 2, 128 + 33, dim)).astype(mx.float16)
    cache.update_and_fetch(x, x)
    assert cache.report().packed == 161 // group * group
    for got in cache.decode():
        assert (got.shape, got.dtype) == (x.shape, x.dtype)
        assert error(np.array(x), np.array(got)) < 0.3


@pytest.mark.parametrize("dim", (64, 80, 96, 128, 192, 256))
@pytest.mark.parametrize("heads", (1, 2, 3, 8))
def test_heads_do_not_leak(dim: int, heads: int) -> None:
    """Case 9: each head a constant of its own, which decodes exactly, in codes and in attention."""
    x = np.broadcast_to(np.arange(1, heads + 1, dtype=np.float16)[None, :, None, None], (1, heads, 160, dim))
    cache = PackedKVCache(method="kivi", residual=32)
    cache.update_and_fetch(mx.array(x), mx.array(-x))
    assert cache.report().packed == 128
    np.testing.assert_array_equal(np.array(cache.decode()[0]), x)
    out = cache.attend(mx.zeros((1, 2 * heads, 1, dim), mx.float16), scale=1.0)
    np.testing.assert_allclose(np.array(out)[0, :, 0, 0], -np.repeat(np.arange(1, heads + 1), 2), rtol=1e-3)


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize(("bits", "group", "dim"), [(2, 32, 128), (3, 64, 80), (4, 128, 96), (8, 32, 40), (3, 128, 64)])
def test_quantized_matmul_equals_decoding(which: str, bits: int, group: int, dim: int) -> None:
    """The fused path and its twin, in float32, three pages."""
    bound = side(which, dim, bits, group, "float32")
    x = mx.array(numbers(3, 2, 128, dim))
    tile = packed(bound, x)
    plain = bound.decode(tile, None)
    if which == "keys":
        q = mx.array(numbers(1, 2, 5, dim, seed=1))
        got, want = bound.attend.scores(bound.attend.prepare_query(q), tile), q @ plain.swapaxes(-1, -2)
    else:
        w = mx.array(numbers(3, 2, 5, 128, seed=1))
        got, want = bound.attend.finish(bound.attend.accumulate(w, tile)), w @ plain
    assert got.shape == want.shape
    np.testing.assert_allclose(np.array(got), np.array(want), atol=2e-5 * float(mx.abs(want).max()))


def test_values_are_padded_to_whole_groups_with_the_edge_value() -> None:
    """D = 80 in groups of 32: 96 channels are stored and counted; the last group's range is that of its 16."""
    bound = side("values", 80)
    assert {f.name: f.shape for f in bound.layout.paged} == {"codes": (128, 6), "scale": (128, 3), "zero": (128, 3)}
    x = np.full((1, 2, 128, 80), 5.5, np.float16)
    x[..., 64:] = np.linspace(5, 6, 16)
    rows = packed(bound, mx.array(x))
    np.testing.assert_array_equal(np.array(rows["zero"])[..., 2], 5)
    np.testing.assert_allclose(np.array(rows["scale"])[..., 2], 1 / 3, rtol=1e-3)
    np.testing.assert_allclose(decoded(bound, mx.array(x))[..., 79], 6, rtol=1e-3)


def test_a_ragged_tail_is_never_filled_with_zeros() -> None:
    """Case 21: all values in [5, 6], 37 tokens, groups of 32 tokens."""
    x = mx.array(np.random.default_rng(0).uniform(5, 6, (1, 2, 37, 80)).astype(np.float16))
    cache = PackedKVCache(method="kivi", residual=0)
    cache.update_and_fetch(x, x)
    assert cache.report().packed == 32
    for got in cache.decode():
        assert mx.min(got).item() >= 5 and mx.max(got).item() <= 6


@pytest.mark.parametrize("which", SIDES)
def test_three_bits_are_three(which: str) -> None:
    bound = side(which, 128, 3)
    assert bound.layout.bits_per_element(128) == (3.0, 1.0)
    assert packed(bound, mx.zeros((1, 2, 128, 128), mx.float16))["codes"].nbytes == 2 * 128 * 128 * 3 // 8


@pytest.mark.parametrize(("bits", "group"), list(itertools.product(BITS, GROUPS)))
def test_bits_a_number(bits: int, group: int) -> None:
    for which in SIDES:
        assert side(which, 128, bits, group).layout.bits_per_element(128) == (bits, 32 / group)
        assert side(which, 128, bits, group, "float32").layout.bits_per_element(128) == (bits, 64 / group)


# ---- extreme numbers


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
@pytest.mark.parametrize("value", (0.0, 1.0, -3.140625, 600.0, 60416.0, -60416.0))
def test_constant_groups_are_exact(value: float, dtype: str) -> None:
    for which in SIDES:
        x = mx.full((1, 2, 128, 80), value).astype(getattr(mx, dtype))
        bound = side(which, 80, dtype=dtype)
        np.testing.assert_array_equal(decoded(bound, x), np.array(x.astype(mx.float32)))
        assert not np.array(packed(bound, x)["codes"]).any()


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("bits", BITS)
def test_float16_extremes(which: str, bits: int) -> None:
    """Case 13: max - min is beyond float16; +-60000 in one group."""
    x = numbers(1, 2, 128, 64)
    x[:, :, ::2, ::2], x[:, :, 1::2, 1::2] = 60000, -60000
    if which == "values":
        x[:, :, :, 0], x[:, :, :, 1] = 60000, -60000
    bound = side(which, 64, bits)
    half = mx.array(x).astype(mx.float16)
    rows, y = packed(bound, half), decoded(bound, half)
    assert all(np.isfinite(np.array(rows[n])).all() for n in ("scale", "zero"))
    assert np.isfinite(y).all()
    step = np.array(rows["scale"]).astype(np.float32).max()
    assert np.abs(y - np.array(half.astype(mx.float32))).max() <= 0.51 * step + 2**bits * 2**-10 * step


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_nan_and_inf_stay_in_their_group(which: str, bad: float, dtype: str) -> None:
    x = numbers(2, 2, 128, 80)
    spoilt = x.copy()
    spoilt[1, 0, 40, 70] = bad
    bound = side(which, 80, dtype=dtype)
    a, b = (decoded(bound, mx.array(v).astype(getattr(mx, dtype))) for v in (x, spoilt))
    same = np.ones(x.shape, bool)
    if which == "keys":
        same[1, 0, 32:64, 70] = False
    else:
        same[1, 0, 40, 64:] = False
    np.testing.assert_array_equal(a[same], b[same])
    assert not np.isfinite(b[1, 0, 40, 70])


@pytest.mark.parametrize("which", SIDES)
def test_scale_underflow_loses_no_more_than_the_range(which: str) -> None:
    """A range of 1e-7 has a float16 scale of zero at 2 bits: every number becomes the minimum."""
    x = np.full((1, 2, 128, 64), 6e-5, np.float16)
    x[:, :, ::2, ::2] = np.nextafter(np.float16(6e-5), np.float16(1))
    bound = side(which, 64)
    y = decoded(bound, mx.array(x))
    assert np.isfinite(y).all()
    assert np.abs(y - x.astype(np.float32)).max() <= 6e-8
    tiny = mx.full((1, 2, 128, 64), 1e-30).astype(mx.bfloat16)
    assert np.abs(decoded(side(which, 64, dtype="bfloat16"), tiny) - 1e-30).max() <= 2**-25


@pytest.mark.parametrize("which", SIDES)
def test_bfloat16_beyond_float16_widens_the_field(which: str) -> None:
    """What was stored keeps its value, and nothing depends on the chunks in which it came."""
    x = numbers(1, 2, 512, 64)
    x[:, :, 200:210, 3] = -70000
    x[:, :, 300, 9] = 3e38
    x = mx.array(x).astype(mx.bfloat16)

    def run(sizes: list[int]) -> tuple[PackedKVCache, list[np.ndarray]]:
        cache = PackedKVCache(method="kivi", residual=0)
        seen, begin = [], 0
        for n in sizes:
            part = x[:, :, begin : begin + n]
            cache.update_and_fetch(part, part)
            begin += n
            seen.append(np.array(cache.decode()[SIDES.index(which)].astype(mx.float32)))
        return cache, seen

    whole, [all_of_it] = run([512])
    store = whole._history.stores[which]  # type: ignore[union-attr]
    assert store.paged["zero"].dtype == store.paged["scale"].dtype == mx.float32
    assert np.isfinite(all_of_it).all()
    for sizes in ([100, 412], [33] * 15 + [17], [192, 32, 288], [512 - 64, 64]):
        parts, seen = run(sizes)
        other = parts._history.stores[which]  # type: ignore[union-attr]
        for name, array in store.paged.items():
            np.testing.assert_array_equal(np.array(array[: store.used]), np.array(other.paged[name][: other.used]))
        for earlier in seen:
            n = earlier.shape[2] // 32 * 32
            np.testing.assert_array_equal(earlier[:, :, :n], all_of_it[:, :, :n])
    out = whole.attend(mx.array(numbers(1, 4, 1, 64)).astype(mx.bfloat16), scale=0.1)
    assert not mx.isnan(out).any()
    quiet = PackedKVCache(method="kivi", residual=0)
    quiet.update_and_fetch(x[:, :, :192], x[:, :, :192])
    assert quiet._history.stores[which].paged["zero"].dtype == mx.float16  # type: ignore[union-attr]


def test_small_prefill_chunks_of_eight_bits() -> None:
    """Case 11: 64 tokens in steps of 4, then a step; no NaN, and as one chunk to 1e-2."""
    k, v = (mx.array(numbers(1, 16, 64, 64, seed=s)).astype(mx.float16) for s in (1, 2))
    q = mx.array(numbers(1, 16, 1, 64, seed=3)).astype(mx.float16)
    outs = []
    for size in (4, 64):
        cache = PackedKVCache(method="kivi:bits=8", residual=0)
        for i in range(0, 64, size):
            cache.update_and_fetch(k[:, :, i : i + size], v[:, :, i : i + size])
            chunk = cache.attend(q[:, :, :1], scale=0.125)
            assert not mx.isnan(chunk).any()
        outs.append(np.array(chunk))
    assert cache.report().packed == 64
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-2)
    dense = np.array(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125))
    np.testing.assert_allclose(outs[0], dense, atol=1e-2)


# ---- settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kivi:bits=5", "bits must be one of 2, 3, 4, 8"),
        ("kivi:bits=1", "bits"),
        ("kivi:bits=16", "bits"),
        ("kivi:bits=2.5", "cannot read bits='2.5' as int"),
        ("kivi:group_size=16", "group_size must be one of 32, 64, 128"),
        ("kivi:group_size=0", "group_size"),
        ("kivi:group_size=-32", "group_size"),
        ("kivi:residual=4", "no setting 'residual'; it has: bits, group_size"),
    ],
)
def test_settings_out_of_range(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        PackedKVCache(method=text)


def test_trim_within_one_step_of_the_truth() -> None:
    """Case 27 on lossy codes: packed places equal a fresh cache's, numbers within one quantization step."""
    x = mx.array(numbers(1, 2, 200, 64)).astype(mx.float16)
    make: Callable[[], PackedKVCache] = lambda: PackedKVCache(method="kivi:bits=4", residual=0)  # noqa: E731
    cache, fresh = make(), make()
    cache.update_and_fetch(x[:, :, :130], x[:, :, :130])
    assert cache.trim(60) == 60
    cache.update_and_fetch(x[:, :, 70:], x[:, :, 70:])
    fresh.update_and_fetch(x, x)
    assert cache.report().packed == fresh.report().packed == 192
    for a, b in zip(cache.decode(), fresh.decode(), strict=True):
        step = 6.5 / 15  # the widest range of 32 of these numbers, over the levels
        assert mx.abs(a - b).max().item() <= step
        assert mx.array_equal(a[:, :, :64], b[:, :, :64])
