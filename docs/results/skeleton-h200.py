"""The portable skeleton on the GPU's clock: pass and merge beside MLX's fp16 attention. Needs torch for CUPTI.

It has not run on a GPU itself: skeleton-h200.json comes from a sweep around the same statements.
"""

import mlx.core as mx
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from vq_core import PackedKVCache
from vq_core.attention.packed import attend

CASES = {4096: (2, 4), 32768: (2, 4), 131072: (2, 4)}


def filled(bits, tokens):
    """A cache of random tokens."""
    cache = PackedKVCache(method=f"kivi:bits={bits}", residual=128, attention="kernel")
    for begin in range(0, tokens, 16_384):
        shape = (1, 8, min(16384, tokens - begin), 128)
        cache.update_and_fetch(*(mx.random.normal(shape).astype(mx.float16) for _ in "kv"))
        mx.eval(cache.state[1:])
    return cache


def gpu_time(call, q0, count=24):
    """Microseconds a call by kernel; calls are chained through q so that nothing overlaps."""

    def chained(times):
        q = q0
        for i in range(times):
            q = q0 + call(i, q) * mx.array(1e-3, mx.float16)
        mx.eval(q)

    chained(4)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        chained(count)
        torch.cuda.synchronize()
    return {e.key[:60]: round(e.device_time_total / count, 1) for e in found.key_averages() if "binary" not in e.key}


torch.cuda.init()
q = mx.random.normal((1, 32, 1, 128)).astype(mx.float16)
for tokens, widths in CASES.items():
    pool = max(2, min(6, (1 << 28) // (tokens * 2048)))
    kv = [tuple(mx.random.normal((1, 8, tokens, 128)).astype(mx.float16) for _ in "kv") for _ in range(pool)]
    mx.eval(kv)
    dense = lambda i, q, kv=kv: mx.fast.scaled_dot_product_attention(q, *kv[i % len(kv)], scale=128**-0.5)  # noqa: E731
    print(tokens, "fp16", gpu_time(dense, q), flush=True)
    for bits in widths:
        views = [filled(bits, tokens)._view() for _ in range(pool)]
        step = lambda i, q, v=views: attend(v[i % len(v)], q, scale=128**-0.5, tier="kernel")  # noqa: E731
        got, want = step(0, q), attend(views[0], q, scale=128**-0.5, tier="reference")
        a, b = (np.array(x.astype(mx.float32)) for x in (got, want))
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        print(tokens, bits, f"error {error:.1e}", gpu_time(step, q), flush=True)
