"""Bit packing in MLX's affine layout: a least-significant-first stream of exactly ``bits`` bits in uint32 words.

Code i occupies bits i * bits to (i + 1) * bits - 1 of the stream; words are little-endian in it.  This is what
``mx.quantized_matmul`` reads for 2, 3, 4 and 8 bits.
"""

from __future__ import annotations

import math

import mlx.core as mx

from vq_core.errors import UnsupportedShapeError

WORD = 32


def words_for(count: int, bits: int) -> int:
    """Words that ``count`` codes take.

    Raises:
        UnsupportedShapeError: bits out of 1 to 16, or codes that do not fill whole words.
    """
    if not 1 <= bits <= 16:
        raise UnsupportedShapeError(f"codes of {bits} bits: accepted are 1 to 16")
    if count * bits % WORD:
        step = WORD // math.gcd(WORD, bits)
        raise UnsupportedShapeError(f"{count} codes of {bits} bits fill no whole words: use a multiple of {step} codes")
    return count * bits // WORD


def pack_bits(codes: mx.array, bits: int) -> mx.array:
    """Pack the last axis: codes (..., n) uint32 below 2**bits to (..., n * bits // 32) uint32."""
    count = codes.shape[-1]
    words = words_for(count, bits)
    if WORD % bits == 0:
        per = WORD // bits
        shifts = mx.arange(0, WORD, bits, dtype=mx.uint32)
        return mx.left_shift(codes.reshape(*codes.shape[:-1], words, per), shifts).sum(axis=-1).astype(mx.uint32)
    # A unit of lcm(bits, 32) bits: each code falls into one word or across two.
    unit_words = math.lcm(bits, WORD) // WORD
    unit = unit_words * WORD // bits
    grouped = codes.reshape(*codes.shape[:-1], words // unit_words, unit)
    out = []
    for w in range(unit_words):
        word = None
        for i in range(unit):
            place = i * bits - w * WORD
            if -bits < place < WORD:
                code = grouped[..., i]
                part = mx.left_shift(code, mx.array(place, mx.uint32)) if place >= 0 else mx.right_shift(
                    code, mx.array(-place, mx.uint32)
                )  # fmt: skip
                word = part if word is None else mx.bitwise_or(word, part)
        out.append(word)
    return mx.stack(out, axis=-1).reshape(*codes.shape[:-1], words)  # type: ignore[arg-type]


def unpack_bits(words: mx.array, bits: int) -> mx.array:
    """Undo :func:`pack_bits`: (..., w) uint32 to (..., w * 32 // bits) uint32.

    Raises:
        UnsupportedShapeError: bits out of 1 to 16, or words that hold no whole number of codes.
    """
    count = words.shape[-1] * WORD // bits
    words_for(count, bits)
    mask = mx.array(2**bits - 1, mx.uint32)
    if WORD % bits == 0:
        shifts = mx.arange(0, WORD, bits, dtype=mx.uint32)
        codes = mx.bitwise_and(mx.right_shift(words[..., None], shifts), mask)
        return codes.reshape(*words.shape[:-1], count)
    unit_words = math.lcm(bits, WORD) // WORD
    unit = unit_words * WORD // bits
    grouped = words.reshape(*words.shape[:-1], -1, unit_words)
    out = []
    for i in range(unit):
        word, place = divmod(i * bits, WORD)
        code = mx.right_shift(grouped[..., word], mx.array(place, mx.uint32))
        if place + bits > WORD:
            code = mx.bitwise_or(code, mx.left_shift(grouped[..., word + 1], mx.array(WORD - place, mx.uint32)))
        out.append(mx.bitwise_and(code, mask))
    return mx.stack(out, axis=-1).reshape(*words.shape[:-1], count)
