"""Inputs on which kernel and reference are compared: every dtype, kind of scale and number of bits with each family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.codec.hadamard import hadamard
from vq_core.kernels import Case
from vq_turboquant.kernels.mse_reference import DTYPES, STORED, packed
from vq_turboquant.parts import Part, part_of

FAMILIES = ("normal", "outliers", "one-hot", "zeros", "constant", "ties", "extreme", "small", "nan")
HADAMARD_DIMS = (64, 80, 96, 112, 128, 192, 256)
HAAR_DIMS = (64, 80, 100, 128, 36, 256, 120)
TIES_DIMS = (64, 256)
"""Powers of four: a transform of constants and one-hot vectors gives exact zeros and exact powers of two."""
SHAPES = ((1, 1, 5), (2, 1, 3), (1, 2, 1), (1, 1, 9))
CASES = 144

Numbers = np.ndarray[Any, Any]


def packing_cases(dense: bool) -> Iterator[Case]:
    """144 cases."""
    rng = np.random.default_rng(7)
    for i in range(CASES):
        family, dtype = FAMILIES[i % 9], DTYPES[i // 9 % 3]
        bits, mode = 1 + i // 3 % 4, i // 27 % 3
        dim = TIES_DIMS[i // 9 % 2] if family == "ties" else (HAAR_DIMS if dense else HADAMARD_DIMS)[i % 7]
        # Every other case takes some of a longer vector's channels, as the parts of fractional bits do.
        whole = dim if i % 2 else dim + 32
        channels = np.sort(rng.permutation(whole)[:dim]) if whole > dim else np.arange(dim)
        part = attrs.evolve(_part(bits, dim, dense), channels=mx.array(channels.astype(np.uint32)))
        table, turning = part.table, part.rotation.back.matrix if dense else part.rotation.signs  # type: ignore[union-attr]
        if family == "ties":
            table = _eighths(bits, dim)
            turning = hadamard(mx.eye(dim)).T if dense else mx.ones((2 if i % 5 == 0 else 1, dim))
            # Every third dense one has entries half way between two units of the exact sums.
            turning = turning + 2.0**-12 * (turning > 0) if dense and i % 27 == 5 else turning
        x = _numbers(rng, (*SHAPES[i % 4], whole), family, dtype)
        metadata = STORED[dtype][i % len(STORED[dtype])]
        given = {"bits": bits, "words": part.words, "mode": mode, "rows": int(np.prod(SHAPES[i % 4])), "M": metadata}
        name = f"{family}, {x.shape} {dtype}, {dim} channels, {bits} bits, mode {mode}, scales {metadata}"
        yield Case((x, part.channels, table, turning), given, name)


@cache
def _part(bits: int, dim: int, dense: bool) -> Part:
    """Kept: a dense rotation takes a while to draw."""
    return part_of(bits, mx.arange(dim, dtype=mx.uint32), "haar" if dense else "hadamard", (3, dim))


def unpacking_cases(dense: bool) -> Iterator[Case]:
    """Three fifths of the same, packed: the kind of scale makes no difference to reading."""
    for case in islice(packing_cases(dense), 90):
        x, channels, table, turning = case.inputs
        codes, scale = packed(dense, x, channels, table, turning, **case.parameters)
        given = {"rows": case.parameters["rows"], "bits": case.parameters["bits"], "d": int(channels.size)}
        yield Case((codes, scale, table, turning.T if dense else turning), given, case.name)


def _eighths(bits: int, dim: int) -> mx.array:
    """A codebook whose edges are eighths, which rotated vectors of few equal numbers lie on exactly."""
    table, half = np.zeros(32, np.float32), 2 ** (bits - 1)
    table[: 2 * half] = (np.arange(2 * half) - half + 0.5) / 8
    table[16 : 15 + 2 * half] = np.arange(1 - half, half) / 8
    table[31] = 2 * np.sqrt(np.float32(dim))
    return mx.array(table)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], family: str, dtype: str) -> mx.array:
    """Numbers (..., D) of a family.

    ``outliers`` by channel; ``one-hot``: one number; ``zeros``: zero vectors beside others, zeros of both signs;
    ``constant``: vectors of one number; ``ties``: of one size, or one number, some with a scale above float16's;
    ``extreme``: the largest numbers, and norms that are no number; ``small``: scales that vanish; ``nan``: NaN and
    infinities.
    """
    x: Numbers = rng.standard_normal(shape)
    each = (*shape[:-1], 1)
    one = np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]
    if family == "outliers":
        x = x * np.exp(np.minimum(2 * rng.standard_normal(shape[-1:]), 5))
    if family == "one-hot":
        x = one * rng.choice([1.0, -3.5, 700.0], each)
    if family == "zeros":
        x = np.where(rng.random(each) < 0.5, rng.choice([0.0, -0.0], shape), x)
    if family in ("constant", "extreme"):
        x = np.broadcast_to(rng.choice([1.0, -3.7, 1e-3, 1000.3], each), shape)
    if family == "ties":
        x = np.where(rng.random(each) < 0.5, 1.0, one) * rng.choice([1.0, -2.0, 700.0], each)
        x[..., 0, :] = 60000.0
    if family == "extreme":
        most = 65504.0 if dtype == "float16" else 3.0e38
        x = np.sign(x) * np.where(rng.random(each) < 0.5, most, min(most, 60000.0))
        x = np.where(rng.random(each) < 0.5, x * rng.choice([-1.0, 1.0], shape), x)
    if family == "small":
        x = x * {"float32": 1e-23, "float16": 6e-8, "bfloat16": 1e-22}[dtype] * rng.choice([1.0, 1e3], each)
    if family == "nan":
        x = np.where(rng.random(shape) < 0.01, rng.choice([np.nan, np.inf, -np.inf], shape), x)
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
