"""Caches and constants made on one thread and used on others. A lazy MLX array belongs to the thread that made it."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import vq_core
from vq_core import PackedKVCache
from vq_core.api import Field, Layout, MethodFacts, PrepareContext, hookimpl
from vq_core.cache.tagged import reading_of
from vq_core.plugins import binding, registry
from vq_core.testing import load_plugin, registered
from vq_core.testing.observe import assert_same, gaussian, stored

from .models import build, prompt

SKETCH = load_plugin(Path(__file__).parent.parent / "methods" / "sign_sketch.py")
PATIENCE = 120
"""Seconds after which threads that do not end are stuck in each other."""


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(PATIENCE)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What calls give that are begun at one moment, each on a thread of its own."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait(PATIENCE)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(PATIENCE) for f in [pool.submit(run, call) for call in calls]]


def tokens(model: Any, ids: mx.array, steps: int = 40, caches: Any = None) -> list[int]:
    return [t for t, _ in generate_step(ids, model, max_tokens=steps, prompt_cache=caches, prefill_step_size=32)]


# ---- caches


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
@pytest.mark.parametrize("residual", [0, 8])
def test_compressed_here_generated_there(method: str, residual: int, compress: Any) -> None:
    model = build("llama")
    handle = compress(model, method, residual=residual)
    want = tokens(model, prompt(50))
    caches = handle.make_cache()
    assert elsewhere(lambda: tokens(model, prompt(50), caches=caches)) == want
    assert handle.report(caches).packed


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
@pytest.mark.parametrize("residual", [0, 8])
def test_a_cache_goes_from_thread_to_thread(method: str, residual: int, compress: Any) -> None:
    """Steps that pack and steps that do not, trims in between: each on another thread than the one before."""
    model = build("llama")
    handle = compress(model, method, residual=residual)
    ids = prompt(200)

    def turns(run: Callable[[Callable[[], Any]], Any]) -> list[list[int]]:
        caches, begin, found = handle.make_cache(), 0, []
        for n, back in ((31, 0), (1, 0), (1, 3), (40, 0), (33, 50), (1, 1), (60, 7)):
            piece = ids[begin : begin + n]
            mx.eval(piece)
            found.append(run(lambda piece=piece: tokens(model, piece, 1 + len(piece) % 5, caches)))  # type: ignore[misc]
            begin += n
            run(lambda back=back: trim_prompt_cache(caches, back))  # type: ignore[misc]
        return found

    assert turns(elsewhere) == turns(lambda call: call())


def test_speculation_on_a_worker(compress: Any) -> None:
    model, draft = build("llama"), build("llama", seed=3)
    want = tokens(model, prompt(50), 60)
    compress(model, residual=0)
    compress(draft, residual=0)
    caches = [*make_prompt_cache(model), *make_prompt_cache(draft)]

    def run(ids: mx.array, steps: int) -> list[int]:
        found = speculative_generate_step(ids, model, draft, num_draft_tokens=4, max_tokens=steps, prompt_cache=caches)
        return [int(t) for t, _, _ in found]

    first = elsewhere(lambda: run(prompt(50), 30))
    assert first + elsewhere(lambda: run(mx.array(first[-1:]), 30)) == want


@pytest.mark.parametrize("residual", [0, 8])
@pytest.mark.parametrize("count", [31, 32, 33, 64])
def test_nothing_lazy_is_left_behind_an_attention(count: int, residual: int) -> None:
    """A step whose attention is evaluated, then a trim, then another thread; no state is read in between."""
    cache = PackedKVCache(method="kivi:bits=4", residual=residual)
    x, q = gaussian((1, 2, count + 1, 64), "float32", 1), gaussian((1, 2, 1, 64), "float32", 2)
    mx.eval(x, q)
    for piece in (x[:, :, :count], x[:, :, count:]):
        reading = reading_of(*cache.update_and_fetch(piece, piece))
        assert reading is not None
        mx.eval(reading.attend(q, scale=0.1))
    there = elsewhere(lambda: np.array(cache.attend(q, scale=0.1)))
    np.testing.assert_array_equal(np.array(cache.attend(q, scale=0.1)), there)
    cache.trim(3)
    assert elsewhere(lambda: mx.isfinite(cache.attend(q, scale=0.1)).all().item())


# ---- binding


@attrs.frozen
class NoSettings:
    """None."""


class Turned:
    """A state that can be called, in slots: constants are where a method's author puts them."""

    __slots__ = ("by", "more")

    def __init__(self, by: mx.array, more: mx.array):
        self.by, self.more = by, more

    def __call__(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) + self.by - self.more


