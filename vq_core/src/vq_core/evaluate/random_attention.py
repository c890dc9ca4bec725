"""Attention of random caches by one tier against dense float32 attention on the decoded cache.

    python -m vq_core.evaluate.random_attention --count 200 --seed 1 --json FILE

draws shapes, query ratios, masks, dtypes, lengths, rows and pairs of methods, over a bounded number of compiled
variants, each of which costs seconds on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.attention.packed import attend
from vq_core.cache.policy import Attention, Kernels
from vq_core.cache.shell import PackedKVCache

PAIRS = (
    ("kivi:bits=2", "kivi:bits=2"), ("kivi:bits=4", "kivi:bits=4"), ("kivi:bits=3", "kivi:bits=8"),
    ("kivi:bits=4,group_size=64", "kivi:bits=2"),
)  # fmt: skip
MATRIX_PAIRS = (
    ("kivi:bits=2", "kivi:bits=2"), ("kivi:bits=4", "kivi:bits=4"), ("kivi:bits=2", "kivi:bits=4"),
    ("kivi:bits=8", "kivi:bits=2"),
)  # fmt: skip
"""What tensor cores serve: sizes and masks are theirs too."""
MATRIX_SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
SIZES = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))
RATIOS = (1, 2, 3, 4, 6, 7, 8, 16)
BOUND = {"float16": 2e-3, "bfloat16": 3e-3, "float32": 1e-5}
"""Relative L2 error that is right: of float32 sums, rounded to the dtype."""


@attrs.frozen
class Variant:
    """What is compiled, but for the query rows that a threadgroup takes."""

    keys: str
    values: str
    key_dim: int
    value_dim: int
    dtype: str


@attrs.frozen
class Configuration:
    """One random case.

    Attributes:
        variant: What is compiled.
        lengths: Tokens of each row.
        heads: KV heads.
        ratio: Query heads of a KV head.
        queries: L.
        mask: ``""``, ``"causal"``, ``"bool"``, ``"additive"`` or ``"padding"`` (one a row, over all heads).
        residual, sink_tokens: The policy's.
        logits: Whether the model has attention sinks.
        seed: Of its numbers.
    """

    variant: Variant
    lengths: tuple[int, ...]
    heads: int
    ratio: int
    queries: int
    mask: str
    residual: int
    sink_tokens: int
    logits: bool
    seed: int


def variants(
    rng: np.random.Generator, count: int, pairs: Sequence[tuple[str, str]] = PAIRS, matrix: bool = False
) -> list[Variant]:
    """So many, every pair and every size among them where there are enough."""
    sizes = MATRIX_SIZES if matrix else SIZES
    found: dict[Variant, None] = {}
    for n in range(count):
        keys, values = pairs[n % len(pairs)]
        D, Dv = sizes[(n // len(pairs) + n) % len(sizes)]
        dtype = ("float16", "bfloat16", "float16", "float16" if matrix else "float32")[int(rng.integers(4))]
        found[Variant(keys, values, D, Dv, dtype)] = None
    return list(found)


def configurations(
    seed: int, count: int, among: Sequence[Variant], longest: int = 1500, matrix: bool = False
) -> Iterator[Configuration]:
    """Random cases, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    for n in range(count):
        rows = int(rng.choice([1, 1, 1, 2, 3]))
        even = bool(rng.integers(2))
        residual, sinks = int(rng.choice([0, 1, 16, 40, 130])), int(rng.choice([0, 0, 3]))
        # As many short ones as long ones, and something packed in each.
        tokens = [int(math.exp(rng.uniform(0, math.log(longest)))) + residual + sinks + 80 for _ in range(rows)]
        lengths = tuple([tokens[0]] * rows if even else tokens)
        queries = int(rng.choice([1, 1, 1, 2, 3, 5, 8, 16]))
        masks = ["", "causal", "causal", *([] if matrix else ["bool", "additive", "padding"])]
        yield Configuration(
            among[n % len(among)], lengths, int(rng.choice([1, 2, 3])), int(rng.choice(RATIOS)), queries,
            str(rng.choice(masks)), residual, sinks, bool(rng.integers(2)), int(rng.integers(2**31)),
        )  # fmt: skip


