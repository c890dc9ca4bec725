"""Norm, projection, signs and the device's order of them in one launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.codec.projection import MOST
from vq_core.kernels import Backend, Call, Case, Kernel, Output
from vq_qjl.kernels import ELEMENTS, bodies, device
from vq_qjl.kernels.bodies import THREADS, TOKENS
from vq_qjl.kernels.cases import FAMILIES, PROJECTIONS, numbers, sketch_of
from vq_qjl.kernels.device import BLOCK, CHUNK
from vq_qjl.kernels.reference import encoded
from vq_qjl.method import Qjl


def _check(call: Call) -> str:
    x, columns = call.shapes["x"], call.shapes["columns"]
    if len(x) != 4 or len(columns) != 2 or columns[0] != x[3] or not 1 <= x[3] <= MOST or x[2] % BLOCK:
        return (
            f"x {x} and columns {columns}: accepted are (B, H, n, D) and (D, m), D at most {MOST}, blocks of {BLOCK} "
            "tokens"
        )
    if columns[1] % CHUNK or not columns[1]:
        return f"{columns[1]} signs are no whole runs of {CHUNK}"
    if max(math.prod(x), math.prod(x[:3]) * columns[1]) >= ELEMENTS:
        return f"x {x} with {columns[1]} signs is {ELEMENTS} numbers or more; fewer are accepted"
    return ""


def _blocks(call: Call, last: int) -> tuple[int, ...]:
    B, H, n, _ = call.shapes["x"]
    return (B, H, n // BLOCK, last)


def packed(x: mx.array, columns: mx.array, **rest: object) -> tuple[mx.array, ...]:
    """The reference: the method's signs and norms, ordered."""
    return tuple(device.ordered(*encoded(x, columns)).values())


def _cases() -> Iterator[Case]:
    rng = np.random.default_rng(8)
    for i in range(80):
        family, D, width = FAMILIES[i % 8], (64, 96, 128, 256, 192, 80)[i // 3 % 6], (128, 256)[i // 8 % 2]
        shape = (1 + i // 2 % 2, 1 + i % 3, BLOCK * (1 + i // 5 % 2), D)
        x, sketch = numbers(rng, shape, family, "float16"), sketch_of(width, D, PROJECTIONS[i // 16 % 2])
        yield Case((x, sketch.columns), {}, f"{family} {shape}, {width} signs")


PACK = Kernel(
    name="qjl_encode_device",
    stands_for="device form",
    body=bodies.ENCODE_DEVICE,
    header=bodies.HEADER,
    inputs={"x": "T", "columns": "float32"},
    outputs={
        "signs": Output("uint32", lambda call: _blocks(call, call.shapes["columns"][1])),
        "weight": Output("float16", lambda call: _blocks(call, BLOCK)),
    },
    parameters={"T": ("float16",)},
    threads=lambda call: (THREADS, 1, 1),
    threadgroups=lambda call: (math.prod(call.shapes["x"][:3]) // TOKENS, call.shapes["columns"][1] // CHUNK, 1),
    equals=packed,
    cases=_cases,
    check=_check,
    backends=("cuda", "simulator"),
)


def pack(
    state: Qjl, x: mx.array, sequence: Mapping[str, mx.array], backend: Backend, **rest: Any
) -> dict[str, mx.array]:
    """What ``vq_encode``, ``vq_pack`` and ``to_device`` do, in one launch."""
    found = PACK(x, state.sketch.columns, backend=backend)
    return dict(zip(("signs", "weight"), found, strict=True))