class Hidden:
    """Constants in a callable with slots, in a partial function and in a closure, none of them evaluated."""

    @hookimpl
    def vq_method(self) -> MethodFacts:
        return MethodFacts("hidden", "constants in odd places", NoSettings)

    @hookimpl
    def vq_prepare(self, ctx: PrepareContext) -> Any:
        a, b, c = (mx.arange(ctx.head_dim, dtype=mx.float32) * n for n in (1, 2, 3))

        def back(x: mx.array) -> mx.array:
            return x - c

        return {"turn": Turned(a, b), "more": functools.partial(mx.add, b), "back": back, "dim": ctx.head_dim}

    @hookimpl
    def vq_layout(self, state: Any) -> Layout:
        return Layout(1, (Field("x", "float32", (128, state["dim"]), codes=True),))

    @hookimpl
    def vq_encode(self, state: Any, x: mx.array) -> mx.array:
        return state["turn"](state["more"](x))  # type: ignore[no-any-return]

    @hookimpl
    def vq_pack(self, codes: Any) -> Any:
        return {"x": codes}

    @hookimpl
    def vq_decode(self, state: Any, packed: Any) -> mx.array:
        return state["back"](packed["x"])  # type: ignore[no-any-return]


def test_constants_are_evaluated_wherever_they_are() -> None:
    """Prepared on one thread, used on another."""
    with registered(Hidden()):
        ctx = PrepareContext(side="keys", kv_heads=2, key_dim=24, value_dim=24, dtype="float32")
        bound = elsewhere(lambda: binding.bind("hidden", ctx))
        assert len(bound.constants) == 3
        x, at = gaussian((1, 2, 4, 24), "float32"), mx.arange(4, dtype=mx.int32)[None]
        for where in (elsewhere, lambda call: call()):
            where(lambda: mx.eval(bound.decode(bound.pack(x, at, {}), at)))


@pytest.mark.parametrize("method", ["sign_sketch", "kivi:bits=4"])
def test_sixteen_threads_bind_at_once(method: str, monkeypatch: Any) -> None:
    """Half of them the same head size: one instance and one set of constants for each, codes as on one thread."""
    monkeypatch.setattr(binding, "_bound", {})
    prepared: list[int] = []
    dims = [64, 32, 64, 48, 64, 80, 64, 96, 64, 16, 64, 112, 64, 128, 64, 24]
    x = {dim: gaussian((1, 2, 64, dim), "float32", dim) for dim in set(dims)}
    mx.eval(list(x.values()))

    def call(dim: int) -> tuple[Any, Any]:
        cache = PackedKVCache(keys=method, values="kivi:bits=2", residual=0)
        cache.update_and_fetch(x[dim], x[dim])
        assert cache._history is not None
        return cache._history.bound["keys"], stored(cache)

    with registered(SKETCH):
        original = binding._bind

        def counted(*args: Any) -> Any:
            prepared.append(1)
            return original(*args)

        monkeypatch.setattr(binding, "_bind", counted)
        found = together([functools.partial(call, dim) for dim in dims])
        assert len(prepared) == 2 * len(set(dims))
        for dim in set(dims):
            instances = {id(bound) for (bound, _), d in zip(found, dims, strict=True) if d == dim}
            assert len(instances) == 1
        monkeypatch.setattr(binding, "_bound", {})
        for (_, codes), dim in zip(found, dims, strict=True):
            assert_same(codes, call(dim)[1], f"head size {dim}")


