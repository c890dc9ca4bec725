"""What each kernel must equal, bit for bit: the plain functions of :mod:`vq_kivi.method`, and inputs that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from vq_core.api import Side
from vq_core.kernels import Case
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


# ---- inputs that show that kernel and reference agree


def _data(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, family: int) -> mx.array:
    """Normal, with ties and both zeros, with outliers, constant, extreme, or with NaN and infinities."""
    x = rng.standard_normal(shape)
    if family == 1:
        x = np.where(rng.random(shape) < 0.2, -0.0, rng.integers(-3, 4, shape))
    if family == 2:
        x = x * np.exp(np.minimum(3 * rng.standard_normal(shape[-1:]), 6))
    if family == 3:
        x = (
            np.broadcast_to(rng.standard_normal((*shape[:2], 1, 1)), shape)
            + (rng.random((*shape[:1], 1, 1, 1)) < 0.5) * x
        )
    if family == 4:
        x = np.clip(x * 1e30, *((-65504, 65504) if dtype == "float16" else (-1e30, 1e30)))
    if family == 5:
        x = np.where(rng.random(shape) < 0.02, rng.choice([np.nan, np.inf, -np.inf], shape), x)
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))


FAMILIES = 6
DIMS = (64, 80, 96, 128, 192, 256, 36)
TOKENS = (1, 2, 3, 4)


def packing_cases(side: Side) -> Callable[[], Iterator[Case]]:
    """Every dtype, number of bits and group size, with each kind of numbers."""

    def cases() -> Iterator[Case]:
        rng = np.random.default_rng(5)
        for i in range(324):
            dtype, bits, size = DTYPES[i % 3], BITS[i // 3 % 4], GROUPS[i // 12 % 3]
            D, family, B, H = DIMS[i % 7], i % FAMILIES if i % 2 else 0, 1 + i % 2, 1 + i % 3
            n = TOKENS[i // 7 % 4] * size if side == "keys" else (1, 2, 33, 7, 128)[i % 5]
            if D * n * B * H > 40000:
                B, H = 1, 1
            x = _data(rng, (B, H, n, D), dtype, (i // 36) % FAMILIES if family == 0 else family)
            yield Case(
                (x,), {"bits": bits, "size": size, "M": metadata_dtype(dtype)}, f"{x.shape} {dtype} {bits} bits, {size}"
            )

    return cases


def unpacking_cases(side: Side) -> Callable[[], Iterator[Case]]:
    """The same, packed."""

    def cases() -> Iterator[Case]:
        for case in packing_cases(side)():
            (x,), bits, size = case.inputs, case.parameters["bits"], case.parameters["size"]
            codes, scale, zero = packed(side)(x, bits=bits, size=size)
            yield Case((codes, scale, zero), {"bits": bits, "size": size, "head_dim": x.shape[3]}, case.name)

    return cases
