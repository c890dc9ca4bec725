"""What one decode step of one layer costs the host: Python's and MLX's time to build the graph, nothing evaluated.

The parts of a step are timed apart and the arms take turns step by step, so that a busy machine slows all alike.
A step builds several layers in a row, as a model does: one layer between two evaluations would find the processor's
caches cold, which costs several times as much. What a step releases (tags, the arrays before) it releases inside the
clock, as a model does.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import attrs
import mlx.core as mx

from vq_core.bench.clock import orders
from vq_core.cache import tagged
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.errors import SettingsError

PARTS = ("update", "read", "release", "offset")


class Cache(Protocol):
    """What is measured: mlx-lm's plain cache, or ours."""

    state: Any

    @property
    def offset(self) -> Any:
        """Tokens so far."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append and return all."""


@attrs.frozen
class Shape:
    """One layer; the defaults are those of an 8 billion parameter model of the Llama family."""

    rows: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "float32"


@attrs.frozen
class Micros:
    """Microseconds of one part of a step, a layer."""

    median: float
    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: list[float]) -> Micros:
        """From a sample each step."""
        found = (statistics.median(seconds), statistics.fmean(seconds), min(seconds), max(seconds))
        return cls(*(round(1e6 * t, 2) for t in found))


def host_parts(
    plain: Callable[[], Cache], hook: Any, *, tokens: int = 4096, residual: int = 128, method: str = "kivi:bits=4",
    shape: Shape | None = None, layers: int = 8, steps: int = 200, warm: int = 20, strict: Any = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, Micros]]:  # fmt: skip
    """Time the parts of a step: of a plain cache, of ours, and of ours with attention left out.

    Args:
        plain: Makes the cache that ours is compared with.
        hook: What replaces the attention function: ``install()`` and ``uninstall()``.
        tokens: Packed tokens at the start.
        residual: The exact window.
        method: Of both sides.
        shape: A layer.
        layers: Built in a row; figures are those of one.
        steps: Steps measured; those that pack are among them.
        warm: Steps before.
        strict: As for :meth:`~vq_core.cache.shell.PackedKVCache.from_policy`.
        clock: For tests.

    Returns:
        For each arm its parts: ``update``; ``read``, building the attention's node or nodes; ``release``; ``offset``,
        asked twice; ``all``. Of ``"vq, no attention"`` the function that attends returns the queries at once.

    Raises:
        SettingsError: no step, no layer or no token to measure with.
    """
    if min(tokens, layers, steps) < 1 or warm < 0:
        raise SettingsError(f"tokens={tokens}, layers={layers}, steps={steps}, warm={warm}: 1 or more, warm 0 or more")
    layer = shape or Shape()
    policy = LayerPolicy.make(method=method, residual=residual)

    def ours() -> Cache:
        return PackedKVCache.from_policy(policy, strict=strict)

    makers = {"plain": plain, "plain again": plain, "vq": ours, "vq, no attention": ours}
    caches = {name: [make() for _ in range(layers)] for name, make in makers.items()}
    x, _ = _tokens(layer, tokens + residual)
    for cache in itertools.chain(*caches.values()):
        cache.update_and_fetch(x, x)
        mx.eval(cache.state)
    took: dict[str, dict[str, list[float]]] = {name: {part: [] for part in (*PARTS, "all")} for name in caches}
    names, turns = list(caches), orders(len(caches))
    collecting = gc.isenabled()
    hook.install()
    gc.disable()
    try:
        for number in range(-warm, steps):
            for name in (names[arm] for arm in turns[number % len(turns)]):
                new, q = _tokens(layer, 1)
                with _without_attention() if name.endswith("no attention") else nullcontext():
                    found = _step(caches[name], new, q, layer.dim**-0.5, clock)
                mx.eval([cache.state for cache in caches[name]])
                if number >= 0:
                    for part, seconds in zip(PARTS, found, strict=True):
                        took[name][part].append(seconds / layers)
                    took[name]["all"].append(sum(found) / layers)
    finally:
        hook.uninstall()
        if collecting:
            gc.enable()
    return {name: {part: Micros.of(seconds) for part, seconds in parts.items()} for name, parts in took.items()}


def _step(caches: list[Cache], new: mx.array, q: mx.array, scale: float, clock: Callable[[], float]) -> list[float]:
    """Seconds of each part, all layers together; the results are dropped, not evaluated."""
    spent, results = [0.0] * len(PARTS), []
    for cache in caches:
        t0 = clock()
        keys, values = cache.update_and_fetch(new, new)
        t1 = clock()
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=None)
        t2 = clock()
        del keys, values
        t3 = clock()
        cache.offset, cache.offset  # noqa: B018  a model asks for it twice, to turn queries and keys
        t4 = clock()
        results.append(out)
        for part, seconds in enumerate((t1 - t0, t2 - t1, t3 - t2, t4 - t3)):
            spent[part] += seconds
    return spent


def _tokens(layer: Shape, count: int) -> tuple[mx.array, mx.array]:
    kind = getattr(mx, layer.dtype)
    new = mx.random.normal((layer.rows, layer.kv_heads, count, layer.dim)).astype(kind)
    q = mx.random.normal((layer.rows, layer.heads, 1, layer.dim)).astype(kind)
    mx.eval(new, q)
    return new, q


@contextmanager
def _without_attention() -> Iterator[None]:
    module: Any = tagged
    attend = module.attend
    module.attend = lambda view, queries, **rest: queries
    try:
        yield
    finally:
        module.attend = attend
