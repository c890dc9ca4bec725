"""Queries into the keys' basis, (q * lambda) H, in one launch; a power of two besides, where centroids are scaled."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from vq_core.codec.hadamard import hadamard
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Call, Case, Kernel, Output
from vq_core.kernels.backends import device_backend
from vq_core.kernels.standard.hadamard import MOST, ROTATE, THREADS
from vq_vecinfer.method import HEAD_DIMS, VecInfer

GROUPS = THREADS // 32

BODY = f"""
// x (B, Hq, L, D), smooth (H, D) -> y (B, Hq, L, D) float32. A SIMD group turns one query.
VQ_SHARED(float, all, {GROUPS * MOST});
const uint D = x_shape[3], lane = thread_index_in_simdgroup, rows = uint(x_shape[0]) * uint(x_shape[1]) * L;
const uint n = threadgroup_position_in_grid.x * {GROUPS}u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u), own = simdgroup_index_in_threadgroup * {MOST}u;
const uint head = row / L % uint(x_shape[1]) / (uint(x_shape[1]) / uint(smooth_shape[0]));
for (uint i = lane; i < D; i += 32u) all[own + i] = vq_mul(float(x[row * D + i]), smooth[head * D + i]);
hadamard(all + own, D, lane, false);
for (uint i = lane; n < rows && i < D; i += 32u) y[row * D + i] = vq_mul(all[own + i], as_type<float>(factor));
"""


def turned(x: mx.array, smooth: mx.array, *, factor: int, **rest: object) -> tuple[mx.array]:
    """The reference."""
    heads, dim = smooth.shape
    y = x.astype(mx.float32).reshape(x.shape[0], heads, -1, dim) * smooth[:, None]
    return (hadamard(y).reshape(x.shape) * _number(factor),)


def _number(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def _check(call: Call) -> str:
    x, smooth = call.shapes["x"], call.shapes["smooth"]
    if len(x) != 4 or len(smooth) != 2 or smooth[1] != x[3] or not smooth[0] or x[1] % smooth[0] or min(x) < 1:
        return f"x {x} and smooth {smooth}: accepted are (B, any multiple of H, L, D) and (H, D)"
    if x[3] not in HEAD_DIMS or math.prod(x) >= 2**31:
        return f"x {x}: accepted are fewer than 2**31 numbers of head sizes {', '.join(map(str, HEAD_DIMS))}"
    return "" if call.numbers["L"] == x[2] else f"x {x} has {x[2]} queries a row, L is {call.numbers['L']}"


def _cases() -> Iterator[Case]:
    rng = np.random.default_rng(12)
    for i in range(78):
        D, heads, dtype = HEAD_DIMS[i % len(HEAD_DIMS)], 1 + i % 3, ("float32", "float16", "bfloat16")[i // 5 % 3]
        shape = (1 + i // 7 % 2, heads * (1, 4, 2, 7)[i // 3 % 4], (1, 3, 2)[i // 2 % 3], D)
        x = rng.standard_normal(shape)
        if i % 7 == 3:
            x = np.where(rng.random(shape) < 0.9, rng.choice([0.0, -0.0], shape), x)
        if i % 11 == 5:
            x[0, 0, 0, i % D] = (np.nan, np.inf, -np.inf)[i // 11 % 3]
        smooth = np.exp(2 * rng.standard_normal((heads, D))).astype(np.float32)
        numbers = {"L": shape[2], "factor": _bits(2.0 ** (0, -14, -20, 3)[i % 4])}
        made = mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
        yield Case((made, mx.array(smooth)), numbers, f"{shape}, {heads} KV heads, {dtype}, factor {i % 4}")


QUERY = Kernel(
    name="vecinfer_query",
    stands_for="prepare",
    body=BODY,
    header=ROTATE,
    inputs={"x": "T", "smooth": "float32"},
    outputs={"y": Output("float32", lambda call: call.shapes["x"])},
    parameters={"T": ("float32", "float16", "bfloat16")},
    numbers=("L", "factor"),
    threads=lambda call: (THREADS, 1, 1),
    threadgroups=lambda call: (-(-math.prod(call.shapes["x"][:3]) // GROUPS), 1, 1),
    equals=turned,
    cases=_cases,
    check=_check,
)


def prepare(state: VecInfer, queries: mx.array, factor: float = 1.0) -> mx.array:
    """Queries (B, H_q, L, D) in the keys' basis times a power of two: in one launch, on a CPU in plain operations.

    Raises:
        UnsupportedShapeError: a state of values.
    """
    if state.smooth is None:
        raise UnsupportedShapeError("queries are prepared for keys, not for values")
    backend = device_backend()
    if backend is None:
        return turned(queries, state.smooth, factor=_bits(factor))[0]
    found: mx.array = QUERY(queries, state.smooth, L=queries.shape[2], factor=_bits(factor), backend=backend)[0]
    return found
