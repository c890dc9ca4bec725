"""QJL's kernels: norm, projection, signs and bits in one pass, with the choice of outlier channels, and back.

Each equals the plain functions of :mod:`vq_qjl.method`, bit for bit.  Head size, widths and lengths are run-time
numbers; dtypes are compiled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from vq_core.codec.projection import MOST
from vq_core.kernels import Backend, Call, Kernel, KernelOffer, Output
from vq_qjl.kernels import bodies
from vq_qjl.kernels.bodies import THREADS, TOKENS
from vq_qjl.kernels.cases import (
    decoding_cases,
    decoding_outlier_cases,
    encoding_cases,
    encoding_outlier_cases,
)
from vq_qjl.kernels.reference import (
    DTYPES,
    as_bits,
    decoded,
    decoded_apart,
    encoded,
    encoded_apart,
    metadata_dtype,
    name_of,
    signs_dtype,
)
from vq_qjl.method import CHANNELS, GROUP, Qjl

ELEMENTS = 2**31
"""Of one array: bodies count in 32 bits."""
STORED: dict[str, tuple[Any, ...]] = {"M": ("float16", "float32"), "U": ("uint32", "uint8")}
Shape = tuple[int, ...]


# ---- shapes: of rows, of grids


def _threads(call: Call) -> tuple[int, int, int]:
    return (THREADS, 1, 1)


def _grid(rows: int, each: int, words: int) -> tuple[int, int, int]:
    return (-(-rows // each), -(-words // 4), 1)


def _signs(call: Call) -> Shape:
    width = call.shapes["columns"][1]
    return (*call.shapes["x"][:3], width // (32 if call.parameters["U"] == "uint32" else 8))


def _one(call: Call) -> Shape:
    return (*call.shapes["x"][:3], 1)


def _own_signs(call: Call) -> Shape:
    return (*call.shapes["x"][:3], call.shapes["own_columns"][1] // 32)


def _channels(call: Call) -> Shape:
    B, H, n, _ = call.shapes["x"]
    return (B, H, n // GROUP, call.shapes["own_columns"][0])


def _encode_grid(call: Call) -> tuple[int, int, int]:
    return _grid(math.prod(call.shapes["x"][:3]), TOKENS, -(-call.shapes["columns"][1] // 32))


def _encode_outliers_grid(call: Call) -> tuple[int, int, int]:
    words = -(-call.shapes["columns"][1] // 32) + call.shapes["own_columns"][1] // 32
    return _grid(math.prod(call.shapes["x"][:3]), GROUP, words)


def _decode_grid(call: Call) -> tuple[int, int, int]:
    return _grid(math.prod(call.shapes["signs"][:3]), TOKENS, -(-call.shapes["sketch"][1] // 32))


def _dense(call: Call) -> Shape:
    return (*call.shapes["signs"][:3], call.shapes["sketch"][1])


# ---- what is accepted


def _check_encoding(call: Call, most: int = MOST) -> str:
    x, columns = call.shapes["x"], call.shapes["columns"]
    if len(x) != 4 or len(columns) != 2 or columns[0] != x[3] or not 1 <= x[3] <= most:
        return f"x {x} and columns {columns}: accepted are (B, H, n, D) and (D, m), D at most {most}"
    if columns[1] % 8 or not columns[1] or call.parameters["U"] != signs_dtype(columns[1]):
        return f"{columns[1]} signs do not fill {call.parameters['U']}: they are stored as {signs_dtype(columns[1])}"
    wanted = metadata_dtype(call.parameters["T"])
    if call.parameters["M"] != wanted:
        return f"norms of {call.parameters['T']} numbers are {wanted}, not {call.parameters['M']}"
    if max(math.prod(x), math.prod(x[:3]) * columns[1]) >= ELEMENTS:
        return f"x {x} with {columns[1]} signs is {ELEMENTS} numbers or more; fewer are accepted"
    return ""


def _check_encoding_outliers(call: Call) -> str:
    x, own = call.shapes["x"], call.shapes["own_columns"]
    if wrong := _check_encoding(call, CHANNELS):
        return wrong
    if len(own) != 2 or not 1 <= own[0] <= x[3] or own[1] % 32 or not own[1]:
        return f"own_columns {own}: accepted are 1 to {x[3]} channels and a width of whole words of 32"
    return f"{x[2]} tokens are no whole groups of {GROUP}" if x[2] % GROUP else ""


def _check_decoding(call: Call) -> str:
    signs, sketch = call.shapes["signs"], call.shapes["sketch"]
    size = 32 if call.parameters["U"] == "uint32" else 8
    if len(signs) != 4 or len(sketch) != 2 or call.shapes["weight"] != (*signs[:3], 1) or sketch[0] != signs[3] * size:
        return f"signs {signs}, weight {call.shapes['weight']} and sketch {sketch} do not fit"
    if math.prod(signs[:3]) * max(sketch) >= ELEMENTS:
        return f"signs {signs} are {ELEMENTS} numbers or more; fewer are accepted"
    return ""


def _check_decoding_outliers(call: Call) -> str:
    if wrong := _check_decoding(call):
        return wrong
    rows = call.shapes["signs"][:3]
    own, norm, sketch, ids = (
        call.shapes[name] for name in ("outlier_signs", "outlier_weight", "own_sketch", "channels")
    )
    fits = len(sketch) == 2 and own == (*rows, sketch[0] // 32) and sketch[0] % 32 == 0 and norm == (*rows, 1)
    if not fits or ids != (*rows[:2], rows[2] // GROUP, sketch[1]) or rows[2] % GROUP:
        return f"outlier_signs {own}, outlier_weight {norm}, channels {ids} and own_sketch {sketch} do not fit"
    return ""


# ---- kernels

ENCODE = Kernel(
    name="qjl_encode",
    stands_for="encode+pack",
    body=bodies.ENCODE,
    header=bodies.HEADER,
    inputs={"x": "T", "columns": "float32"},
    outputs={"signs": Output("U", _signs), "weight": Output("M", _one)},
    parameters={"T": DTYPES, **STORED},
    threads=_threads,
    threadgroups=_encode_grid,
    equals=encoded,
    cases=encoding_cases,
    check=_check_encoding,
)

ENCODE_OUTLIERS = attrs.evolve(
    ENCODE,
    name="qjl_encode_outliers",
    body=bodies.ENCODE_OUTLIERS,
    inputs={"x": "T", "columns": "float32", "own_columns": "float32"},
    outputs={
        **ENCODE.outputs,
        "outlier_signs": Output("uint32", _own_signs),
        "outlier_weight": Output("M", _one),
        "channels": Output("uint8", _channels),
    },
    threadgroups=_encode_outliers_grid,
    equals=encoded_apart,
    cases=encoding_outlier_cases,
    check=_check_encoding_outliers,
)

DECODE = Kernel(
    name="qjl_decode",
    stands_for="decode",
    body=bodies.DECODE,
    inputs={"signs": "U", "weight": "M", "sketch": "float32"},
    outputs={"x": Output("float32", _dense)},
    parameters=STORED,
    numbers=("unit",),
    threads=_threads,
    threadgroups=_decode_grid,
    equals=decoded,
    cases=decoding_cases,
    check=_check_decoding,
)

DECODE_OUTLIERS = attrs.evolve(
    DECODE,
    name="qjl_decode_outliers",
    body=bodies.DECODE_OUTLIERS,
    inputs={
        "signs": "U", "weight": "M", "outlier_signs": "uint32", "outlier_weight": "M", "channels": "uint8",
        "sketch": "float32", "own_sketch": "float32",
    },
    numbers=("unit", "own_unit"),
    equals=decoded_apart,
    cases=decoding_outlier_cases,
    check=_check_decoding_outliers,
)  # fmt: skip

KERNELS = (ENCODE, ENCODE_OUTLIERS, DECODE, DECODE_OUTLIERS)


def encode(state: Qjl, x: mx.array, backend: Backend, **rest: object) -> dict[str, mx.array]:
    """What ``vq_encode`` and ``vq_pack`` do, in one launch."""
    given: dict[str, Any] = {"M": metadata_dtype(name_of(x)), "U": signs_dtype(state.sketch.width), "backend": backend}
    if state.apart is None:
        return dict(zip(ENCODE.outputs, ENCODE(x, state.sketch.columns, **given), strict=True))
    found = ENCODE_OUTLIERS(x, state.sketch.columns, state.apart.columns, **given)
    return dict(zip(ENCODE_OUTLIERS.outputs, found, strict=True))


def decode(state: Qjl, packed: Mapping[str, mx.array], backend: Backend, **rest: object) -> mx.array:
    """What ``vq_decode`` does, in one launch."""
    unit = as_bits(state.sketch.unit)
    if state.apart is None:
        return DECODE(packed["signs"], packed["weight"], state.sketch.rows, unit=unit, backend=backend)[0]
    stored = [packed[name] for name in ENCODE_OUTLIERS.outputs]
    units = {"unit": unit, "own_unit": as_bits(state.apart.unit)}
    return DECODE_OUTLIERS(*stored, state.sketch.rows, state.apart.rows, **units, backend=backend)[0]


OFFERS = (
    KernelOffer("encode+pack", (ENCODE, ENCODE_OUTLIERS), encode),
    KernelOffer("decode", (DECODE, DECODE_OUTLIERS), decode),
)
