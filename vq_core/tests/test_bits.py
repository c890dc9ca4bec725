"""Bit packing against a plain bit stream in numpy, and against the layout that MLX's own operations read."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import UnsupportedShapeError
from vq_core.codec.bits import pack_bits, unpack_bits, words_for

BITS = (*range(1, 9), 10, 12)


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes one after another, lowest bit first, in little-endian words."""
    flat = (codes[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    packed = np.packbits(flat.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")
    return packed.view("<u4")


def some_codes(bits: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 2**bits, shape, dtype=np.uint32)


@pytest.mark.parametrize("bits", BITS)
def test_equals_a_plain_bit_stream(bits: int) -> None:
    codes = some_codes(bits, 2, 3, 96 * 32 // math.gcd(32, bits))
    codes[0, 0], codes[0, 1] = 0, 2**bits - 1
    packed = pack_bits(mx.array(codes), bits)
    assert packed.dtype == mx.uint32
    np.testing.assert_array_equal(np.array(packed), stream(codes, bits))
    np.testing.assert_array_equal(np.array(unpack_bits(packed, bits)), codes)


@pytest.mark.parametrize("bits", BITS)
def test_no_code_touches_its_neighbours(bits: int) -> None:
    count = 32 // math.gcd(32, bits)
    alone = np.eye(count, dtype=np.uint32) * (2**bits - 1)
    np.testing.assert_array_equal(np.array(unpack_bits(pack_bits(mx.array(alone), bits), bits)), alone)


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_is_the_layout_of_mx_quantize(bits: int) -> None:
    x = mx.array(np.random.default_rng(0).standard_normal((4, 256), np.float32))
    words, scales, biases = mx.quantize(x, group_size=32, bits=bits)
    codes = unpack_bits(words, bits)
    by_hand = codes.reshape(4, -1, 32) * scales[..., None] + biases[..., None]
    want = mx.dequantize(words, scales, biases, group_size=32, bits=bits)
    np.testing.assert_allclose(np.array(by_hand.reshape(4, 256)), np.array(want), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.array(pack_bits(codes, bits)), np.array(words))


def test_three_bits_are_exactly_three() -> None:
    assert pack_bits(mx.zeros((1, 128), mx.uint32), 3).nbytes == 128 * 3 // 8


@pytest.mark.parametrize(
    ("count", "bits", "said"), [(10, 3, "multiple of 32"), (7, 4, "multiple of 8"), (8, 17, "1 to 16")]
)
def test_what_fills_no_words_is_refused(count: int, bits: int, said: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=said):
        words_for(count, bits)


def test_a_strided_view_packs_like_a_copy() -> None:
    """Case 42: a prefix view of an over-allocated buffer."""
    buffer = mx.array(some_codes(3, 2, 4, 160))
    view = buffer[..., :96]
    assert mx.array_equal(pack_bits(view, 3), pack_bits(mx.contiguous(view), 3))
    words = pack_bits(buffer, 3)
    assert mx.array_equal(unpack_bits(words[..., 3:9], 3), buffer[..., 32:96])
