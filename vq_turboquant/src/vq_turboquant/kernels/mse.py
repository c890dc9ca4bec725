"""turboquant_mse's kernels: rotate, quantize and pack one vector a SIMD group, and back.

Each equals the plain functions of :mod:`vq_turboquant.mse` bit for bit, the dense rotation's too, whose sums are exact.
Bits, head size, lengths and the kind of scale are run-time numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from vq_core.codec.hadamard import SignHadamard, hadamard_sizes
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Backend, Call, Kernel, KernelOffer, Output
from vq_core.kernels.standard.hadamard import MOST as LONGEST
from vq_turboquant import mse
from vq_turboquant.kernels import mse_bodies as bodies
from vq_turboquant.kernels.mse_cases import packing_cases, unpacking_cases
from vq_turboquant.kernels.mse_reference import DTYPES, METADATA, STORED, packed, unpacked
from vq_turboquant.parts import Part

MOST = 2**31
"""Elements of one array: bodies count in 32 bits."""


def _check_size(call: Call, d: int, dense: bool) -> str:
    bits = call.numbers["bits"]
    if not 1 <= bits <= 4:
        return f"codes of {bits} bits: accepted are 1 to 4"
    if not 1 <= d <= LONGEST:
        return f"vectors of {d} numbers: accepted are 1 to {LONGEST}"
    if call.shapes["table"] != (32,):
        return f"table {call.shapes['table']} must be (32,)"
    if dense:
        found = call.shapes["matrix"]
        return "" if found == (d, d) else f"matrix {found} must be ({d}, {d})"
    try:
        hadamard_sizes(d)
    except UnsupportedShapeError as wrong:
        return str(wrong)
    signs = call.shapes["signs"]
    return "" if len(signs) == 2 and signs[1] == d else f"signs {signs} must be (rounds, {d})"


def _check_rows(call: Call, name: str) -> str:
    shape = call.shapes[name]
    if math.prod(shape[:-1]) != call.numbers["rows"]:
        return f"{name} {shape} holds {math.prod(shape[:-1])} vectors, rows is {call.numbers['rows']}"
    return f"{name} {shape} is too large; fewer than {MOST} elements are accepted" if math.prod(shape) >= MOST else ""


def _check_packing(dense: bool, call: Call) -> str:
    d, bits, words = call.shapes["channels"][0], call.numbers["bits"], call.numbers["words"]
    wanted = STORED[call.parameters["T"]]
    if call.parameters["M"] not in wanted:
        return f"scales of {call.parameters['T']} numbers are {wanted[0]}, not {call.parameters['M']}"
    if call.numbers["mode"] >= len(mse.MODES):
        return f"mode {call.numbers['mode']}: accepted are 0 to {len(mse.MODES) - 1}, for {', '.join(mse.MODES)}"
    if len(call.shapes["channels"]) != 1 or d > call.shapes["x"][-1]:
        return f"channels {call.shapes['channels']} must be some of x {call.shapes['x']}"
    wrong = _check_rows(call, "x") or _check_size(call, d, dense)
    if wrong or d * bits <= words * 32 < (d + 32) * bits:
        return wrong
    return f"{d} codes of {bits} bits do not take {words} words"


def _check_unpacking(dense: bool, call: Call) -> str:
    d, codes, scale = call.numbers["d"], call.shapes["codes"], call.shapes["scale"]
    if scale != (*codes[:-1], 1):
        return f"scale {scale} must be {(*codes[:-1], 1)}"
    wrong = _check_rows(call, "codes") or _check_size(call, d, dense)
    if wrong or d * call.numbers["bits"] <= codes[-1] * 32:
        return wrong
    return f"{codes[-1]} words hold no {d} codes of {call.numbers['bits']} bits"


def _grid(call: Call) -> tuple[int, int, int]:
    return (-(-call.numbers["rows"] // bodies.GROUPS), 1, 1)


def _threads(call: Call) -> tuple[int, int, int]:
    return (bodies.THREADS, 1, 1)


def _packer(dense: bool) -> Kernel:
    return Kernel(
        name=f"turboquant_mse_pack_{'haar' if dense else 'hadamard'}",
        stands_for="encode+pack",
        body=bodies.encode(dense),
        header=bodies.HEADERS[dense],
        inputs={
            "x": "T", "channels": "uint32", "table": "float32", **{"matrix" if dense else "signs": "float32"}
        },
        outputs={
            "codes": Output("uint32", lambda call: (*call.shapes["x"][:-1], call.numbers["words"])),
            "scale": Output("M", lambda call: (*call.shapes["x"][:-1], 1)),
        },
        parameters={"T": DTYPES, "M": METADATA},
        numbers=("rows", "bits", "words", "mode"),
        threads=_threads,
        threadgroups=_grid,
        equals=partial(packed, dense),
        cases=partial(packing_cases, dense),
        check=partial(_check_packing, dense),
    )  # fmt: skip


def _unpacker(dense: bool) -> Kernel:
    return Kernel(
        name=f"turboquant_mse_unpack_{'haar' if dense else 'hadamard'}",
        stands_for="decode",
        body=bodies.decode(dense),
        header=bodies.HEADERS[dense],
        inputs={"codes": "uint32", "scale": "M", "table": "float32", **{"matrix" if dense else "signs": "float32"}},
        outputs={"x": Output("float32", lambda call: (*call.shapes["codes"][:-1], call.numbers["d"]))},
        parameters={"M": METADATA},
        numbers=("rows", "bits", "d"),
        threads=_threads,
        threadgroups=_grid,
        equals=partial(unpacked, dense),
        cases=partial(unpacking_cases, dense),
        check=partial(_check_unpacking, dense),
    )


PACK = {dense: _packer(dense) for dense in (False, True)}
UNPACK = {dense: _unpacker(dense) for dense in (False, True)}
KERNELS = (*PACK.values(), *UNPACK.values())


def _turning(part: Part, back: bool) -> tuple[bool, mx.array]:
    """Whether a part's rotation is dense, and what its kernel reads of it."""
    if isinstance(part.rotation, SignHadamard):
        return False, part.rotation.signs
    # The kernel's lanes go along rows: of P^T on the way there, of P on the way back.
    return True, (part.rotation.forward if back else part.rotation.back).matrix


