"""What each kernel must equal, bit for bit: the plain functions of :mod:`vq_turboquant.mse`."""

from __future__ import annotations

import mlx.core as mx

from vq_core.codec.bits import WORD, pack_bits
from vq_core.codec.hadamard import SignHadamard
from vq_core.codec.projection import DenseRotation, Projection
from vq_turboquant import mse
from vq_turboquant.parts import Part

DTYPES = ("float32", "float16", "bfloat16")
METADATA = ("float16", "float32")
STORED: dict[str, tuple[str, ...]] = {"float16": ("float16",), "bfloat16": ("float32",), "float32": METADATA}
"""Dtypes of the scales by that of the numbers; float16 models' are float32 numbers where a mean was removed."""


def part_from(channels: mx.array, bits: int, table: mx.array, turning: mx.array, dense: bool, back: bool) -> Part:
    """The part that a kernel's inputs stand for."""
    dim, numbers = int(channels.size), table.tolist()
    assert isinstance(numbers, list)
    rotation: SignHadamard | DenseRotation = SignHadamard(turning, turning)
    if dense:
        forward, other = Projection.of(turning if back else turning.T), Projection.of(turning.T if back else turning)
        rotation = DenseRotation(forward, other)
    step = WORD // [0, 1, 2, 1, 4][bits]
    width, edges = -(-dim // step) * step, tuple(numbers[16 : 15 + 2**bits])
    return Part(channels, bits, width, rotation, table[: 2**bits], edges, numbers[31], table)  # type: ignore[arg-type]


def packed(
    dense: bool, x: mx.array, channels: mx.array, table: mx.array, turning: mx.array, *,
    bits: int, mode: int, words: int, M: str, **rest: object,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """Words and scales of x."""
    part = part_from(channels, bits, table, turning, dense, back=False)
    codes, scale = mse.quantize(part, x, mse.MODES[mode], M)
    codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, words * WORD // bits - part.dim)])
    return pack_bits(codes, bits), scale


def unpacked(
    dense: bool, codes: mx.array, scale: mx.array, table: mx.array, turning: mx.array, *,
    bits: int, d: int, **rest: object,
) -> tuple[mx.array]:  # fmt: skip
    """Numbers of words and scales."""
    part = part_from(mx.arange(d, dtype=mx.uint32), bits, table, turning, dense, back=True)
    return (mse.dequantize(part, codes, scale),)
