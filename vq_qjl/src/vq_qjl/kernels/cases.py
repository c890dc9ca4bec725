"""Inputs on which kernel and reference are compared: every dtype and width of sketch with each family of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.kernels import Case
from vq_qjl.kernels.reference import (
    DTYPES,
    as_bits,
    encoded,
    encoded_apart,
    metadata_dtype,
    signs_dtype,
)
from vq_qjl.method import GROUP, Sketch

FAMILIES = ("normal", "hundredfold", "thousandfold", "equal", "zeros", "extreme", "small", "nan")
DIMS = (64, 80, 96, 128, 256, 36)
WIDTHS = (0, 72, 256, 8, 96)
"""Signs a key; 0: one a number, in whole bytes."""
PROJECTIONS = ("orthogonal", "gaussian")
TOKENS = (1, 9, 33, 8)
OUTLIERS = (8, 1, 5, 33)

Numbers = np.ndarray[Any, Any]


@cache
def sketch_of(width: int, dim: int, projection: str) -> Sketch:
    """Made once."""
    return Sketch.of(width, dim, projection, (11, width))


def encoding_cases() -> Iterator[Case]:
    """120 cases, one of the largest head size and some tiny ones."""
    rng = np.random.default_rng(5)
    shapes = [(1 + i // 2 % 2, 1 + i % 3, TOKENS[i // 5 % 4], DIMS[i // 3 % 6]) for i in range(120)]
    for i, shape in enumerate([*shapes, (1, 1, 3, 512), (1, 1, 1, 1), (1, 1, 2, 3)]):
        family, dtype, projection = FAMILIES[i % 8], DTYPES[i % 3], PROJECTIONS[i // 5 % 2]
        width = WIDTHS[i % 5] or -(-shape[3] // 8) * 8
        x, sketch = numbers(rng, shape, family, dtype), sketch_of(width, shape[3], projection)
        given = {"M": metadata_dtype(dtype), "U": signs_dtype(width)}
        yield Case((x, sketch.columns), given, f"{family} {shape} {dtype}, {width} signs, {projection}")


def encoding_outlier_cases() -> Iterator[Case]:
    """96 cases, and as many outliers as there are channels."""
    rng = np.random.default_rng(6)
    for i in range(98):
        family, dtype, projection = FAMILIES[i % 8], DTYPES[i % 3], PROJECTIONS[i // 5 % 2]
        D, count = DIMS[i // 3 % 6], OUTLIERS[i // 7 % 4]
        count = D if i > 95 else count
        B, H, n = (1, 1 + i % 2, GROUP * (1 + i // 11 % 2)) if D < 200 else (1, 1, GROUP)
        width = WIDTHS[i % 5] or -(-D // 8) * 8
        x, sketch = numbers(rng, (B, H, n, D), family, dtype), sketch_of(width, D, projection)
        apart = sketch_of(32 * (1 + i % 3), count, projection)
        given = {"M": metadata_dtype(dtype), "U": signs_dtype(width)}
        said = f"{family} {x.shape} {dtype}, {width} signs, {count} outliers of {apart.width}, {projection}"
        yield Case((x, sketch.columns, apart.columns), given, said)


def decoding_cases() -> Iterator[Case]:
    """The same, packed."""
    for case in encoding_cases():
        x, columns = case.inputs
        packed = encoded(x, columns)
        given = {"unit": as_bits(0.37 / columns.shape[1])}
        yield Case((*packed, columns.T), given, case.name)


def decoding_outlier_cases() -> Iterator[Case]:
    """The same, packed."""
    for case in encoding_outlier_cases():
        x, columns, own_columns = case.inputs
        packed = encoded_apart(x, columns, own_columns)
        given = {"unit": as_bits(0.37 / columns.shape[1]), "own_unit": as_bits(0.41 / own_columns.shape[1])}
        yield Case((*packed, columns.T, own_columns.T), given, case.name)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], family: str, dtype: str) -> mx.array:
    """Numbers (B, H, n, D) of a family.

    ``normal``; ``hundredfold``, ``thousandfold``: five channels are so much larger; ``equal``: whole numbers, so that
    channels of a group have equal norms; ``zeros``: zeros of both signs, whole tokens of them, and a single number in
    some, so that signs are of single entries of the sketch; ``extreme``: the largest numbers, whose squares overflow
    for bfloat16 and float32; ``small``: the smallest; ``nan``: NaN and infinities.
    """
    x: Numbers = rng.standard_normal(shape)
    token = (*shape[:3], 1)
    if family in ("hundredfold", "thousandfold"):
        x[..., rng.integers(0, shape[3], 5)] *= 100 if family == "hundredfold" else 1000
    if family == "equal":
        x = np.broadcast_to(rng.choice([-1.0, 1.0, 2.0], token), shape) * rng.choice([-1.0, 1.0], shape)
    if family == "zeros":
        one = np.arange(shape[3]) == rng.integers(0, shape[3], token)
        x = np.where(one & (rng.random(token) < 0.5), x, rng.choice([0.0, -0.0], shape))
    if family == "extreme":
        most = 65504.0 if dtype == "float16" else 3.3e38
        x = np.where(rng.random(token) < 0.5, np.clip(x * most, -most, most), np.clip(x * 40000, -65504, 65504))
    if family == "small":
        x = x * (2.0**-22 if dtype == "float16" else rng.choice([2.0**-38, 2.0**-46, 2.0**-70], token))
    if family == "nan":
        x = np.where(rng.random(shape) < 0.005, rng.choice([np.nan, np.inf, -np.inf], shape), x)
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
