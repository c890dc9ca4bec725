"""Inputs on which kernel and reference are compared: every dtype, number of bits and group size with each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.api import Side
from vq_core.kernels import Case
from vq_kivi.kernels.reference import BITS, DTYPES, GROUPS, metadata_dtype, packed

FAMILIES = ("normal", "shifted", "outliers", "ties", "zeros", "constant", "extreme", "small", "nan")
DIMS = (64, 80, 96, 128, 192, 256, 36)
KEY_GROUPS = (1, 2, 3, 4)
VALUE_TOKENS = (1, 2, 33, 7, 128)
LARGEST = 40000
"""Elements of a batch; with more, one head of one row is taken."""
TINY = ((1, 1, 1, 1), (1, 1, 1, 5), (1, 1, 3, 2))
"""Fewer than 8 elements, which Metal keeps in another address space."""

SIGNIFICAND = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Bits in which each dtype holds whole numbers."""

Numbers = np.ndarray[Any, Any]


def packing_cases(side: Side) -> Callable[[], Iterator[Case]]:
    """324 cases and some tiny ones."""

    def cases() -> Iterator[Case]:
        rng = np.random.default_rng(5)
        for i in range(len(FAMILIES) * len(DTYPES) * len(BITS) * len(GROUPS)):
            family = FAMILIES[i % 9]
            dtype, bits, size = DTYPES[i // 9 % 3], BITS[i // 27 % 4], GROUPS[i // 108]
            D, B, H = DIMS[i % 7], int(rng.integers(1, 3)), int(rng.integers(1, 4))
            n = KEY_GROUPS[i % 4] * size if side == "keys" else VALUE_TOKENS[i % 5]
            if D * n * B * H > LARGEST:
                B, H = 1, 1
            x = numbers(rng, (B, H, n, D), side, family, dtype, bits, size)
            yield _case(x, bits, size, f"{family} {x.shape} {dtype}, {bits} bits in groups of {size}")
        for B, H, n, D in TINY if side == "values" else ():
            x = mx.array(rng.standard_normal((B, H, n, D)).astype(np.float32))
            yield _case(x, 4, 32, f"tiny {x.shape}")

    return cases


def unpacking_cases(side: Side) -> Callable[[], Iterator[Case]]:
    """The same, packed."""

    def cases() -> Iterator[Case]:
        for case in packing_cases(side)():
            (x,), bits, size = case.inputs, case.parameters["bits"], case.parameters["size"]
            codes, scale, zero = packed(side)(x, bits=bits, size=size)
            yield Case((codes, scale, zero), {"bits": bits, "size": size, "head_dim": x.shape[3]}, case.name)

    return cases


def _case(x: mx.array, bits: int, size: int, name: str) -> Case:
    dtype = str(x.dtype).removeprefix("mlx.core.")
    return Case((x,), {"bits": bits, "size": size, "M": metadata_dtype(dtype)}, name)


def numbers(
    rng: np.random.Generator, shape: tuple[int, ...], side: Side, family: str, dtype: str, bits: int, size: int
) -> mx.array:
    """Numbers (B, H, n, D) of a family.

    ``normal``; ``shifted``: far from zero, where padding with zeros shows; ``outliers`` by channel; ``ties``: most
    codes lie half way between two, exactly; ``zeros``: small whole numbers and zeros of both signs; ``constant``:
    groups of one number; ``extreme``: the largest numbers, and ranges that are no number; ``small``: ranges of a few
    units of the last place, the scale vanishes; ``nan``: NaN and infinities.
    """
    x: Numbers = rng.standard_normal(shape)
    # Numbers that one group shares: an array that broadcasts over its members.
    apart = (*shape[:2], 1, shape[3]) if side == "keys" else (*shape[:3], 1)
    if family == "shifted":
        x = x + 7
    if family == "outliers":
        x = x * np.exp(np.minimum(3 * rng.standard_normal(shape[-1:]), 6))
    if family == "ties":
        # The reciprocal of 7 or 15 is rounded, a product with it moves ties. What the dtype cannot hold is left out.
        odd = [step for step in (1, 7, 15) if step * 2**bits <= 2 ** SIGNIFICAND[dtype]]
        x = _ties(rng, shape, side, bits, size) * rng.choice(odd, apart) * 2.0 ** rng.integers(-5, 3, apart)
    if family == "zeros":
        lowest = np.where(rng.random(apart) < 0.7, 0, -1)
        x = np.where(
            rng.random(shape) < 0.3, rng.choice([0.0, -0.0], shape), np.maximum(rng.integers(-1, 3, shape), lowest)
        )
    if family == "constant":
        same = rng.choice([0.0, -0.0, 1.0, -3.7, 1e-7, 1000.3], apart)
        x = np.where(rng.random(apart) < 0.7, same, x)
    if family == "extreme":
        most = 65504.0 if dtype == "float16" else 3.3e38
        # Beside float16's largest number lies what a bfloat16 model keeps in float32.
        x = np.where(rng.random(apart) < 0.5, np.clip(x * most, -most, most), np.clip(x * 40000, -65504, 65504))
        x = np.where(rng.random(apart) < 0.3, np.abs(x), x)
    if family == "small":
        step = {"float32": 2.0**-23, "float16": 2.0**-24, "bfloat16": 2.0**-30}[dtype]
        x = step * rng.integers(0, 9, shape) + (dtype == "float32")
    if family == "nan":
        x = np.where(rng.random(shape) < 0.02, rng.choice([np.nan, np.inf, -np.inf], shape), x)
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))


def _ties(rng: np.random.Generator, shape: tuple[int, ...], side: Side, bits: int, size: int) -> Numbers:
    """Numbers whose groups have a zero of -2**(bits - 1) and a scale of 1: k + 1/2 is a tie.

    Odd multiples of 1/2 up to 2**(bits - 1) have at most 8 bits, so every dtype holds them.
    """
    levels, low = 2**bits - 1, -(2 ** (bits - 1))
    x: Numbers = low + rng.integers(0, levels, shape) + 0.5
    along: Numbers = np.moveaxis(x, 2 if side == "keys" else 3, 0)
    along[0::size], along[1::size] = low, low + levels
    return x
