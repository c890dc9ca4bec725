"""KIVI's kernels: range, quantize and pack in one pass, and back.

Each equals the plain functions of :mod:`vq_kivi.method`, bit for bit.  Group size, head size and lengths are run-time
numbers; bits and dtypes are compiled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import mlx.core as mx

from vq_core.api import SIDES, Side
from vq_core.kernels import Backend, Call, Kernel, KernelOffer, Output
from vq_kivi import method
from vq_kivi.kernels import bodies
from vq_kivi.kernels.cases import packing_cases, unpacking_cases
from vq_kivi.kernels.matrix_cases import passes
from vq_kivi.kernels.reference import (
    BITS,
    DTYPES,
    GROUPS,
    metadata_dtype,
    name_of,
    packed,
    rounded,
    unpacked,
)

THREADS = 128
MOST = 2**31
"""Elements of one input: bodies count in 32 bits."""


# ---- shapes: of rows, of grids


def _keys(per_group: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    def shape(call: Call) -> tuple[int, ...]:
        B, H, n, D = call.shapes["x"]
        return (B, H, D, n // call.numbers["size"] * per_group(call))

    return shape


def _values(per_group: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    def shape(call: Call) -> tuple[int, ...]:
        B, H, n, D = call.shapes["x"]
        return (B, H, n, -(-D // call.numbers["size"]) * per_group(call))

    return shape


def _words(call: Call) -> int:
    return int(call.numbers["size"] * call.parameters["bits"] // 32)


def _one(call: Call) -> int:
    return 1


def _threads(call: Call) -> tuple[int, int, int]:
    return (THREADS, 1, 1)


def _grid(count: Callable[[Call], int]) -> Callable[[Call], tuple[int, int, int]]:
    """Threadgroups for so many threads."""
    return lambda call: (-(-count(call) // THREADS), 1, 1)


def _tiles(call: Call) -> tuple[int, int, int]:
    """Threadgroups of 32 channels of 4 groups of tokens."""
    B, H, n, D = call.shapes["x"]
    return (B * H * -(n // call.numbers["size"] // -4) * -(D // -32), 1, 1)


def _groups(call: Call) -> int:
    return math.prod(call.shapes["x"]) // call.numbers["size"]


def _runs(call: Call) -> int:
    """Runs of 32 channels, groups that do not fill being filled up."""
    B, H, n, D = call.shapes["x"]
    return B * H * n * -(-D // call.numbers["size"]) * call.numbers["size"] // 32


def _check_packing(call: Call) -> str:
    x, size = call.shapes["x"], call.numbers["size"]
    if len(x) != 4:
        return f"x {x} must be (B, H, n, D)"
    wanted = metadata_dtype(call.parameters["T"])
    if call.parameters["M"] != wanted:
        return f"scale and zero of {call.parameters['T']} numbers are {wanted}, not {call.parameters['M']}"
    if size not in GROUPS:
        return f"groups of {size}: accepted are {', '.join(map(str, GROUPS))}"
    return f"x {x} has {math.prod(x)} elements; fewer than {MOST} are accepted" if math.prod(x) >= MOST else ""


def _check_keys(call: Call) -> str:
    wrong, size = _check_packing(call), call.numbers["size"]
    if wrong or call.shapes["x"][2] % size == 0:
        return wrong
    return f"{call.shapes['x'][2]} tokens are no whole groups of {size}"


def _check_unpacking(call: Call) -> str:
    codes, scale, size = call.shapes["codes"], call.shapes["scale"], call.numbers["size"]
    if size not in GROUPS or len(codes) != 4 or scale != call.shapes["zero"] or scale[:3] != codes[:3]:
        return f"codes {codes}, scale {scale} and zero {call.shapes['zero']} in groups of {size} do not fit"
    if codes[3] * 32 != scale[3] * size * call.parameters["bits"]:
        return f"{codes[3]} words are not {scale[3]} groups of {size} codes of {call.parameters['bits']} bits"
    if math.prod(codes) * 32 // call.parameters["bits"] >= MOST:
        return f"codes {codes} are {MOST} numbers or more; fewer are accepted"
    return ""


def _check_unpacking_keys(call: Call) -> str:
    D, codes = call.numbers["head_dim"], call.shapes["codes"]
    return _check_unpacking(call) or ("" if codes[2] == D else f"codes {codes} are not of head size {D}")


def _check_unpacking_values(call: Call) -> str:
    D, size, groups = call.numbers["head_dim"], call.numbers["size"], call.shapes["scale"][-1]
    fits = not groups or -(-D // size) == groups
    return _check_unpacking(call) or (
        "" if fits else f"head size {D} needs {-(-D // size)} groups of {size}, there are {groups}"
    )


def _dense_keys(call: Call) -> tuple[int, ...]:
    N, H, D, words = call.shapes["codes"]
    return (N, H, words * 32 // call.parameters["bits"], D)


def _dense_values(call: Call) -> tuple[int, ...]:
    return (*call.shapes["codes"][:3], call.numbers["head_dim"])


def _parts(call: Call) -> int:
    """Runs of 32 tokens of one channel."""
    return math.prod(call.shapes["codes"]) // int(call.parameters["bits"])


def _fours(call: Call) -> int:
    """Runs of 4 channels of one token."""
    return math.prod(call.shapes["codes"][:3]) * -(-call.numbers["head_dim"] // 4)


def _packer(side: Side) -> Kernel:
    shape = _keys if side == "keys" else _values
    return Kernel(
        name=f"kivi_pack_{side}",
        stands_for="encode+pack",
        body=bodies.PACK_KEYS if side == "keys" else bodies.PACK_VALUES,
        header=bodies.HELPERS,
        inputs={"x": "T"},
        outputs={
            "codes": Output("uint32", shape(_words)),
            "scale": Output("M", shape(_one)),
            "zero": Output("M", shape(_one)),
        },
        parameters={"T": DTYPES, "M": ("float16", "float32"), "bits": BITS},
        numbers=("size",),
        threads=_threads,
        threadgroups=_tiles if side == "keys" else _grid(_runs),
        equals=packed(side),
        cases=packing_cases(side),
        check=_check_keys if side == "keys" else _check_packing,
    )


def _rounder(side: Side) -> Kernel:
    """What the values become: quantized and dequantized without being stored, as published KIVI kernels compute."""
    packer = PACK[side]
    return attrs.evolve(
        packer,
        name=f"kivi_round_{side}",
        stands_for="encode+decode",
        body=bodies.ROUND_KEYS if side == "keys" else bodies.ROUND_VALUES,
        outputs={"y": Output("float32", lambda call: call.shapes["x"])},
        threads=_threads,
        threadgroups=_grid(_groups if side == "keys" else _runs),
        equals=rounded(side),
    )


def _unpacker(side: Side) -> Kernel:
    shape = _dense_keys if side == "keys" else _dense_values
    return Kernel(
        name=f"kivi_unpack_{side}",
        stands_for="decode",
        body=bodies.UNPACK_KEYS if side == "keys" else bodies.UNPACK_VALUES,
        inputs={"codes": "uint32", "scale": "M", "zero": "M"},
        outputs={"x": Output("float32", shape)},
        parameters={"M": ("float16", "float32"), "bits": BITS},
        numbers=("size", "head_dim"),
        threads=_threads,
        threadgroups=_grid(_parts if side == "keys" else _fours),
        equals=unpacked(side),
        cases=unpacking_cases(side),
        check=_check_unpacking_keys if side == "keys" else _check_unpacking_values,
    )


PACK = {side: _packer(side) for side in SIDES}
ROUND = {side: _rounder(side) for side in SIDES}
UNPACK = {side: _unpacker(side) for side in SIDES}


def pack(state: method.KiviState, x: mx.array, backend: Backend, **rest: object) -> dict[str, mx.array]:
    """What ``vq_encode`` and ``vq_pack`` do, in one launch."""
    given = {"bits": state.bits, "size": state.group_size, "M": metadata_dtype(name_of(x))}
    codes, scale, zero = PACK[state.side](x, backend=backend, **given)
    scale, zero = method.stored(state, scale, zero)
    return {"codes": codes, "scale": scale, "zero": zero}


def unpack(state: method.KiviState, packed: Mapping[str, mx.array], backend: Backend, **rest: object) -> mx.array:
    """What ``vq_decode`` does, in one launch."""
    given = {"bits": state.bits, "size": state.group_size, "head_dim": state.head_dim}
    return UNPACK[state.side](packed["codes"], packed["scale"], packed["zero"], backend=backend, **given)[0]


OFFERS = (
    KernelOffer("encode+pack", tuple(PACK.values()), pack),
    KernelOffer("decode", tuple(UNPACK.values()), unpack),
    KernelOffer("", tuple(ROUND.values())),
    KernelOffer("", passes()[:2]),
)
KERNELS = (*PACK.values(), *ROUND.values(), *UNPACK.values())
