"""Tokens on which kernels and references are compared: every dtype and width with each family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

DTYPES = ("float32", "float16", "bfloat16")
FAMILIES = ("normal", "pairs", "outliers", "zeros", "constant", "extreme", "nan")
DIMS = {"hadamard": (64, 80, 96, 112, 128, 192, 256, 12), "haar": (64, 100, 80, 7, 128, 36, 96, 256)}
TOKENS = ((1, 1, 1), (2, 1, 3), (1, 3, 2), (1, 1, 9), (2, 2, 1))
"""Rows, heads, tokens: one SIMD group in use, all of them, several threadgroups, surplus ones."""

Numbers = np.ndarray[Any, Any]


def packing(kind: str, widths: Sequence[int]) -> Iterator[tuple[mx.array, int, str]]:
    """Tokens, bits and a name: 21 cases for each width."""
    rng = np.random.default_rng(7)
    for i in range(len(FAMILIES) * len(DTYPES) * len(widths)):
        family, dtype, bits = FAMILIES[i % 7], DTYPES[i // 7 % 3], widths[i // 21]
        dim, shape = DIMS[kind][(i + i // 8) % 8], TOKENS[i % 5]
        if dim > 128 and math.prod(shape) > 4:
            shape = (1, 1, 2)
        x = numbers(rng, (*shape, dim), family, dtype)
        yield x, bits, f"{family} {x.shape} {dtype}, {bits} bits"


def numbers(rng: np.random.Generator, shape: tuple[int, ...], family: str, dtype: str) -> mx.array:
    """Tokens (B, H, n, D) of a family.

    ``normal``; ``pairs``: two numbers of one size among zeros, so that many rotated ones are 0, a boundary of every
    table; ``outliers`` by channel; ``zeros``: of both signs, whole tokens and most of others; ``constant`` tokens;
    ``extreme``: the largest numbers, and squares beyond float32; ``nan``: NaN and infinities.
    """
    x: Numbers = rng.standard_normal(shape)
    if family == "pairs":
        x = np.zeros(shape)
        for token in x.reshape(-1, shape[-1]):
            token[rng.choice(shape[-1], min(2, shape[-1]), replace=False)] = rng.choice([-1, 1], min(2, shape[-1]))
    if family == "outliers":
        x = x * np.where(rng.random(shape[-1]) < 0.05, 50, 1)
    if family == "zeros":
        x = np.where(rng.random(shape) < 0.9, rng.choice([0.0, -0.0], shape), x)
        x[..., -1, :] = rng.choice([0.0, -0.0], shape[-1])
    if family == "constant":
        x = np.broadcast_to(rng.choice([1.0, -3.7, 0.001, 1000.3], (*shape[:3], 1)), shape)
    if family == "extreme":
        most = {"float16": 65504.0, "float32": 3.3e38, "bfloat16": 3.3e38}[dtype]
        high = np.where(rng.random((*shape[:3], 1)) < 0.4, most, 60000.0)
        x = np.clip(x * high, -high, high)
    if family == "nan":
        x = np.where(rng.random(shape) < 0.02, rng.choice([np.nan, np.inf, -np.inf], shape), x)
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
