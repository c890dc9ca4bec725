"""Decode-step attention and the shell's host cost, against mlx-lm's own caches.

``python -m vq_core.hosts.mlx_lm.bench --json FILE`` measures on this device; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx_lm.models.base as stock
import mlx_lm.models.cache as native

from vq_core.bench.clock import POOL, compare, environment
from vq_core.bench.host import host_parts
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.hosts.mlx_lm import hook

HEADS, KV_HEADS, DIM = 32, 8, 128


def attention(
    tokens: int, bits: int, *, group_size: int = 32, rounds: int = 15, dtype: str = "float32", inner: int = 1
) -> dict[str, Any]:
    """One decode step's attention over a full cache: ours, mlx-lm's quantized cache, mlx-lm's plain cache."""
    kind = getattr(mx, dtype)
    keys, values = (mx.random.normal((1, KV_HEADS, tokens, DIM)).astype(kind) for _ in range(2))
    ours: Any = PackedKVCache(method=f"kivi:bits={bits},group_size={group_size}")
    make: Any = native
    theirs, plain = make.QuantizedKVCache(group_size, bits), make.KVCache()
    for cache in (ours, theirs, plain):
        cache.update_and_fetch(keys, values)
        mx.eval(cache.state)
    scale = DIM**-0.5
    pool = [mx.random.normal((1, HEADS, 1, DIM)).astype(kind) for _ in range(POOL)]
    mx.eval(pool)

    def of(cache: Any) -> Callable[[mx.array], mx.array]:
        # A product of its own: mlx-lm's quantized attention scales the queries it is given in place.
        def attend(q: mx.array) -> Any:
            keys, values = cache.keys_and_values()
            return stock.scaled_dot_product_attention(q * 1.0, keys, values, cache, scale, None)

        return attend

    arms: dict[str, Callable[[Any], Any]] = {
        "mlx-lm quantized": of(theirs),
        "vq": lambda q: ours.attend(q * 1.0, scale=scale),
        "mlx-lm plain": of(plain),
    }
    found = compare(arms, pool, rounds=rounds, inner=inner)
    facts = {"tokens": tokens, "bits": bits, "group_size": group_size, "dtype": dtype, "calls_per_evaluation": inner}
    return facts | found.as_dict()


def host_cost(tokens: int = 1024, steps: int = 300) -> dict[str, Any]:
    """Microseconds of building one layer's graph for one decode step, update and attention, nothing evaluated inside.

    The arms take turns step by step; the work of each step is evaluated outside the timed region.
    """
    hook.install()
    shape = (1, 2, tokens, 64)
    policy = LayerPolicy.make(method="kivi:bits=4")
    plain: Any = native.KVCache
    arms: dict[str, Any] = {
        "mlx-lm plain": plain(),
        "mlx-lm plain again": plain(),
        "mlx-lm quantized": native.QuantizedKVCache(32, 4),
        "vq strict": PackedKVCache.from_policy(policy, strict=True),
        "vq lazy dense side": PackedKVCache.from_policy(policy),
    }
    for cache in arms.values():
        x = mx.random.normal(shape)
        cache.update_and_fetch(x, x)
        mx.eval(cache.state)
    took: dict[str, list[float]] = {name: [] for name in arms}
    scale = 64**-0.5
    for _ in range(steps):
        for name, cache in arms.items():
            k, v, q = (mx.random.normal((1, h, 1, 64)) for h in (2, 2, 4))
            mx.eval(k, v, q)
            begin = time.perf_counter()
            keys, values = cache.update_and_fetch(k, v)
            out = stock.scaled_dot_product_attention(q, keys, values, cache, scale, None)
            took[name].append(time.perf_counter() - begin)
            mx.eval(out)
            del keys, values, out
    hook.uninstall()
    micro = {name: sorted(1e6 * t for t in times[20:]) for name, times in took.items()}
    base = statistics.median(micro["mlx-lm plain"])
    return {
        name: {
            "median_us": round(statistics.median(times), 2),
            "mean_us": round(statistics.fmean(times), 2),
            "min_us": round(times[0], 2),
            "max_us": round(times[-1], 2),
            "over_plain_us": round(statistics.median(times) - base, 2),
            "mean_over_plain_us": round(statistics.fmean(times) - statistics.fmean(micro["mlx-lm plain"]), 2),
        }
        for name, times in micro.items()
    }


def main() -> None:
    """Measure and print; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--inner", type=int, default=1, help="calls queued before one evaluation")
    options = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(), "attention": [], "host_cost": host_cost()}
    parts = host_parts(native.KVCache, hook, strict=hook.WhileInstalled())
    record["host_parts"] = {arm: {p: attrs.asdict(m) for p, m in found.items()} for arm, found in parts.items()}
    for arm, found in parts.items():
        print(f"host, a layer, {arm:16}", ", ".join(f"{part} {m.median:.1f} us" for part, m in found.items()))
    for name, row in record["host_cost"].items():
        print(f"host {name:20} {row['median_us']:8.1f} us, over plain {row['over_plain_us']:.1f}")
    for tokens in options.tokens:
        for bits in options.bits:
            row = attention(tokens, bits, rounds=options.rounds, dtype=options.dtype, inner=options.inner)
            record["attention"].append(row)
            for name in ("vq", "mlx-lm plain"):
                print(f"{tokens} tokens, {bits} bits: {name} against mlx-lm quantized: {row['arms'][name]['said']}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
