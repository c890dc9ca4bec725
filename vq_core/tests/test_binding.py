"""Binding: which implementation runs, what is refused, and what a failing probe does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from pluggy import HookimplMarker

from vq_core import PackedKVCache
from vq_core.api import PluginError, PrepareContext, UnsupportedShapeError, hookimpl
from vq_core.plugins import binding, registry
from vq_core.plugins.binding import bind

CTX = PrepareContext(side="keys", kv_heads=2, key_dim=8, value_dim=8, dtype="float32")
Hooks = dict[str, Callable[..., Any]]


def operations(method: str = "toy") -> dict[str, Any]:
    return {operation.name: operation for operation in bind(method, CTX).operations}


def test_the_first_implementation_that_gives_a_result_is_bound(
    install: Callable[..., None], hooks: Callable[[], Hooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin may offer a kernel beside its reference; where the kernel declines, the report says so."""
    plain = hooks()["vq_decode"]
    asked = []

    def declining(packed: Any) -> None:
        asked.append(packed)

    install("toy", hooks())
    (record,) = registry._records  # type: ignore[misc]
    # Of several implementations pluggy asks the first-tried one first.
    record.plugin.fast = HookimplMarker("vq")(specname="vq_decode", tryfirst=True)(declining)
    decode = operations()["vq_decode"]
    assert asked and "declining" in decode.declined[0] and "declined" in decode.declined[0]
    x = mx.ones((1, 2, 8, 8))
    cache = PackedKVCache(method="toy", residual=0)
    cache.update_and_fetch(x, x)
    assert mx.array_equal(cache.decode()[0], x)
    assert any("declined" in line for line in cache.report().operations), cache.report().operations
    assert callable(plain)


def test_wrappers_are_refused_on_hooks_that_run_per_token(
    install: Callable[..., None], hooks: Callable[[], Hooks]
) -> None:
    install("toy", hooks())
    (record,) = registry._records  # type: ignore[misc]

    def around(packed: Any) -> Any:
        return (yield)

    record.plugin.around = hookimpl(specname="vq_decode", wrapper=True)(around)
    with pytest.raises(PluginError, match="is a wrapper"):
        bind("toy", CTX)


@pytest.mark.parametrize(
    ("hook", "result", "said"),
    [
        ("vq_prepare", None, "vq_prepare returned None"),
        ("vq_layout", 7, "vq_layout returned int, not a Layout"),
        ("vq_encode", None, "no implementation of vq_encode serves this layer"),
        (
            "vq_pack",
            {"x": mx.zeros((1, 2, 32, 8))},
            "field 'at': the layout promises .* int32, the method gave nothing",
        ),
        ("vq_decode", mx.zeros((1, 2, 3, 8)), r"vq_decode must return \(1, 2, 32, 8\) float32"),
        ("vq_decode", mx.zeros((1, 2, 32, 8), mx.float16), r"it gave .*float16"),
    ],
)
def test_what_breaks_the_contract_is_named(
    install: Callable[..., None], hooks: Callable[[], Hooks], hook: str, result: Any, said: str
) -> None:
    install("toy", hooks() | {hook: lambda: result})
    with pytest.raises(PluginError, match=said):
        bind("toy", CTX)


def test_what_a_method_raises_becomes_one_typed_error(install: Callable[..., None], hooks: Callable[[], Hooks]) -> None:
    def fails() -> None:
        raise ZeroDivisionError("by accident")

    install("toy", hooks() | {"vq_encode": fails})
    with pytest.raises(PluginError, match="'toy': vq_encode failed with ZeroDivisionError: by accident"):
        bind("toy", CTX)

    def refuses() -> None:
        raise UnsupportedShapeError("head size 8: accepted are 64 and 128")

    install("picky", hooks() | {"vq_prepare": refuses})
    with pytest.raises(UnsupportedShapeError, match="accepted are 64 and 128"):
        bind("picky", CTX)


class Wrong:
    """Attention that disagrees with decoding."""

    def prepare_query(self, queries: mx.array) -> mx.array:
        return queries

    def scores(self, queries: mx.array, tile: Any) -> mx.array:
        return queries @ tile["x"].swapaxes(-1, -2) * 1.01

    def accumulate(self, weights: mx.array, tile: Any) -> mx.array:
        return weights @ tile["x"] * 1.01

    def finish(self, sums: mx.array) -> mx.array:
        return sums


def test_attention_that_disagrees_raises_or_is_latched_off(
    install: Callable[..., None], hooks: Callable[[], Hooks]
) -> None:
    install("toy", hooks() | {"vq_attend": lambda: Wrong()})
    x = mx.random.normal((1, 2, 40, 8), key=mx.random.key(1))
    cache = PackedKVCache(method="toy", residual=0)
    with pytest.raises(PluginError, match=r"differs from vq_decode by 1\.00e-02"):
        cache.update_and_fetch(x, x)
    assert cache.empty() and cache.nbytes == 0
    cache = PackedKVCache(method="toy", residual=0, fallback="warn")
    with pytest.warns(RuntimeWarning, match="failed its probe") as seen:
        cache.update_and_fetch(x, x)
    assert 1 <= len(seen) <= 2  # once for each side's class of failure
    assert "decode a tile" in "".join(cache.report().operations)
    assert "failed its probe" in "".join(cache.report().operations)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once a process
        PackedKVCache(method="toy", residual=0, fallback="warn").update_and_fetch(x, x)


def test_constants_are_shared_and_not_copied(install: Callable[..., None], hooks: Callable[[], Hooks]) -> None:
    install("toy", hooks())
    assert bind("toy", CTX) is bind("toy", CTX)
    assert copy.deepcopy(bind("toy", CTX)) is bind("toy", CTX)
    assert len(binding._bound) == 1


def test_layers_share_constants_unless_the_method_asks(
    install: Callable[..., None], hooks: Callable[[], Hooks]
) -> None:
    seen: list[int | None] = []
    made = hooks()
    prepare = made["vq_prepare"]

    def telling(ctx: Any, settings: Any) -> Any:
        seen.append(ctx.layer)
        return prepare(ctx, settings)

    install("toy", made | {"vq_prepare": telling})
    policy = PackedKVCache(method="toy").policy
    for layer in range(3):
        cache = PackedKVCache.from_policy(policy, layer=layer)
        cache.prepare_for(kv_heads=2, key_dim=8, value_dim=8, dtype=mx.float32)
    assert seen == [None, None]  # keys and values, once each
