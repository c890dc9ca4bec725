"""The nearest centroids in the device's order of codes, in one launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.api import SIDES, Side
from vq_core.kernels import Backend, Call, Case, Kernel, Output
from vq_core.kernels.skeleton.matrix import HEAD_DIMS
from vq_vecinfer.kernels import THREADS, bodies, cases, device
from vq_vecinfer.kernels.device import BITS, BLOCK, SUB
from vq_vecinfer.kernels.reference import DTYPES, quantized, quantized_keys
from vq_vecinfer.method import VecInfer

MOST = 2**31


def _check(side: Side, call: Call) -> str:
    x, book = call.shapes["x"], call.shapes["codebook"]
    if len(x) != 4 or x[3] not in HEAD_DIMS or x[2] % BLOCK:
        return f"x {x} must be (B, H, n, D), n a multiple of {BLOCK} and D one of {', '.join(map(str, HEAD_DIMS))}"
    if len(book) != 3 or book[0] not in (1, x[3] // SUB) or book[1:] != (2**BITS, SUB):
        return f"codebook {book} must be (1 or {x[3] // SUB}, {2**BITS}, {SUB})"
    if call.shapes["halves"] != book[:2]:
        return f"halves {call.shapes['halves']} must be {book[:2]}"
    if side == "keys" and call.shapes["inverse"] != (x[1], x[3]):
        return f"inverse {call.shapes['inverse']} must be {(x[1], x[3])}"
    return f"x {x} has {MOST} elements or more; fewer are accepted" if math.prod(x) >= MOST else ""


def _cases(side: Side) -> Iterator[Case]:
    rng = np.random.default_rng(len(side))
    for i in range(72):
        family, dim, dtype = cases.FAMILIES[i % 6], HEAD_DIMS[(i + i // 6) % 5], DTYPES[i // 4 % 3]
        shape = (1, 1 + i % 2, BLOCK * (1 + i // 5 % 2), dim) if dim < 128 else (1 + i % 2, 1 + i // 3 % 2, BLOCK, dim)
        book = cases.codebook(rng, dim // SUB if i // 2 % 2 else 1, 2**BITS, SUB, family)
        x = cases.numbers(rng, shape, family, dtype, SUB, book)
        inverse = 2.0 ** (rng.integers(-2, 3, shape[1::2]) if family == "ties" else rng.standard_normal(shape[1::2]))
        turning = [mx.array(inverse.astype(np.float32))] if side == "keys" else []
        arrays = (x, *turning, mx.array(book), mx.array(cases.halves(book)))
        yield Case(arrays, {}, f"{family} {shape} {dtype}, {book.shape[0]} codebooks")


def _keys(x: mx.array, inverse: mx.array, codebook: mx.array, halves: mx.array, **rest: Any) -> tuple[mx.array]:
    (codes,) = quantized_keys(x, inverse, inverse, codebook, halves, bits=BITS, centred=0)
    return (device.ordered("keys", x.shape[3], codes),)


def _values(x: mx.array, codebook: mx.array, halves: mx.array, **rest: Any) -> tuple[mx.array]:
    return (device.ordered("values", x.shape[3], quantized(x, codebook, halves, bits=BITS)[0]),)


def _groups(side: Side, call: Call) -> int:
    x = call.shapes["x"]
    if side == "values":
        return math.prod(x) // SUB // THREADS
    return -(-math.prod(x[:3]) // (THREADS * SUB // x[3]))


def _kernel(side: Side) -> Kernel:
    turning = {"inverse": "float32"} if side == "keys" else {}
    return Kernel(
        name=f"vecinfer_device_pack_{side}",
        stands_for="device form",
        body=bodies.DEVICE[side],
        header=bodies.HEADER if side == "keys" else "",
        inputs={"x": "T", **turning, "codebook": "float32", "halves": "float32"},
        outputs={
            "codes": Output(
                "uint32", lambda call: (*call.shapes["x"][:2], call.shapes["x"][2] // BLOCK, call.shapes["x"][3])
            )
        },
        parameters={"T": DTYPES},
        threads=lambda call: (THREADS, 1, 1),
        threadgroups=lambda call: (max(1, _groups(side, call)), 1, 1),
        equals=_keys if side == "keys" else _values,
        cases=partial(_cases, side),
        check=partial(_check, side),
        backends=("cuda", "simulator"),
    )


PACK = {side: _kernel(side) for side in SIDES}


def pack(
    state: VecInfer, x: mx.array, sequence: Mapping[str, mx.array], backend: Backend, **rest: Any
) -> dict[str, mx.array]:
    """What ``vq_encode``, ``vq_pack`` and ``to_device`` do, in one launch."""
    turning = () if state.inverse is None else (state.inverse,)
    return {"codes": PACK[state.side](x, *turning, state.codebook, state.halves, backend=backend)[0]}
