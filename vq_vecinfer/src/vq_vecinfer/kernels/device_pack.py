"""The nearest centroids in the device's order of codes, in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.api import SIDES, Side
from vq_core.kernels import Backend, Call, Case, Kernel, Output
from vq_vecinfer.kernels import THREADS, bodies, cases, device
from vq_vecinfer.kernels.device import BITS, BLOCK, SUB
from vq_vecinfer.kernels.reference import DTYPES, quantized
from vq_vecinfer.method import VecInfer

MOST = 2**31
DIMS = (64, 128, 96, 32, 192, 256)


def _check(call: Call) -> str:
    x, book = call.shapes["x"], call.shapes["codebook"]
    if len(x) != 4 or x[3] % (4 * SUB) or not x[3] or x[2] % BLOCK:
        return f"x {x} must be (B, H, n, D), n a multiple of {BLOCK} and D one of {4 * SUB}"
    if len(book) != 3 or book[0] not in (1, x[3] // SUB) or book[1:] != (2**BITS, SUB):
        return f"codebook {book} must be (1 or {x[3] // SUB}, {2**BITS}, {SUB})"
    if call.shapes["halves"] != book[:2]:
        return f"halves {call.shapes['halves']} must be {book[:2]}"
    return f"x {x} has {MOST} elements or more; fewer are accepted" if math.prod(x) >= MOST else ""


def _cases(side: Side) -> Callable[[], Iterator[Case]]:
    def some() -> Iterator[Case]:
        rng = np.random.default_rng(len(side))
        for i in range(72):
            family, dim, dtype = cases.FAMILIES[i % 6], DIMS[(i + i // 6) % 6], DTYPES[i // 4 % 3]
            shape = (1, 1 + i % 2, BLOCK * (1 + i // 5 % 2), dim) if dim < 128 else (1 + i % 2, 1, BLOCK, dim)
            book = cases.codebook(rng, dim // SUB if i // 2 % 2 else 1, 2**BITS, SUB, family)
            x = cases.numbers(rng, shape, family, dtype, SUB, book)
            arrays = (x, mx.array(book), mx.array(cases.halves(book)))
            yield Case(arrays, {}, f"{family} {shape} {dtype}, {book.shape[0]} codebooks")

    return some


def _kernel(side: Side) -> Kernel:
    def equals(x: mx.array, codebook: mx.array, halves: mx.array, **rest: Any) -> tuple[mx.array]:
        return (device.ordered(side, x.shape[3], quantized(x, codebook, halves, bits=BITS)[0]),)

    return Kernel(
        name=f"vecinfer_device_pack_{side}",
        stands_for="device form",
        body=bodies.DEVICE[side],
        inputs={"x": "T", "codebook": "float32", "halves": "float32"},
        outputs={
            "codes": Output(
                "uint32", lambda call: (*call.shapes["x"][:2], call.shapes["x"][2] // BLOCK, call.shapes["x"][3])
            )
        },
        parameters={"T": DTYPES},
        threads=lambda call: (THREADS, 1, 1),
        threadgroups=lambda call: (max(1, math.prod(call.shapes["x"]) // SUB // THREADS), 1, 1),
        equals=equals,
        cases=_cases(side),
        check=_check,
        backends=("cuda", "simulator"),
    )


PACK = {side: _kernel(side) for side in SIDES}


def pack(
    state: VecInfer, x: mx.array, sequence: Mapping[str, mx.array], backend: Backend, **rest: Any
) -> dict[str, mx.array]:
    """What ``vq_encode``, ``vq_pack`` and ``to_device`` do: the transform of keys, then one launch."""
    y = x if state.inverse is None else state.stored(x, sequence)
    return {"codes": PACK[state.side](y, state.codebook, state.halves, backend=backend)[0]}
