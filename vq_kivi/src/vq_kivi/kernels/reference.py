"""What each kernel must equal, bit for bit: the plain functions of :mod:`vq_kivi.method`."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from vq_core.api import Side
from vq_kivi import method

BITS = (2, 3, 4, 8)
DTYPES = ("float32", "float16", "bfloat16")
GROUPS = (32, 64, 128)


def metadata_dtype(dtype: str) -> str:
    """Dtype that the packing kernels write scale and zero in; bfloat16 models' are narrowed after a look at them."""
    return "float16" if dtype == "float16" else "float32"


def state_of(side: Side, bits: int, group_size: int, head_dim: int, dtype: str) -> method.KiviState:
    """The method's state, as ``vq_prepare`` makes it."""
    padded = -(-head_dim // group_size) * group_size
    metadata = "float32" if dtype == "float32" else "float16"
    return method.KiviState(bits, group_size, side, head_dim, padded, metadata, dtype == "bfloat16")  # type: ignore[arg-type]


def name_of(x: mx.array) -> str:
    """An array's dtype by name."""
    return str(x.dtype).removeprefix("mlx.core.")


def packed(side: Side) -> Callable[..., tuple[mx.array, ...]]:
    """Codes, scale and zero of x."""

    def pack(x: mx.array, *, bits: int, size: int, **rest: object) -> tuple[mx.array, ...]:
        state = state_of(side, bits, size, x.shape[3], name_of(x))
        found = method.quantize(state, x)
        dtype = mx.float16 if x.dtype == mx.float16 else mx.float32
        return method.vq_pack(state, found)["codes"], found.scale.astype(dtype), found.zero.astype(dtype)

    return pack


def rounded(side: Side) -> Callable[..., tuple[mx.array, ...]]:
    """What x becomes, quantized and dequantized."""

    def both(x: mx.array, *, bits: int, size: int, **rest: object) -> tuple[mx.array, ...]:
        state = state_of(side, bits, size, x.shape[3], name_of(x))
        found = method.quantize(state, x)
        packed = method.vq_pack(state, found)
        return (method.vq_decode(state, packed),)

    return both


def unpacked(side: Side) -> Callable[..., tuple[mx.array, ...]]:
    """x from codes, scale and zero."""

    def unpack(
        codes: mx.array, scale: mx.array, zero: mx.array, *, bits: int, size: int, head_dim: int, **rest: object
    ) -> tuple[mx.array, ...]:
        state = state_of(side, bits, size, head_dim, name_of(scale))
        return (method.vq_decode(state, {"codes": codes, "scale": scale, "zero": zero}),)

    return unpack
