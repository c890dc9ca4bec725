"""Inputs on which kernel and reference are compared: every dtype, sub and number of bits with several families."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.codec.bits import WORD
from vq_core.kernels import Case
from vq_vecinfer.kernels.reference import BITS, DTYPES, SUBS, quantized

FAMILIES = ("normal", "ties", "zeros", "nan", "extreme", "close")
DIMS = (64, 80, 96, 128, 16, 256)
CODES = 200
"""About as many codes a case, so that some threadgroups are not full: a code costs C sums."""

Numbers = np.ndarray[Any, Any]


def quantizing_cases() -> Iterator[Case]:
    """162 cases: 27 variants with each family, a third with a codebook for each place."""
    rng = np.random.default_rng(6)
    settings = itertools.product(FAMILIES, DTYPES, SUBS, BITS)
    for i, (family, dtype, sub, bits) in enumerate(settings):
        dim = DIMS[(i + i // 6) % len(DIMS)]
        places = dim // sub
        books = places if (i // 27 + i) % 2 and bits < 12 else 1
        block = WORD // np.gcd(WORD, places * bits)
        tokens = int(max(1, CODES * (1 + i % 2) // (places * block))) * block
        rows, heads = (1, 1) if tokens * places > CODES else (1 + i % 2, 1 + i % 3)
        book = codebook(rng, books, 2**bits, sub, family)
        x = numbers(rng, (rows, heads, tokens, dim), family, dtype, sub, book)
        arrays = (x, mx.array(book), mx.array(halves(book)))
        name = f"{family} {x.shape} {dtype}, sub {sub}, {bits} bits, {books} codebooks"
        yield Case(arrays, {"sub": sub, "bits": bits}, name)


def dequantizing_cases() -> Iterator[Case]:
    """The same, packed."""
    for case in quantizing_cases():
        x, book, half = case.inputs
        given = dict(case.parameters)
        (codes,) = quantized(x, book, half, **given)
        yield Case((codes, book), given | {"head_dim": x.shape[3]}, case.name)


KEY_DIMS = (64, 80, 112, 128, 16, 256, 48, 192)


def key_cases() -> Iterator[Case]:
    """As many, of keys: other head sizes, every second with a mean. ``nan``: some tokens hold one number that is none;
    ``extreme``: tokens whose transform overflows, and others beyond the limit that do not."""
    rng = np.random.default_rng(7)
    for i, (family, dtype, sub, bits) in enumerate(itertools.product(FAMILIES, DTYPES, SUBS, BITS)):
        dim = KEY_DIMS[(i + i // 8) % len(KEY_DIMS)]
        places = dim // sub
        books = places if (i // 27 + i) % 2 and bits < 12 else 1
        block = int(WORD // np.gcd(WORD, places * bits))
        rows, heads = 1 + i // 2 % 2, 1 + i % 3
        tokens = max(1, CODES * (1 + i % 2) // (places * block * rows * heads)) * block
        shape = (rows, heads, tokens, dim)
        book = codebook(rng, books, 2**bits, sub, family)
        x = numbers(rng, shape, "normal" if family == "nan" else family, "float32", sub, book)
        if family == "nan":
            spoilt = rng.random(shape[:3]) < 0.3
            at = rng.integers(0, dim, shape[:3])[..., None] == np.arange(dim)
            x = mx.where(mx.array(spoilt[..., None] & at), mx.array(rng.choice([np.nan, np.inf], shape)), x)
        if family == "extreme":
            x = x * mx.array(np.where(rng.random(shape[:3]) < 0.5, 1e-3, 1.0).astype(np.float32))[..., None]
        if family == "extreme" and dtype == "float16":
            x = mx.clip(x * 1e-34, -65504, 65504)
        scale = 2.0 ** (rng.integers(-2, 3, (heads, dim)) if family == "ties" else rng.standard_normal((heads, dim)))
        mean = rng.integers(-2, 3, (rows, heads, dim)) / 2 if family == "ties" else rng.standard_normal(
            (rows, heads, dim)
        )  # fmt: skip
        inverse, centre = (mx.array(a.astype(np.float32)) for a in (scale, mean))
        arrays = (x.astype(getattr(mx, dtype)), inverse, centre, mx.array(book), mx.array(halves(book)))
        given = {"sub": sub, "bits": bits, "centred": (i + i // 2) % 2}
        yield Case(arrays, given, f"{family} {shape} {dtype}, sub {sub}, {bits} bits, {books} codebooks")


def codebook(rng: np.random.Generator, books: int, count: int, sub: int, family: str) -> Numbers:
    """Centroids (books, count, sub), the first of each the origin.

    ``ties``: whole numbers of a small range, each centroid several times, so that sums are exact and equal.
    ``close``: sixteen beside each other, which the last bits of the sums decide between.
    """
    book: Numbers = rng.standard_normal((books, count, sub))
    if family == "ties":
        book = rng.integers(-2, 3, (books, count, sub)).astype(np.float64)
    if family == "close":
        book = np.repeat(book[:, ::16], 16, axis=1) + 3 + rng.integers(-3, 4, book.shape) * 2.0**-22
    book[:, 0] = 0
    return book.astype(np.float32)


def halves(book: Numbers) -> Numbers:
    """||c||^2 / 2 as ``vq_prepare`` makes it."""
    total: Numbers = np.zeros(book.shape[:2], np.float32)
    for j in range(book.shape[2]):
        total = total + book[..., j] * book[..., j]
    return total * np.float32(0.5)


def numbers(
    rng: np.random.Generator, shape: tuple[int, ...], family: str, dtype: str, sub: int, book: Numbers
) -> mx.array:
    """Numbers (B, H, n, D) of a family.

    ``normal``; ``ties``: half way between centroids that are there several times; ``zeros`` of both signs and small
    whole numbers; ``nan``: NaN and infinities; ``extreme``: the largest numbers; ``close``: far from zero.
    """
    x: Numbers = rng.standard_normal(shape)
    if family == "ties":
        x = rng.integers(-4, 5, shape) / 2
    if family == "zeros":
        x = np.where(rng.random(shape) < 0.7, rng.choice([0.0, -0.0], shape), rng.integers(-1, 2, shape))
    if family == "nan":
        x = np.where(rng.random(shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf], shape), x)
    if family == "extreme":
        most = 65504.0 if dtype == "float16" else 3.3e38
        x = np.where(rng.random(shape) < 0.5, np.clip(x * most, -most, most), x * 1e-30)
    if family == "close":
        x = x + 3
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
