"""A method's snippets: fused attention in the simulator, against dense attention over the decoded cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest

from vq_core.api.facts import SIDES, Side
from vq_core.attention import view as views
from vq_core.cache.shell import PackedKVCache
from vq_core.kernels import backends
from vq_core.kernels.simulated import Simulated
from vq_core.plugins import binding, partner
from vq_core.plugins.reach import state_arrays
from vq_core.testing.attention import dense_attention, make_mask
from vq_core.testing.kit import Kit, feed, skip
from vq_core.testing.observe import assert_same, floats, gaussian

Case = tuple[int, int, str, bool]
CASES: tuple[tuple[Case, ...], ...] = (
    ((1, 1, "none", True), (4, 1, "additive", False), (7, 2, "causal", True), (4, 3, "per head", False)),
    ((3, 1, "bool", False), (3, 2, "causal", True), (3, 2, "per head", False)),
    ((4, 1, "none", True), (7, 1, "additive", True), (4, 3, "bool", False), (1, 16, "causal", True)),
)
"""(query heads a KV head, queries, mask, the model's sinks); few numbers of rows for a shape: each is compiled."""
GROWN = 150
"""Tokens of the longer row."""


class SnippetConformance(Kit):
    """Skipped for methods without snippets only.

    A side that the method cannot hold, or has no snippet for, is its partner's.

    Attributes:
        fused_shapes: Head size and dtype of the kernels that are run. Each takes a second or two to compile, so by
            default they are three; a size that the method does not accept gives way to one that it does.
    """

    fused_shapes: ClassVar[Sequence[tuple[int, str]]] = ((64, "float16"), (80, "bfloat16"), (128, "float32"))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Spread the argument ``fused_shape`` over what the class asks for."""
        super().pytest_generate_tests(metafunc)
        if "fused_shape" in metafunc.fixturenames:
            metafunc.parametrize("fused_shape", range(len(self.fused_shapes)), ids=lambda i: self._named(i))

    def _named(self, number: int) -> str:
        return "-".join(map(str, self.fused_shapes[number]))

    def shape_of(self, number: int) -> tuple[int, str]:
        """Head size and dtype of one of the shapes."""
        size, dtype = self.fused_shapes[number]
        accepted = self.capabilities().head_dims
        return (size if accepted is None or size in accepted else accepted[number % len(accepted)]), dtype

    @pytest.mark.parametrize("device", [False, True], ids=["in order", "device form"])
    def test_what_a_snippet_holds_is_reported(self, side: Side, device: bool) -> None:
        """Its tables are constants of the method, counted once each: also those that the state holds as well."""
        bound = binding.bind(self.method, self.context(side), kernels="simulator", device=device)
        matrix = None if bound.held is None else bound.held.matrix
        tables = state_arrays((bound.snippet, matrix))
        told = [id(a) for a in bound.constants]
        assert len(set(told)) == len(told) and {id(a) for a in tables} <= set(told)

    def fused_sides(self, dim: int, dtype: str) -> dict[str, str]:
        """What each side holds: the method where it has a snippet, its partner else; skips where it has none."""
        ours = [side for side in self.facts().sides if self._has_snippet(self.method, side, dim, dtype)]
        if not ours:
            pytest.skip(f"vq_snippet: {self.facts().name} has none for head size {dim}: fused attention is not for it")
        given: dict[str, str] = {}
        for side in SIDES:
            named = getattr(self, side)
            with_one = named is not None and self._has_snippet(named, side, dim, dtype)
            given[side] = self.method if side in ours else named if with_one else partner.NAME
        return given

    def _has_snippet(self, text: str, side: Side, dim: int, dtype: str) -> bool:
        return binding.bind(text, self.context(side, dim=dim, dtype=dtype), kernels="off").snippet is not None

    def fused(self, dim: int, dtype: str, **options: Any) -> PackedKVCache:
        """An empty cache whose attention is fused, in the simulator."""
        given: dict[str, Any] = {**self.fused_sides(dim, dtype), "residual": 24, **options}
        return PackedKVCache(kernels="simulator", attention="kernel", **given)

    def _tokens(self, rows: int, n: int, dim: int, dtype: str, seed: int) -> tuple[mx.array, mx.array]:
        shape = (rows, self.kv_heads, n, dim)
        return gaussian(shape, dtype, seed), gaussian(shape, dtype, seed + 1)

    def _uneven(self, dim: int, dtype: str, **options: Any) -> PackedKVCache:
        singles = []
        for row, n in enumerate((GROWN, 70)):
            singles.append(self.fused(dim, dtype, **options))
            feed(singles[-1], self._tokens(1, n, dim, dtype, 121 + 2 * row), [n - 1, 1])
        return PackedKVCache.join(singles)

    # ---- tests

    def test_fused_attention_is_dense_attention(self, fused_shape: int) -> None:
        """Window, first tokens, all packed, uneven rows; grouped heads, one query and some, masks, learned sinks."""
        dim, dtype = self.shape_of(fused_shape)
        alone = self.fused(dim, dtype, residual=0)
        feed(alone, self._tokens(1, GROWN, dim, dtype, 125), [GROWN])
        even = self.fused(dim, dtype, sink_tokens=3)
        feed(even, self._tokens(2, GROWN, dim, dtype, 127), [GROWN])
        caches = {"all packed": alone, "window and first tokens": even, "uneven rows": self._uneven(dim, dtype)}
        caches["uneven rows with first tokens"] = self._uneven(dim, dtype, sink_tokens=3)
        for what, cache in caches.items():
            assert cache.report().packed >= 64, f"{what}: hardly anything is packed"
            for case in CASES[fused_shape % len(CASES)]:
                self.check_fused(cache, dtype, case, what)

    def check_fused(self, cache: PackedKVCache, dtype: str, case: Case, what: str = "") -> None:
        """One fused attention against float64 attention over the decoded keys and values, not rounded."""
        repeats, length, mask, with_sinks = case
        view = cache._view()
        keys, values = (views.dense(view, side, mx.float32) for side in (view.keys, view.values))
        shape = (view.rows, self.kv_heads * repeats, length, keys.shape[3])
        queries, scale = gaussian(shape, dtype, seed=131), keys.shape[3] ** -0.5
        made = make_mask(mask, shape, view.length, getattr(mx, dtype))
        sinks = gaussian(shape[1:2], dtype, seed=132) if with_sinks else None
        got = cache.attend(queries, scale=scale, mask=made, sinks=sinks)
        assert got.shape == (*shape[:3], values.shape[3]) and got.dtype == queries.dtype
        columns = np.arange(view.length)
        seen = columns >= view.length - np.array(view.lengths)[:, None, None, None]  # rows lie at the right
        if mask == "causal":
            seen = seen & (columns <= np.arange(view.length - length, view.length)[:, None])
        elif made is not None and made.dtype == mx.bool_:
            seen = seen & np.array(made)
        added = np.where(seen, floats(made) if mask == "additive" else 0.0, -np.inf)
        want = dense_attention(queries, keys, values, scale, mx.array(added.astype(np.float32)), sinks)
        error = np.sqrt(np.square(floats(got) - want).mean() / np.square(want).mean())
        limit = self.tolerance[dtype]
        said = f"{shape[1]}:{self.kv_heads} heads of {shape[3]}, {length} queries, mask {mask}, {dtype}"
        said += ", sinks" if with_sinks else ""
        assert error <= limit, (
            f"fused attention, {what}, {said}: relative error {error:.2e}, at most {limit:.0e}; the kernel is "
            f"{cache.report().attention}"
        )

    def test_fused_attention_is_reported(self) -> None:
        """The report names the kernel, and the bound methods' snippets in it."""
        dim, dtype = self.shape_of(0)
        cache = self.fused(dim, dtype)
        feed(cache, self._tokens(1, GROWN, dim, dtype, 141), [GROWN])
        view = cache._view()
        labels = [side.bound.snippet.label for side in (view.keys, view.values) if side.bound.snippet is not None]
        said = cache.report().attention
        assert said.startswith(f"kernel (simulator): attend_{labels[0]}_{labels[1]}_"), said

    def test_fused_attention_repeats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same bits again, and with lanes and threadgroups in other orders."""
        dim, dtype = self.shape_of(0)
        cache = self._uneven(dim, dtype)
        queries = gaussian((2, 4 * self.kv_heads, 1, dim), dtype, seed=143)
        found = []
        for seed in (0, 0, 1, 2):
            monkeypatch.setattr(backends, "_runner", lambda backend, seed=seed: Simulated(seed))
            found.append(cache.attend(queries, scale=dim**-0.5))
        for number, other in enumerate(found[1:]):
            assert_same(other, found[0], f"fused attention, {('again', 'seed 1', 'seed 2')[number]}")

    def test_fused_nan_stays_in_its_row(self) -> None:
        """A NaN in one sequence, packed or exact, leaves the others' bits."""
        dim, dtype = self.shape_of(0)
        queries, found = gaussian((2, 4 * self.kv_heads, 1, dim), dtype, seed=147), []
        for spoilt in (False, True):
            cache, tokens = self.fused(dim, dtype), [floats(x) for x in self._tokens(2, GROWN, dim, dtype, 145)]
            for x in tokens:
                x[1, :, 5:9] = x[1, :, -2:] = np.nan if spoilt else 1.0
            feed(cache, tuple(mx.array(x.astype(np.float32)).astype(getattr(mx, dtype)) for x in tokens), [GROWN])  # type: ignore[arg-type]
            found.append(cache.attend(queries, scale=dim**-0.5))
        assert np.isnan(floats(found[1])[1]).any(), "a NaN of a token that is attended must not vanish"
        assert_same(found[1][0], found[0][0], "fused attention, the row beside one with NaN")

    def test_fused_attention_reads_no_trimmed_tokens(self) -> None:
        """What is left in a page of tokens that were taken back does not get through, be it NaN."""
        if not self.capabilities().trimmable:
            skip("trimmable=False")
        dim, dtype = self.shape_of(0)
        clean, used = self.fused(dim, dtype, residual=0), self.fused(dim, dtype, residual=0)
        tokens = self._tokens(1, 2 * GROWN, dim, dtype, 149)
        clean.prepare_for(kv_heads=self.kv_heads, key_dim=dim, value_dim=dim, dtype=getattr(mx, dtype))
        assert clean._history is not None
        block = clean._history.block
        n, more = -(-65 // block) * block, -(-10 // block) * block
        feed(clean, tokens, [n])
        feed(used, tokens, [n])
        feed(used, (tokens[0] * float("nan"), tokens[1] * float("nan")), [more])
        assert used.trim(more) == more and used.report().packed == clean.report().packed == n
        queries = gaussian((1, 4 * self.kv_heads, 1, dim), dtype, seed=151)
        got, want = (cache.attend(queries, scale=dim**-0.5) for cache in (used, clean))
        assert_same(got, want, "fused attention after tokens of NaN were trimmed")
