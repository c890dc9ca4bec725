"""What each kernel must equal, bit for bit: the plain functions of :mod:`vq_vecinfer.method`."""

from __future__ import annotations

import mlx.core as mx

from vq_core.codec.bits import unpack_bits
from vq_vecinfer import method

SUBS = (2, 4, 8)
BITS = (8, 10, 12)
DTYPES = ("float32", "float16", "bfloat16")


def state_of(codebook: mx.array, halves: mx.array, head_dim: int, bits: int) -> method.VecInfer:
    """The method's state for values with a codebook."""
    return method.VecInfer("values", head_dim, bits, codebook, halves, None, None, None)


def quantized(x: mx.array, codebook: mx.array, halves: mx.array, *, bits: int, **rest: object) -> tuple[mx.array, ...]:
    """Codes of x (B, H, n, D), packed."""
    state = state_of(codebook, halves, x.shape[3], bits)
    codes = method.nearest(state, x.astype(mx.float32)).reshape(*x.shape[:2], -1)
    return (method.vq_pack(state, codes)["codes"],)


def quantized_keys(
    x: mx.array, inverse: mx.array, mean: mx.array, codebook: mx.array, halves: mx.array, *, bits: int, centred: int,
    **rest: object,
) -> tuple[mx.array, ...]:  # fmt: skip
    """The same of keys as they are given."""
    state = method.VecInfer(
        "keys", x.shape[3], bits, codebook, halves, inverse, inverse, mean if centred else None
    )  # fmt: skip
    codes = method.nearest(state, state.stored(x, {"mean": mean})).reshape(*x.shape[:2], -1)
    return (method.vq_pack(state, codes)["codes"],)


def dequantized(
    codes: mx.array, codebook: mx.array, *, bits: int, head_dim: int, **rest: object
) -> tuple[mx.array, ...]:
    """What packed codes (N, H, words) stand for."""
    state = state_of(codebook, codebook[..., 0], head_dim, bits)
    return (method.centroids_of(state, unpack_bits(codes, bits)),)
