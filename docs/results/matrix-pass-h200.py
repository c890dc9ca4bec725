"""What was run on the H200: the matrix pass against float32 attention, and its time on the GPU's clock.

    python docs/results/matrix-pass-h200.py matrix-pass.json

Needs PyTorch for its profiler (CUPTI). Inputs rotate through a pool larger than the L2 cache, and each call's queries
depend on the one before, so that nothing overlaps.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import mlx.core as mx

from vq_core.bench.environment import environment
from vq_core.kernels import Kernel
from vq_core.kernels.skeleton.matrix import merged, scale_bits
from vq_kivi import method
from vq_kivi.kernels.device import to_device
from vq_kivi.kernels.matrix_cases import kernel_of
from vq_kivi.kernels.reference import state_of

HEADS, RATIO, DIM = 8, 4, 128
POOL = 2.4e8
"""Bytes of inputs that take turns."""
SM = 132


def sides(bits: int, rows: int, tokens: int) -> list[tuple[dict[str, mx.array], mx.array]]:
    """Device fields of the pages of keys and values, and what they decode to."""
    found = []
    for side in ("keys", "values"):
        state = state_of(side, bits, 32, DIM, "float16")  # type: ignore[arg-type]
        x = mx.random.normal((rows, HEADS, tokens, DIM))
        if side == "keys":
            x = x * mx.where(mx.arange(DIM) % 17 == 0, 4, 1)
        packed = method.vq_pack(state, method.vq_encode(state, x.astype(mx.float16)))
        pages = {}
        for name, a in to_device(state, packed).items():
            a = a.reshape(rows, HEADS, -1, 4, a.shape[-1]).transpose(2, 0, 1, 3, 4)
            pages[name] = mx.contiguous(a.reshape(-1, HEADS, 4, a.shape[-1]))
        found.append((pages, method.vq_decode(state, packed)))
    return found


def call(kernel: Kernel, q: mx.array, fields: list[mx.array], tokens: int, splits: int) -> tuple[mx.array, ...]:
    """One pass over whole pages."""
    rows = mx.array([[tokens, 0, 0, 0, 0, 0, 0, 0]] * q.shape[0], mx.int32)
    table = mx.zeros((q.shape[0], 8), mx.int32)
    return kernel(
        q, rows, *fields, table, table,
        scale_bits=scale_bits(DIM**-0.5), causal=0, splits=splits, exact_splits=0, folded=0, regular=1,
    )  # fmt: skip


def error(bits: int, rows: int, tokens: int, splits: int) -> float:
    """Relative L2 against float32 attention on the decoded codes."""
    (keys, k), (values, v) = sides(bits, rows, tokens)
    q = mx.random.normal((rows, HEADS * RATIO, 1, DIM)).astype(mx.float16)
    got = merged(*call(kernel_of(bits, bits, DIM, DIM), q, [*keys.values(), *values.values()], tokens, splits))[0]
    scores = q.astype(mx.float32).reshape(rows, HEADS, RATIO, DIM) @ k.swapaxes(-1, -2) * DIM**-0.5
    want = mx.softmax(scores, axis=-1) @ v
    return float(mx.linalg.norm(got - want) / mx.linalg.norm(want))  # type: ignore[arg-type]


def microseconds(bits: int, rows: int, tokens: int, splits: int, calls: int = 16) -> tuple[float, float]:
    """Median of a pass, and bytes of codes, scales and zeros a second in TB."""
    from torch.profiler import ProfilerActivity, profile

    kernel = kernel_of(bits, bits, DIM, DIM)
    pages = tokens // 128 * rows
    size = 2 * pages * HEADS * 4 * DIM * (4 * bits + 4)
    pool: list[list[mx.array]] = []
    for _ in range(max(2, min(16, math.ceil(POOL / size)))):
        made: list[Any] = []
        for _ in range(2):
            made.append(mx.random.randint(0, 2**31 - 1, (pages, HEADS, 4, DIM * bits)).astype(mx.uint32) * 2 + 1)
            made += [mx.random.uniform(low, 0.3, (pages, HEADS, 4, DIM)).astype(mx.float16) for low in (0.05, -0.3)]
        mx.eval(made)
        pool.append(made)
    first = mx.random.normal((rows, HEADS * RATIO, 1, DIM)).astype(mx.float16)
    for fields in pool:
        mx.eval(call(kernel, first, fields, tokens, splits))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        q = first
        for i in range(calls):
            _, tops = call(kernel, q, pool[i % len(pool)], tokens, splits)
            q = first + (tops[0, 0, 0, 0, 1] * 0).astype(mx.float16)
        mx.eval(q)
    times = sorted(event.device_time for event in seen.events() if "matrix_" in event.name and event.device_time > 0)
    median = float(times[len(times) // 2])
    return median, size / median / 1e6


if __name__ == "__main__":
    record: dict[str, Any] = {"environment": environment(), "error": [], "pass": []}
    for bits in (2, 4):
        for rows, tokens in ((1, 4096), (2, 4096), (1, 32768), (1, 131072)):
            found = error(bits, rows, tokens, 33)
            record["error"].append({"bits": bits, "rows": rows, "tokens": tokens, "relative_l2": found})
        for rows, tokens, resident in ((1, 4096, 1), (1, 32768, 2), (1, 131072, 4 - bits // 2), (8, 16384, 2)):
            splits = max(1, min(SM * resident // (HEADS * rows), tokens // 256))
            us, rate = microseconds(bits, rows, tokens, splits)
            record["pass"].append(
                {"bits": bits, "rows": rows, "tokens": tokens, "splits": splits, "us": us, "tb_per_s": rate}
            )
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
