"""What each kernel must equal, bit for bit: the plain functions of :mod:`vq_qjl.method`."""

from __future__ import annotations

import struct

import mlx.core as mx

from vq_core.codec.bits import WORD
from vq_qjl import method
from vq_qjl.method import Qjl, Sketch

DTYPES = ("float32", "float16", "bfloat16")


def metadata_dtype(dtype: str) -> str:
    """Dtype of the norms, for a model's."""
    return "float16" if dtype == "float16" else "float32"


def signs_dtype(width: int) -> str:
    """Dtype in which so many signs are stored."""
    return f"uint{WORD if width % WORD == 0 else 8}"


def as_bits(number: float) -> int:
    """A float32's bits: kernels take whole numbers."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def name_of(x: mx.array) -> str:
    """An array's dtype by name."""
    return str(x.dtype).removeprefix("mlx.core.")


def _packed(state: Qjl, x: mx.array) -> tuple[mx.array, ...]:
    return tuple(method.vq_pack(state, method.vq_encode(state, x)).values())


def encoded(x: mx.array, columns: mx.array, **rest: object) -> tuple[mx.array, ...]:
    """Signs and weight."""
    return _packed(Qjl(Sketch(columns.T, columns, 1.0), metadata_dtype(name_of(x))), x)


def encoded_apart(x: mx.array, columns: mx.array, own_columns: mx.array, **rest: object) -> tuple[mx.array, ...]:
    """Signs and weight, those of the outliers, and their channels."""
    sketch, apart = (Sketch(c.T, c, 1.0) for c in (columns, own_columns))
    return _packed(Qjl(sketch, metadata_dtype(name_of(x)), own_columns.shape[0], apart), x)


def decoded(signs: mx.array, weight: mx.array, sketch: mx.array, *, unit: int, **rest: object) -> tuple[mx.array, ...]:
    """The vector whose products are the estimates."""
    state = Qjl(Sketch(sketch, sketch.T, _number(unit)), name_of(weight))
    return (method.vq_decode(state, {"signs": signs, "weight": weight}),)


def decoded_apart(
    signs: mx.array, weight: mx.array, outlier_signs: mx.array, outlier_weight: mx.array, channels: mx.array,
    sketch: mx.array, own_sketch: mx.array, *, unit: int, own_unit: int, **rest: object,
) -> tuple[mx.array, ...]:  # fmt: skip
    """The same, with outliers."""
    apart = Sketch(own_sketch, own_sketch.T, _number(own_unit))
    state = Qjl(Sketch(sketch, sketch.T, _number(unit)), name_of(weight), own_sketch.shape[1], apart)
    packed = {
        "signs": signs, "weight": weight, "outlier_signs": outlier_signs, "outlier_weight": outlier_weight,
        "channels": channels,
    }  # fmt: skip
    return (method.vq_decode(state, packed),)
