"""Methods that are wrong in one way each: the kit, or the binding, says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache, PluginError
from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl
from vq_core.testing import MethodConformance, load_plugin, registered

METHODS = Path(__file__).parent.parent / "methods"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
KEPT: list[mx.array] = []


@attrs.frozen
class Settings:
    """None."""


@attrs.define(eq=False)
class State:
    """What the broken methods need; mutable, which is already a bad idea."""

    ctx: Any
    kept: list[mx.array] = attrs.field(factory=list)


GROUP = 32


def groups(x: mx.array, mode: str = "edge") -> mx.array:
    x = x.astype(mx.float32)
    rest = -x.shape[-1] % GROUP
    return (mx.pad(x, [(0, 0)] * 3 + [(0, rest)], mode=mode) if rest else x).reshape(*x.shape[:3], -1, GROUP)


def quantized(x: mx.array, low: mx.array, high: mx.array) -> dict[str, mx.array]:
    step = (high - low) / 15
    codes = mx.clip(mx.round((x - low) / mx.where(step > 0, step, 1)), 0, 15)
    return {"codes": codes.astype(mx.uint8).flatten(-2), "step": step.squeeze(-1), "low": low.squeeze(-1)}


def ranges(x: mx.array) -> tuple[mx.array, mx.array]:
    return x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)


def encode(x: mx.array) -> dict[str, mx.array]:
    x = groups(x)
    return quantized(x, *ranges(x))


def made(capabilities: Capabilities = Capabilities(constant_exact=True), **changes: Any) -> SimpleNamespace:  # noqa: B008
    """A correct method of 4 bits in groups of 32 channels, with some of its hooks replaced."""

    def vq_method():
        return MethodFacts("broken", "wrong in one way", Settings, capabilities=capabilities)

    def vq_prepare(ctx):
        return State(ctx)

    def vq_layout(state):
        width = -(-state.ctx.head_dim // GROUP)
        codes = Field("codes", "uint8", (128, width * GROUP), codes=True)
        return Layout(1, (codes, *(Field(name, "float32", (128, width)) for name in ("step", "low"))))

    def vq_encode(x):
        return encode(x)

    def vq_pack(codes):
        return codes

    def vq_decode(state, packed):
        codes = packed["codes"].reshape(*packed["codes"].shape[:3], -1, GROUP)
        x = codes.astype(mx.float32) * packed["step"][..., None] + packed["low"][..., None]
        return x.flatten(-2)[..., : state.ctx.head_dim]

    hooks = {f.__name__: f for f in (vq_method, vq_prepare, vq_layout, vq_encode, vq_pack, vq_decode)}
    return SimpleNamespace(**{name: hookimpl(hook) for name, hook in (hooks | changes).items()})


def failure(plugin: Any, test: str, *args: Any) -> str:
    """Run one test of the kit over a plugin; returns what its assertion says."""
    kit = type("Broken", (MethodConformance,), {"method": "broken", "plugin": plugin})()
    with kit._registered(), pytest.raises(AssertionError) as caught:
        getattr(kit, test)(*args)
    return str(caught.value)


def binding_error(plugin: Any) -> str:
    with registered(plugin), pytest.raises(PluginError) as caught:
        x = mx.zeros((1, 2, 4, 64), mx.float16)
        cache = PackedKVCache(method="broken")
        cache.update_and_fetch(x, x)
    assert cache.empty() and cache.nbytes == 0
    return str(caught.value)


class TestTheMethodTheyAreMadeFrom(MethodConformance):
    """Unbroken, so that what fails below fails for its one change."""

    method = "broken"
    plugin = made()


# ---- bytes


def test_tokens_kept_in_the_state() -> None:
    def vq_encode(state, x):
        state.kept.append(x)
        return encode(x)

    assert "outside the layout" in failure(made(vq_encode=vq_encode), "test_memory_grows_by_nbytes")
    assert "state grew" in failure(made(vq_encode=vq_encode), "test_layout_tells_the_bytes", "broken", "keys")


def test_tokens_kept_in_a_global() -> None:
    def vq_encode(x):
        KEPT.append(x + 0)
        return encode(x)

    try:
        assert "outside the layout" in failure(made(vq_encode=vq_encode), "test_memory_grows_by_nbytes")
    finally:
        KEPT.clear()


# ---- neighbours


def test_codes_depend_on_the_batch() -> None:
    def vq_encode(x):
        x = groups(x)
        low, high = ranges(x)
        low, high = low.min(axis=0, keepdims=True), high.max(axis=0, keepdims=True)
        return quantized(x, *(mx.broadcast_to(a, (*x.shape[:-1], 1)) for a in (low, high)))

    assert "row 0 of 4" in failure(made(vq_encode=vq_encode), "test_rows_and_heads_alone", "broken", "keys", 2)
    assert "row" in failure(made(vq_encode=vq_encode), "test_an_even_batch")


def test_codes_depend_on_other_heads() -> None:
    def vq_encode(x):
        x = groups(x)
        low, high = ranges(x)
        low, high = low.min(axis=1, keepdims=True), high.max(axis=1, keepdims=True)
        return quantized(x, *(mx.broadcast_to(a, (*x.shape[:-1], 1)) for a in (low, high)))

    assert "head 0" in failure(made(vq_encode=vq_encode), "test_rows_and_heads_alone", "broken", "values", 3)


def test_codes_depend_on_the_chunk() -> None:
    def vq_encode(x):
        x = groups(x)
        low, high = ranges(x)
        low, high = low.min(axis=2, keepdims=True), high.max(axis=2, keepdims=True)
        return quantized(x, *(mx.broadcast_to(a, (*x.shape[:-1], 1)) for a in (low, high)))

    plugin = made(vq_encode=vq_encode)
    assert "tokens at a time" in failure(plugin, "test_blocks_one_by_one", "broken", "keys")
    assert "chunks, stored" in failure(plugin, "test_chunkings")
    assert "others" in failure(plugin, "test_nan_and_inf_stay", "broken", "keys", float("inf"))


# ---- numbers


def test_ragged_groups_filled_with_zeros() -> None:
    def vq_encode(x):
        x = groups(x, mode="constant")
        return quantized(x, *ranges(x))

    said = failure(made(vq_encode=vq_encode), "test_ragged_groups_are_filled_with_the_edge", "broken", "values")
    assert "edge value" in said and "head size 80" in said


def test_range_in_half_precision() -> None:
    def vq_encode(x):
        low, high = ranges(groups(x).astype(x.dtype))
        step = (high - low).astype(mx.float32)  # overflows at +-60000
        return quantized(groups(x), low.astype(mx.float32), low.astype(mx.float32) + step)

    said = failure(made(vq_encode=vq_encode), "test_extremes", "broken", "keys", "float16", 60000.0)
    assert "60000" in said


def test_division_by_an_empty_range() -> None:
    def vq_encode(x):
        x = groups(x)
        low, high = ranges(x)
        return quantized(x, low, high) | {"step": (high - low).squeeze(-1) / 15 + 1e-3}

    assert "constant 1.0" in failure(
        made(vq_encode=vq_encode, vq_decode=_decode_upwards), "test_constant_groups", "broken", "keys", 1.0
    )


def _decode_upwards(state, packed):
    codes = packed["codes"].reshape(*packed["codes"].shape[:3], -1, GROUP).astype(mx.float32) + 0.5
    x = codes * packed["step"][..., None] + packed["low"][..., None]
    return x.flatten(-2)[..., : state.ctx.head_dim]


def test_a_bound_that_does_not_hold() -> None:
    plugin = made(capabilities=Capabilities(gaussian_error=lambda settings, head_dim: 1e-6))
    assert "declared at most" in failure(plugin, "test_gaussian_error", "broken", "keys")


def test_exactness_that_does_not_hold() -> None:
    plugin = made(capabilities=Capabilities(exact=True))
    assert "declares exact" in failure(plugin, "test_round_trip", "broken", "keys", "float16")
    assert "exact method" in failure(plugin, "test_decoding_is_the_methods_own")


# ---- determinism


def test_another_result_each_time() -> None:
    def vq_encode(x):
        return encode(x + mx.array(np.random.default_rng().standard_normal(x.shape, np.float32)).astype(x.dtype))

    assert "bound again" in failure(made(vq_encode=vq_encode), "test_same_again", "broken", "keys")


def test_constants_from_mlxs_random_state() -> None:
    def vq_prepare(ctx):
        mx.eval(mx.random.normal((4,)))
        return State(ctx)

    said = failure(made(vq_prepare=vq_prepare), "test_global_random_state_is_untouched", "broken", "keys")
    assert "random state" in said


def test_constants_from_the_hash_seed(tmp_path: Path) -> None:
    source = (METHODS / "centred.py").read_text().replace('"centred"', '"broken"')
    seeded = source.replace("- sequence[", '- hash("seed") % 100003 / 1000 - sequence[')
    file = tmp_path / "broken_hash.py"
    file.write_text(seeded)
    assert seeded != source
    assert "two processes" in failure(load_plugin(file), "test_two_processes")


# ---- attention


class Keys:
    def __init__(self, state: State, change: Any):
        self.state, self.change = state, change

    def prepare_query(self, queries):
        return queries

    def scores(self, queries, tile):
        keys = made().vq_decode(self.state, self.change(tile))
        return queries.astype(mx.float32) @ keys.swapaxes(-1, -2)


def attending(change: Any) -> SimpleNamespace:
    def vq_attend(state, side):
        return Keys(state, change) if side == "keys" else None

    return made(vq_attend=vq_attend)


def test_attention_that_disagrees_with_decode() -> None:
    plugin = attending(lambda tile: {**tile, "step": tile["step"] * 1.1})
    assert "differs from vq_decode" in binding_error(plugin)
    with registered(plugin), pytest.warns(RuntimeWarning, match="failed its probe"):
        cache = PackedKVCache(method="broken", residual=0, fallback="warn")
        x = mx.ones((1, 2, 200, 64), mx.float16)
        cache.update_and_fetch(x, x)
    assert any("failed its probe" in line for line in cache.report().operations)


def test_attention_that_is_right_on_one_page_only() -> None:
    plugin = attending(lambda tile: {**tile, "low": mx.broadcast_to(tile["low"][:1], tile["low"].shape)})
    assert "relative error" in failure(plugin, "test_attention", 8, 2, "causal")


# ---- shapes and dtypes: refused when bound


def test_wrong_shape() -> None:
    said = binding_error(made(vq_pack=lambda codes: codes | {"low": codes["low"][..., :1]}))
    assert "'low'" in said and "(1, 2, 128, 2)" in said and "(1, 2, 128, 1)" in said


def test_wrong_dtype() -> None:
    said = binding_error(made(vq_pack=lambda codes: codes | {"step": codes["step"].astype(mx.float16)}))
    assert "'step'" in said and "float32" in said and "float16" in said


def test_missing_field() -> None:
    assert "'step'" in binding_error(made(vq_pack=lambda codes: {k: v for k, v in codes.items() if k != "step"}))


def test_decoding_in_half_precision() -> None:
    def vq_decode(state, packed):
        return made().vq_decode(state, packed).astype(mx.float16)

    assert "vq_decode must return" in binding_error(made(vq_decode=vq_decode))


def test_prepare_without_a_state() -> None:
    assert "vq_prepare returned None" in binding_error(made(vq_prepare=lambda ctx: None))


def test_a_crash_is_a_typed_error_that_names_the_hook() -> None:
    assert "vq_encode failed with ZeroDivisionError" in binding_error(made(vq_encode=lambda x: 1 // 0))


# ---- what a stranger sees


def test_a_strangers_run(tmp_path: Path) -> None:
    source = (METHODS / "centred.py").read_text().replace("vq_start(x):", "vq_start(x):\n    x = x[:1] + 0 * x")
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "test_mine.py").write_text(
        "from vq_core.testing import MethodConformance, load_plugin\n"
        "class TestMine(MethodConformance):\n"
        "    method = 'centred'\n"
        f"    plugin = load_plugin({str(tmp_path / 'mine.py')!r})\n"
    )
    run = subprocess.run(
        [*PYTEST, "-ra", "-k", "rows or blocks or constant", "test_mine.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAILED test_mine.py::TestMine::test_rows_and_heads_alone[centred-keys-1]" in run.stdout
    assert "mean: 64 of 64 differ" in run.stdout or "differ, the first at" in run.stdout
    assert "capability constant_exact=False" in run.stdout


def test_a_method_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from vq_core.testing import MethodConformance\nclass TestMine(MethodConformance):\n    method = 'no_such'\n"
    )
    run = subprocess.run(
        [*PYTEST, "test_mine.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode != 0 and "unknown method 'no_such'" in run.stdout