def pack(
    state: mse.MseState, x: mx.array, sequence: Mapping[str, mx.array], backend: Backend, **rest: Any
) -> dict[str, mx.array]:
    """What ``vq_encode`` and ``vq_pack`` do, in one launch a part."""
    words, scales = [], []
    x = mse.without_mean(state, x, sequence) if state.mean else x
    given: dict[str, Any] = {"rows": math.prod(x.shape[:-1]), "mode": mse.MODES.index(state.mode), "M": state.dtype}
    for part in state.parts:
        dense, turning = _turning(part, back=False)
        found = PACK[dense](
            x, part.channels, part.table, turning, backend=backend, bits=part.bits, words=part.words, **given
        )
        words.append(found[0])
        scales.append(found[1])
    return mse.joined(words, scales)


def unpack(state: mse.MseState, packed: Mapping[str, mx.array], backend: Backend, **rest: Any) -> mx.array:
    """What ``vq_decode`` does, in one launch a part."""
    found: list[mx.array] = []
    for number, part in enumerate(state.parts):
        words, scale = mse.columns(state, packed, number)
        dense, turning = _turning(part, back=True)
        given: dict[str, Any] = {"rows": math.prod(words.shape[:-1]), "bits": part.bits, "d": part.dim}
        found += UNPACK[dense](words, scale, part.table, turning, backend=backend, **given)
    return mse.assembled(state, found, packed)


OFFERS = (
    KernelOffer("encode+pack", tuple(PACK.values()), pack),
    KernelOffer("decode", tuple(UNPACK.values()), unpack),
)