def error(case: Configuration, attention: Attention = "auto", kernels: Kernels = "auto") -> float:
    """Relative L2 error of one case; infinite where the reference is finite and the result is not."""
    v, rng = case.variant, np.random.default_rng(case.seed)
    dtype = getattr(mx, v.dtype)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32))

    caches = []
    for n in case.lengths:
        cache = PackedKVCache(
            keys=v.keys, values=v.values, residual=case.residual, sink_tokens=case.sink_tokens, attention=attention,
            kernels=kernels,
        )  # fmt: skip
        outliers = 1 + 4 * (mx.arange(v.key_dim) % 17 == 3)
        fed = max(n - case.queries, 0)
        for size in (fed, n - fed):
            if size:
                k = (random(1, case.heads, size, v.key_dim) * outliers).astype(dtype)
                cache.update_and_fetch(k, random(1, case.heads, size, v.value_dim).astype(dtype))
        caches.append(cache)
    cache = caches[0] if len(caches) == 1 else PackedKVCache.join(caches)
    B, T, heads = len(case.lengths), max(case.lengths), case.heads * case.ratio
    L = min(case.queries, min(case.lengths))
    q = random(B, heads, L, v.key_dim).astype(dtype)
    mask: mx.array | str | None = None
    if case.mask == "causal":
        mask = "causal"
    elif case.mask == "bool":
        mask = mx.array(rng.random((B, 1, L, T)) < 0.7) | (mx.arange(T) == T - 1)
    elif case.mask == "additive":
        mask = random(1, heads, L, T)
    elif case.mask == "padding":
        mask = mx.arange(T)[None, None, None] >= mx.array(rng.integers(0, min(case.lengths), B))[:, None, None, None]
    sinks = random(heads) if case.logits else None
    scale = v.key_dim**-0.5
    got = cache.attend(q, scale=scale, mask=mask, sinks=sinks)
    want = attend(cache._view(), q.astype(mx.float32), scale=scale, mask=mask, sinks=sinks, tier="reference")
    a, b = np.array(got.astype(mx.float32)), np.array(want.astype(mx.float32))
    found = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
    return found if math.isfinite(found) else math.inf


def run(
    seed: int, count: int, compiled: int, attention: Attention, kernels: Kernels,
    pairs: Sequence[tuple[str, str]] = PAIRS, longest: int = 1500,
) -> dict[str, Any]:  # fmt: skip
    """Errors of ``count`` cases by dtype, and every case beyond its bound."""
    matrix = attention == "matrix"
    among = variants(np.random.default_rng(seed), compiled, pairs, matrix)
    worst: dict[str, float] = {}
    failed = []
    for case in configurations(seed, count, among, longest, matrix):
        found = error(case, attention, kernels)
        dtype = case.variant.dtype
        worst[dtype] = max(worst.get(dtype, 0.0), found)
        if not found <= BOUND[dtype]:
            failed.append({"error": found} | attrs.asdict(case))
    return {
        "seed": seed, "configurations": count, "variants": len(among), "pairs": [list(p) for p in pairs],
        "bound": BOUND, "worst": worst, "failed": failed,
    }  # fmt: skip


def main() -> None:
    """Command line."""
    from vq_core.bench.environment import environment
    from vq_core.testing.registering import load_plugin, registered

    parser = argparse.ArgumentParser(prog="python -m vq_core.evaluate.random_attention")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", type=int, default=24)
    parser.add_argument("--attention", default="kernel")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--plugin", type=Path, action="append", default=[], help="a method in a file")
    parser.add_argument("--pair", action="append", default=[], help="KEYS+VALUES")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        for path in given.plugin:
            stack.enter_context(registered(load_plugin(path), path.stem))
        default = MATRIX_PAIRS if given.attention == "matrix" else PAIRS
        pairs = [tuple(p.split("+", 1)) for p in given.pair] or list(default)
        found = run(given.seed, given.count, given.variants, given.attention, given.kernels, pairs, given.longest)
    found = {"environment": environment(), "attention": given.attention} | found
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{given.count} configurations, worst {found['worst']}, {len(found['failed'])} beyond the bound")
    for case in found["failed"][:5]:
        print(case)


if __name__ == "__main__":
    main()
