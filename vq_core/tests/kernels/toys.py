"""A kernel of a few lines to take apart: ``y = x * by`` with a run-time number, in three dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.kernels import Case, Kernel, Output

BODY = """
const uint i = thread_position_in_grid.x;
if (i < count) y[i] = T(vq_mul(float(x[i]), float(by)));
"""
DTYPES = ("float32", "float16", "bfloat16")


def reference(x: mx.array, *, by: int, **rest: Any) -> tuple[mx.array, ...]:
    return ((x.astype(mx.float32) * by).astype(x.dtype),)


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for i, shape in enumerate([(8,), (3, 5), (130,), (2, 2, 2, 33), (1,), (257,)] * 3):
        x = mx.array(rng.standard_normal(shape, np.float32)).astype(getattr(mx, DTYPES[i // 6]))
        yield Case((x,), {"count": x.size, "by": i}, f"{shape} {DTYPES[i // 6]}")


def times(**changes: Any) -> Kernel:
    """The kernel, with some of its declaration replaced."""
    declared: dict[str, Any] = {
        "name": "times",
        "body": BODY,
        "inputs": {"x": "T"},
        "outputs": {"y": Output("T", lambda call: call.shapes["x"])},
        "parameters": {"T": DTYPES},
        "numbers": ("count", "by"),
        "threads": lambda call: (64, 1, 1),
        "threadgroups": lambda call: (-(-math.prod(call.shapes["x"]) // 64), 1, 1),
        "equals": reference,
        "cases": cases,
    }
    return Kernel(**declared | changes)


def run(kernel: Kernel, x: mx.array, by: int = 2, **more: Any) -> mx.array:
    """In the simulator."""
    return kernel(x, count=x.size, by=by, backend="simulator", **more)[0]