DEADLOCK = """
import threading
from vq_core.api import PrepareContext
from vq_core.plugins import binding, registry
from vq_core.plugins.choice import choose

ctx = PrepareContext(side="keys", kv_heads=2, key_dim=40, value_dim=40, dtype="float32")
inside, load_all, chosen = threading.Event(), registry.load_all, choose("kivi:bits=4", "keys")


def loading():
    inside.set()
    other.join(0.5)
    elsewhere = threading.Thread(target=binding._lock.acquire, daemon=True)  # what a plugin's import may wait for
    elsewhere.start()
    elsewhere.join(20)
    assert not elsewhere.is_alive(), "stuck"
    return load_all()


registry.load_all = loading
other = threading.Thread(target=lambda: (inside.wait(), binding.bind(chosen, ctx)), daemon=True)
other.start()
registry.list_methods(refresh=True)
"""


def test_a_plugin_that_binds_while_it_loads_blocks_nobody() -> None:
    """One thread loads methods, which takes the registry, and binds in it; another binds, which asks the registry."""
    run = subprocess.run([sys.executable, "-c", DEADLOCK], capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr


def test_sixteen_threads_list_methods(monkeypatch: Any) -> None:
    """The first to come loads them, once; all see the same."""
    monkeypatch.setattr(registry, "_records", None)
    loads: list[int] = []
    load_all = registry.load_all

    def counted() -> Any:
        loads.append(1)
        return load_all()

    monkeypatch.setattr(registry, "load_all", counted)
    found = together([lambda: [r.label for r in vq_core.list_methods()]] * 16)
    assert len(loads) == 1 and all(labels == found[0] for labels in found)
    assert any("kivi" in label for label in found[0])


# ---- compress while others generate


@pytest.mark.parametrize("name", ["llama", "afm7"])
def test_compress_and_undo_while_another_thread_generates(name: str) -> None:
    """A generation goes on, on its own caches and on packed ones, whatever is compressed and undone meanwhile."""
    model, other = build(name), build("llama", seed=5)
    want = tokens(model, prompt(40), 60)
    stop = threading.Event()

    def generating() -> list[list[int]]:
        found = []
        for _ in range(4):
            handle = vq_core.compress(model, method="identity", residual=8)
            caches = handle.make_cache()
            running = generate_step(prompt(40), model, max_tokens=60, prompt_cache=caches, prefill_step_size=32)
            found.append([next(running)[0] for _ in range(5)])
            handle.undo()  # the caches outlive the handle
            found[-1] += [t for t, _ in running]
        stop.set()
        return found

    def switching() -> int:
        count = 0
        while not stop.is_set():
            vq_core.compress(other, method="identity", residual=8).undo()
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        switched = pool.submit(switching)
        try:
            found = pool.submit(generating).result(PATIENCE)
        finally:
            stop.set()
        assert switched.result(PATIENCE) > 3
    assert all(run == want for run in found)


def test_a_step_is_attended_that_began_before_the_hook_was_removed(compress: Any) -> None:
    """The last handle is undone by another thread between a layer's update and its attention."""
    model = build("llama")
    want = tokens(model, prompt(40), 20)
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    update = PackedKVCache.update_and_fetch
    seen = []

    def undone(cache: PackedKVCache, keys: mx.array, values: mx.array) -> Any:
        tags = update(cache, keys, values)
        if cache is caches[1] and len(seen) == 5:
            elsewhere(handle.undo)
        seen.append(cache)
        return tags

    PackedKVCache.update_and_fetch = undone  # type: ignore[method-assign]
    try:
        assert tokens(model, prompt(40), 20, caches) == want
    finally:
        PackedKVCache.update_and_fetch = update  # type: ignore[method-assign]
    assert np.array(mx.fast.scaled_dot_product_attention(*[mx.ones((1, 1, 1, 4))] * 3, scale=1.0)).sum() == 4
