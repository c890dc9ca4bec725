"""Long queries: decoded by one kernel a side, bit for bit what the hooks decode, within a bound of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.attention import prefill
from vq_core.attention import view as views
from vq_core.attention.choice import fit
from vq_core.attention.packed import attend
from vq_core.attention.prefill import decoded
from vq_core.cache.policy import LayerPolicy
from vq_core.kernels import backends
from vq_core.kernels.simulated import Simulated
from vq_core.testing import load_plugin, registered
from vq_core.testing.observe import assert_same

METHODS = Path(__file__).parent / "methods"


@pytest.fixture(autouse=True, scope="module")
def methods() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("identity", "centred", "picky"):
            stack.enter_context(registered(load_plugin(METHODS / f"{name}.py"), name))
        yield


def random(seed: int, *shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def filled(lengths: tuple[int, ...], D: int, dtype: mx.Dtype, **options: object) -> PackedKVCache:
    caches = []
    for seed, n in enumerate(lengths):
        cache = PackedKVCache(residual=20, kernels="simulator", attention="kernel", **options)  # type: ignore[arg-type]
        cache.update_and_fetch(random(seed, 1, 2, n, D, dtype=dtype), random(seed + 50, 1, 2, n, D, dtype=dtype))
        caches.append(cache)
    return caches[0] if len(caches) == 1 else PackedKVCache.join(caches)


@pytest.mark.parametrize(
    ("keys", "values", "lengths", "D", "dtype", "sinks"),
    [
        ("kivi:bits=2", "kivi:bits=4", (300,), 64, mx.float16, 0),
        ("kivi:bits=3", "kivi:bits=8", (300,), 128, mx.bfloat16, 1),
        ("kivi:bits=2", "kivi:bits=2", (300, 200, 77), 80, mx.float32, 3),
        ("identity", "centred", (150, 290), 96, mx.bfloat16, 0),
        ("centred", "picky", (200,), 128, mx.float16, 2),
    ],
)
def test_both_sides_are_what_the_hooks_decode(
    keys: str, values: str, lengths: tuple[int, ...], D: int, dtype: mx.Dtype, sinks: int
) -> None:
    cache = filled(lengths, D, dtype, keys=keys, values=values, sink_tokens=sinks)
    view = cache._view()
    found = fit(view)
    assert found.dense is not None
    for side, got in zip((view.keys, view.values), decoded(view, found, mx.zeros(1)), strict=True):
        assert_same(got, views.dense(view, side), side.bound.ctx.side)


@pytest.mark.parametrize(("bits", "D", "dtype", "sinks"), [(2, 96, mx.bfloat16, 0), (4, 64, mx.float16, 2)])
def test_a_device_form_is_decoded_too(bits: int, D: int, dtype: mx.Dtype, sinks: int) -> None:
    """Whole runs of channels, written 16 bytes at a time."""
    policy = LayerPolicy.make(method=f"kivi:bits={bits}", residual=20, kernels="simulator", sink_tokens=sinks)
    cache = PackedKVCache.from_policy(policy, device_form=True)
    for seed, n in enumerate((150, 75)):
        cache.update_and_fetch(random(seed, 1, 2, n, D, dtype=dtype), random(seed + 50, 1, 2, n, D, dtype=dtype))
    view = cache._view()
    found = fit(view)
    assert found.dense is not None and view.keys.bound.held is not None
    assert all("gather_run" in kernel.body for kernel in found.dense)
    anywhere = attrs.evolve(found, backend=None)
    for seed in (None, 1, 2):  # 1: an array that begins anywhere
        with simulated(Simulated(seed)) if seed else nullcontext():
            made = decoded(view, anywhere if seed else found, mx.zeros(1))
        for side, got in zip((view.keys, view.values), made, strict=True):
            assert_same(got, views.dense(view, side), f"{side.bound.ctx.side}, {seed}")


@contextmanager
def simulated(runner: Simulated) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "choose", lambda backend: runner)
        yield


@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
def test_attention_is_that_of_the_dense_cache(mask: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = filled((300,), 64, mx.float16, method="kivi:bits=2"), random(9, 1, 6, 40, 64)
    ran: list[int] = []
    monkeypatch.setattr("vq_core.attention.packed.attend_scratch", _watched(ran))
    given: mx.array | str | None = mask
    if mask == "bool":
        given = (random(3, 1, 1, 40, 300) > 0) | (mx.arange(300) == 299)
    elif mask == "additive":
        given = random(3, 1, 6, 40, 300)
    got = cache.attend(q, scale=0.125, mask=given)
    want = attend(cache._view(), q, scale=0.125, mask=given, tier="reference")
    a, b = (np.array(x.astype(mx.float32)) for x in (got, want))
    assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)
    assert ran[-1] == 1 and len(ran) <= 2, "the call, and before the first one the kernels' trial"
    assert cache.report().attention.endswith("; prefill by decoding to a scratch")


def _watched(ran: list[int]) -> object:
    def call(*args: object) -> mx.array:
        ran.append(1)
        return prefill.attend_scratch(*args)  # type: ignore[arg-type]

    return call


def test_beyond_the_bound_tiles_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = filled((300,), 64, mx.float16, method="kivi:bits=2"), random(9, 1, 6, 40, 64)
    view = cache._view()
    want = np.array(cache.attend(q, scale=0.125, mask="causal").astype(mx.float32))
    monkeypatch.setattr(prefill, "SCRATCH", 2 * 300 * 2 * 64 * 2 - 1)
    mask = prefill.Mask(None, True, 40, 300)
    assert prefill.why_tiles(view, fit(view), mask, None) == (
        "153600 bytes of decoded tokens; at most 153599 are held at once"
    )
    got = np.array(cache.attend(q, scale=0.125, mask="causal").astype(mx.float32))
    assert np.abs(got - want).max() < 2e-3
    assert "basis of its own" in fit(filled((200,), 64, mx.float16, method="example")._view()).dense_why
    two = filled((300, 200), 64, mx.float16, method="kivi:bits=2")._view()
    assert prefill.why_tiles(two, fit(two), mask, None).startswith("rows of unequal length")


def test_the_device_is_started_and_a_transformation_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(mx, "async_eval", lambda *a, real=mx.async_eval: started.append(a) or real(*a))
    x = mx.ones((4,)) * 2
    prefill.begin(x)
    assert len(started) == 1 and x.tolist() == [2, 2, 2, 2]

    def f(y: mx.array) -> mx.array:
        prefill.begin(y * 3)
        return y * 3

    assert mx.compile(f)(mx.ones((2,))).tolist() == [3, 3]
    assert mx.grad(lambda y: f(y).sum())(mx.ones((2,))).tolist() == [3, 3]

    def broken(*arrays: mx.array) -> None:
        raise ValueError("of another kind")

    monkeypatch.setattr(mx, "async_eval", broken)
    with pytest.raises(ValueError, match="of another kind"):
        prefill.begin(x)
