"""A method for the core's own tests, so that they need no distribution but vq-core.

``echo`` stores what it is given, in float32, together with the positions it was told and the first token of each
sequence.  Its decoding adds the difference between the positions of reading and of writing, so a shell that
mistakes a place, a row or a page changes the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl, setting
from vq_core.plugins import binding, registry
from vq_core.plugins.records import MethodRecord


@attrs.frozen
class EchoSettings:
    block: int = setting(8, minimum=1)
    page: int = setting(32, minimum=1)


def echo_hooks() -> dict[str, Callable[..., Any]]:
    def prepare(ctx: Any, settings: EchoSettings) -> Any:
        return SimpleNamespace(dim=ctx.head_dim, settings=settings)

    def layout(state: Any) -> Layout:
        page = state.settings.page
        fields = (
            Field("x", "float32", (page, state.dim), codes=True),
            Field("at", "int32", (1, page), axis=1),
            Field("first", "float32", (state.dim,), axis=None),
        )
        return Layout(state.settings.block, fields, page)

    def pack(codes: Any) -> Any:
        x, positions = codes
        at = mx.broadcast_to(positions[:, None, None], (*x.shape[:2], 1, x.shape[2]))
        return {"x": x.astype(mx.float32), "at": at}

    def decode(packed: Any, positions: mx.array) -> mx.array:
        moved = (packed["at"] - positions[:, None, None]).swapaxes(-1, -2)
        return packed["x"] + 1000 * moved + 0 * packed["first"][:, :, None]

    return {
        "vq_prepare": prepare,
        "vq_layout": layout,
        "vq_start": lambda x: {"first": x[:, :, 0].astype(mx.float32)},
        "vq_encode": lambda x, positions: (x, positions),
        "vq_pack": pack,
        "vq_decode": decode,
    }


def record(name: str, hooks: dict[str, Callable[..., Any]], settings: type, **capabilities: Any) -> MethodRecord:
    """The record of a usable method made of plain functions."""
    sides = capabilities.pop("sides", ("keys", "values"))
    facts = MethodFacts(name, "for tests", settings, sides, capabilities=Capabilities(**capabilities))
    plugin = SimpleNamespace(**{hook: hookimpl(function) for hook, function in hooks.items()})
    return MethodRecord(name, "ok", "tests", "0", "", 1, facts=facts, plugin=plugin)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``install(name, hooks, settings, **capabilities)`` makes a method usable for one test."""
    records: list[MethodRecord] = []
    monkeypatch.setattr(registry, "_records", records)
    monkeypatch.setattr(binding, "_bound", {})
    monkeypatch.setattr(binding, "_latched", {})

    def run(
        name: str, hooks: dict[str, Callable[..., Any]], settings: type = EchoSettings, **capabilities: Any
    ) -> None:
        records.append(record(name, hooks, settings, **capabilities))

    yield run


@pytest.fixture
def echo(install: Callable[..., None]) -> Callable[..., PackedKVCache]:
    """``echo(block=8, page=32, residual=16, ...)``: a cache that holds its tokens exactly, through the store."""
    install("echo", echo_hooks())
    install("fixed", echo_hooks(), trimmable=False)
    install("keys_only", echo_hooks(), sides=("keys",))

    def make(block: int = 8, page: int = 32, name: str = "echo", residual: int = 16, **rest: Any) -> PackedKVCache:
        return PackedKVCache(method=f"{name}:block={block},page={page}", residual=residual, **rest)

    return make


@pytest.fixture
def hooks() -> Callable[[], dict[str, Callable[..., Any]]]:
    """``hooks()``: the hooks of echo, to be changed and installed."""
    return echo_hooks


@pytest.fixture
def normal() -> Callable[..., mx.array]:
    """``normal(B, H, S, D, dtype=...)``: N(0, 1), other numbers at each call, the same in each run."""
    rng = np.random.default_rng(11)

    def make(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)

    return make


@pytest.fixture
def snapshot() -> Callable[[PackedKVCache], list[Any]]:
    """``snapshot(cache)``: everything a cache holds, as bytes and text; equal for equal caches."""

    def take(cache: PackedKVCache) -> list[Any]:
        text, *arrays = cache.state
        return [text, cache.offset, *(bytes(memoryview(mx.contiguous(a).view(mx.uint8))) for a in arrays if a.size)]

    return take
