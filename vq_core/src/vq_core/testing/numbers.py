"""Numbers: error, scale, constant groups, extremes, NaN and Inf."""

from __future__ import annotations

import math
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from vq_core.api.facts import Side
from vq_core.plugins.binding import BoundSide
from vq_core.testing.kit import Kit, decode, pack, round_trip, skip, whole
from vq_core.testing.observe import assert_same, floats, gaussian

EXACTLY = 2.0**-20


class NumbersConformance(Kit):
    """What comes back for what goes in."""

    def test_gaussian_error(self, text: str, side: Side) -> None:
        """On N(0, 1) the relative squared error is within the bound that the method declares."""
        bound_of = self.capabilities().gaussian_error
        if bound_of is None:
            skip("gaussian_error=None", "the method bounds no reconstruction")
            return
        bound = self.bind(text, side)
        limit = bound_of(bound.choice.settings, self.dim())
        error = squared_error(bound, gaussian((1, self.kv_heads, whole(bound, 1024), self.dim()), seed=11))
        assert error <= limit, f"{text}, {side}: relative squared error {error:.5f}, declared at most {limit:.5f}"

    def test_error_falls_along_the_ladder(self, side: Side) -> None:
        """More bits, less error, strictly; a width whose constants are wrong stands out."""
        if len(self.ladder) < 2:
            pytest.skip("no ladder: set it to texts of the method in the order of falling error")
        errors = []
        for text in self.ladder:
            bound = self.bind(text, side)
            errors.append(squared_error(bound, gaussian((1, self.kv_heads, whole(bound, 512), self.dim()), seed=12)))
        assert all(a > b for a, b in pairwise(errors)), dict(zip(self.ladder, errors, strict=True))

    def test_scale(self, text: str, side: Side) -> None:
        """8 x decodes to 8 times what x decodes to."""
        if not self.capabilities().scale_equivariant:
            skip("scale_equivariant=False")
        bound = self.bind(text, side)
        x = gaussian((1, self.kv_heads, whole(bound, 64), self.dim()), seed=13)
        small, large = floats(round_trip(bound, x)), floats(round_trip(bound, x * 8))
        assert np.abs(large - 8 * small).max() <= 8 * EXACTLY * np.abs(small).max()

    @pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 0.0009765625, 1000.5])
    def test_constant_groups(self, text: str, side: Side, value: float) -> None:
        """Groups of equal values decode to that value, each head its own."""
        if not self.capabilities().constant_exact:
            skip("constant_exact=False")
        for dtype in ("float16", "float32"):
            bound = self.bind(text, side, dtype=dtype)
            heads = mx.arange(1, self.kv_heads + 1).reshape(1, -1, 1, 1)
            x = mx.broadcast_to(heads * value, (2, self.kv_heads, whole(bound, 40), self.dim()))
            x = x.astype(getattr(mx, dtype))
            assert_same(round_trip(bound, x), x.astype(mx.float32), f"{text}, {side}, constant {value}, {dtype}")

    def test_ragged_groups_are_filled_with_the_edge(self, text: str, side: Side) -> None:
        """Where a head size leaves a channel group ragged, no channel is worse for it.

        All values lie in [5, 6]: a group filled up with zeros would have six times the range of the others.
        """
        capabilities = self.capabilities()
        if not capabilities.constant_exact:
            skip("constant_exact=False", "the method has no groups with a range")
        sizes = [d for d in (80, 100, 120) if capabilities.head_dims is None or d in capabilities.head_dims]
        if not sizes:
            skip(f"head_dims={capabilities.head_dims}", "no size of 80, 100 or 120")
        for dim in sizes:
            bound = self.bind(text, side, dim=dim)
            shape = (1, self.kv_heads, whole(bound, 256), dim)
            x = mx.array(np.random.default_rng(14).uniform(5, 6, shape).astype(np.float32)).astype(mx.float16)
            got = floats(round_trip(bound, x))
            channels = ((got - floats(x)) ** 2).mean(axis=(0, 1, 2))
            worst, usual = channels.max(), np.median(channels)
            assert worst <= 3 * usual + 1e-12, (
                f"{text}, {side}, head size {dim}: channel {channels.argmax()} has {worst / usual:.1f} times the usual "
                "error; fill up ragged groups with the edge value, not with zeros"
            )

    def test_zero_vectors(self, text: str, side: Side) -> None:
        """Zeros decode to zeros, alone and among others; nothing divides by them."""
        bound = self.bind(text, side)
        n = whole(bound, 64)
        zeros = mx.zeros((1, self.kv_heads, n, self.dim()), mx.float16)
        assert np.abs(floats(round_trip(bound, zeros))).max() <= EXACTLY
        mixed = gaussian(zeros.shape, seed=15) * (mx.arange(n) % 3 > 0).reshape(1, 1, n, 1)
        assert np.isfinite(floats(round_trip(bound, mixed.astype(mx.float16)))).all()

    @pytest.mark.parametrize(
        ("dtype", "size"), [("float16", 60000.0), ("float16", 300.0), ("float16", 6e-8), ("bfloat16", 3e5)]
    )
    def test_extremes(self, text: str, side: Side, dtype: str, size: float) -> None:
        """Ranges and norms are taken in float32: nothing overflows, and the error stays the method's own.

        Constants that were learnt do not follow a range: there what comes back is no farther away than zeros are.
        """
        bound = self.bind(text, side, dtype=dtype)
        signs = np.random.default_rng(16).choice([-1.0, 1.0], (1, self.kv_heads, whole(bound, 64), self.dim()))
        x = mx.array(signs.astype(np.float32) * size).astype(getattr(mx, dtype))
        got, want = floats(round_trip(bound, x)), floats(x)
        assert np.isfinite(got).all(), f"{text}, {side}: values of +-{size} in {dtype} decode to Inf or NaN"
        usual = floats(round_trip(bound, mx.array(signs.astype(np.float32)).astype(getattr(mx, dtype))))
        limit = 2 * np.square(usual - signs).mean() + 1e-3
        if self.capabilities().needs_calibration:
            limit = 1 + 1e-3
        if size > 1:
            error = np.square(got - want).mean() / size**2
            assert error <= limit, f"{text}, {side}: error {error:.4f} at +-{size}, {limit / 2:.4f} at +-1, {dtype}"

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_nan_and_inf_stay(self, text: str, side: Side, value: float) -> None:
        """One number that is not finite changes its own block and head, and no other."""
        bound = self.bind(text, side)
        block = bound.layout.block
        n = whole(bound, 3 * block + 8)
        clean = gaussian((2, self.kv_heads, n, self.dim()), seed=17)
        for at in (0, n - 1):
            hit = np.array(clean)
            hit[1, -1, at, self.dim() // 2] = value
            self._only_the_block(bound, clean, mx.array(hit), at, f"{text}, {side}, {value} at token {at}")

    def _only_the_block(self, bound: BoundSide, clean: mx.array, hit: mx.array, at: int, what: str) -> None:
        n, block = clean.shape[2], bound.layout.block
        # Fields of the sequence come from the first block; what is in it may change them, but not spoil them.
        was, now = pack(bound, clean), pack(bound, hit)
        before, after = decode(bound, was, n), decode(bound, now, n)
        assert_same(after[:1], before[:1], f"{what}: another row")
        if self.kv_heads > 1:
            assert_same(after[:, :-1], before[:, :-1], f"{what}: another head")
        begin = at // block * block
        apart = [t for t in range(n) if not begin <= t < begin + block]
        if bound.layout.sequence and begin == 0:
            assert np.isfinite(floats(after)[:, :, apart]).all(), f"{what}: tokens of other blocks are not finite"
            return
        now_apart, was_apart = (mx.take(a, mx.array(apart), axis=2) for a in (after, before))
        assert_same(now_apart, was_apart, f"{what}: others")


def squared_error(bound: BoundSide, x: mx.array) -> float:
    """Relative squared error of a round trip."""
    want, got = floats(x), floats(round_trip(bound, x))
    return float(np.square(got - want).sum() / np.square(want).sum())
