"""Snippets for the matrix skeleton of codes of 2 and 4 bits of symmetric codebooks, one scale a token.

The codes lie as :mod:`vq_turboquant.kernels.tile_order` says.  A centroid is a half, made from two bytes.  One
permutation looks up four codes at once:

* 2 bits: both sizes are scaled by one number that makes their low bytes equal, so only the high byte is looked up,
  out of a table of four; where no number does, as for sizes whose quotient is a little above a power of two, the low
  byte is looked up too;
* 4 bits: a code is one of eight halves and whether its sign is turned; low and high bytes of the eight are looked up
  in two registers each.

Scales multiply the scores of keys, in float32, and the weights of values, in float16: the skeleton's p times scale.

Error, against float32 attention on the decoded codes: a centroid is off by 1e-4 of itself at most where low bytes are
equal, else by 2^-11, as every half is; the rotated query and the weights by 2^-11.  Relative L2 stays below 2e-3 for
normal queries; it grows with the scores' spread, as that of float16 keys does.  Scales of values lie between 2^-10 and
4094: larger ones can overflow float16, for weights reach 2^4; smaller ones lose bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache

import attrs

from vq_core.api import Side
from vq_core.kernels.skeleton.matrix import MatrixField, MatrixSnippet

PAIRS = {
    2: """
// Centroids of places 2 l and 2 l + 1 of a word, each a pair of halves.
VQ_FN uint2 tile_SIDE_pairs(uint word, uint l) {
  const uint some = ((l & 1u) != 0u ? word >> 2 : word) & 0x33333333u;
  const uint high = vq_permute(HIGH, 0u, l < 2u ? some : vq_permute(some, 0u, 0x4432u));
  return vq_uint2(vq_permute(high, LOW, 0x2404u), vq_permute(high, LOW, 0x3414u));
}
""",
    4: """
// Centroids of places 2 l and 2 l + 1 of a word, each a pair of halves.
VQ_FN uint2 tile_SIDE_pairs(uint word, uint l) {
  const uint all = word & 0x77777777u, some = l == 0u ? all : vq_permute(all, 0u, 0x4432u);
  const uint low = vq_permute(LOW, LOWER, some);
  const uint high = vq_permute(HIGH, HIGHER, some) ^ ((l == 0u ? word : word << 4) & 0x80808080u);
  return vq_uint2(vq_permute(low, high, 0x5140u), vq_permute(low, high, 0x7362u));
}
""",
}

BOTH_BYTES = """
// Centroids of places 2 l and 2 l + 1 of a word, each a pair of halves.
VQ_FN uint2 tile_SIDE_pairs(uint word, uint l) {
  const uint some = ((l & 1u) != 0u ? word >> 2 : word) & 0x33333333u, four = l < 2u ? some : some >> 16;
  const uint high = vq_permute(HIGH, 0u, four), low = vq_permute(LOW, 0u, four);
  return vq_uint2(vq_permute(high, low, 0x2604u), vq_permute(high, low, 0x3715u));
}
"""
"""The same as of 2 bits for sizes whose low bytes differ."""

KEYS = """
VQ_FN float matrix_fold(uint) { return 1.0f; }
// 16 tokens, of words `low` and `high`, by the 16 channels of a look-up.
VQ_FN float4 tile_k_mma(float4 c, uint low, uint high, uint l, uint b0, uint b1) {
  const uint2 one = tile_k_pairs(low, l), two = tile_k_pairs(high, l);
  return vq_mma_m16n8k16(c, one.x, two.x, one.y, two.y, b0, b1);
}
VQ_FN void matrix_scores(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) query, VQ_LOCAL_PTR(float4) c) {
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    float4 c0 = vq_float4(0.0f, 0.0f, 0.0f, 0.0f), c1 = c0;
    VQ_UNROLL
    for (uint x = 0u; x < DIM / CHUNK; ++x) {
      const uint4 w = FOUR(K);
      VQ_UNROLL
      for (uint l = 0u; l < PLACES / 2u; ++l) {
        const uint b0 = query[x * PLACES + 2u * l], b1 = query[x * PLACES + 2u * l + 1u];
        c0 = tile_k_mma(c0, w.x, w.y, l, b0, b1);
        c1 = tile_k_mma(c1, w.z, w.w, l, b0, b1);
      }
    }
HALF
    const uint2 s = vq_view<uint2>(step + (K_SCALE_AT + u * K_SCALE_WORDS))[lane / 4u];
    const float2 s0 = matrix_floats(s.x, half(0.0f)), s1 = matrix_floats(s.y, half(0.0f));
    c[2u * u] = vq_float4(c0.x * s0.x, c0.y * s0.x, c0.z * s0.y, c0.w * s0.y);
    c[2u * u + 1u] = vq_float4(c1.x * s1.x, c1.y * s1.x, c1.z * s1.y, c1.w * s1.y);
  }
}
"""
KEYS_HALF = """
    const uint2 w = TWO(K);
    VQ_UNROLL
    for (uint l = 0u; l < PLACES / 4u; ++l) {
      const uint b0 = query[DIM / CHUNK * PLACES + 2u * l], b1 = query[DIM / CHUNK * PLACES + 2u * l + 1u];
      c0 = tile_k_mma(c0, w.x, w.y, l, b0, b1);
      c1 = tile_k_mma(c1, w.x, w.y, l + PLACES / 4u, b0, b1);
    }
"""

VALUES = """
// The 16 channels of a look-up by 16 tokens, of words `low` and `high`.
VQ_FN float4 tile_v_mma(float4 c, uint low, uint high, uint l, uint b0, uint b1) {
  const uint2 one = tile_v_pairs(low, l), two = tile_v_pairs(high, l);
  return vq_mma_m16n8k16(c, one.x, one.y, two.x, two.y, b0, b1);
}
VQ_FN void matrix_values(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) p, VQ_LOCAL_PTR(float4) acc,
                         VQ_LOCAL_PTR(float4) extra) {
  const uint ones = lane < 4u ? 0x3c003c00u : 0u;
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    // Row 8 of the extra tile: the weights.
    extra[0] = vq_mma_m16n8k16(extra[0], 0u, ones, 0u, ones, p[4u * u], p[4u * u + 1u]);
    extra[0] = vq_mma_m16n8k16(extra[0], 0u, ones, 0u, ones, p[4u * u + 2u], p[4u * u + 3u]);
    const uint4 s = vq_view<uint4>(step + (V_SCALE_AT + u * V_SCALE_WORDS))[lane & 3u];
    const uint p0 = matrix_times(p[4u * u], s.x), p1 = matrix_times(p[4u * u + 1u], s.y);
    const uint p2 = matrix_times(p[4u * u + 2u], s.z), p3 = matrix_times(p[4u * u + 3u], s.w);
    VQ_UNROLL
    for (uint x = 0u; x < DIM / CHUNK; ++x) {
      const uint4 w = FOUR(V);
      VQ_UNROLL
      for (uint l = 0u; l < PLACES / 2u; ++l) {
        const uint n = x * PLACES / 2u + l;
        acc[n] = tile_v_mma(acc[n], w.x, w.y, l, p0, p1);
        acc[n] = tile_v_mma(acc[n], w.z, w.w, l, p2, p3);
      }
    }
HALF
  }
}
VQ_FN void matrix_finish(uint lane, VQ_LOCAL_PTR(float4) acc, VQ_LOCAL_PTR(float4) extra) {
  VQ_UNROLL
  for (uint n = 0u; n < DIM / 16u; ++n)
    acc[n] = vq_float4(acc[n].x * LEVEL, acc[n].y * LEVEL, acc[n].z * LEVEL, acc[n].w * LEVEL);
}
"""
VALUES_HALF = """
    const uint2 w = TWO(V);
    VQ_UNROLL
    for (uint l = 0u; l < PLACES / 4u; ++l) {
      const uint n = DIM / CHUNK * PLACES / 2u + l;
      acc[n] = tile_v_mma(acc[n], w.x, w.y, l, p0, p1);
      acc[n] = tile_v_mma(acc[n], w.x, w.y, l + PLACES / 4u, p2, p3);
    }
"""


WHOLE = {
    "FOUR": "vq_view<uint4>(step + (@_CODES_AT + u * @_CODES_WORDS))[x * 32u + lane]",
    "TWO": "vq_view<uint2>(step + (@_CODES_AT + u * @_CODES_WORDS + DIM / CHUNK * 128u))[lane]",
}
"""A lane's words [i][a] of chunk x of block u, and [a] of the half chunk: all in one field."""
APART = {
    "FOUR": "tile_$_four(vq_view<uint2>(step + (@_CODES_AT + u * @_CODES_WORDS))[x * 32u + lane], "
    "vq_view<uint2>(step + (@_REST_AT + u * @_REST_WORDS))[x * 32u + lane])",
    "TWO": "vq_uint2(step[@_CODES_AT + u * @_CODES_WORDS + DIM / CHUNK * 64u + lane], "
    "step[@_REST_AT + u * @_REST_WORDS + DIM / CHUNK * 64u + lane])",
}
"""The same where a = 0 stands in one field and a = 1 in another."""
APART_TEXT = """
VQ_FN uint4 tile_SIDE_four(uint2 one, uint2 two) { return vq_uint4(one.x, two.x, one.y, two.y); }
"""


EQUAL_BYTES = 1e-4
"""What equal low bytes may put a level off."""


@attrs.frozen
class Codebook:
    """Centroids as halves.

    Attributes:
        halves: Bits of those of the lower half of the codes; code 2^b - 1 - c has that of c with the other sign.
        scale: What a half is to be multiplied by.
    """

    halves: tuple[int, ...]
    scale: float

    def levels(self) -> tuple[float, ...]:
        """Those of the lower half of the codes, as numbers that the stored scale multiplies."""
        return tuple(_value(bits) * self.scale for bits in self.halves)


def _value(bits: int) -> float:
    found: float = struct.unpack("<e", struct.pack("<H", bits))[0]
    return found


def _half(value: float) -> int:
    found: int = struct.unpack("<H", struct.pack("<e", value))[0]
    return found


@cache
def codebook(lower: tuple[float, ...]) -> Codebook:
    """Halves of two levels with equal low bytes, where there are some, or of two or eight as they are.

    Of all pairs of halves with equal low bytes the one whose quotient is nearest.
    """
    plain = Codebook(tuple(map(_half, lower)), 1.0)
    if len(lower) == 8:
        return plain
    sizes = sorted(map(abs, lower))
    wanted, found = math.log(sizes[1] / sizes[0]), []
    for small in range(0x3C00, 0x4000):
        for large in range(small + 256, small + 4096, 256):
            quotient = math.log(_value(large) / _value(small))
            found.append((abs(quotient - wanted), small, large))
    off, small, large = min(found)
    if off > 2 * EQUAL_BYTES:
        return plain
    halves = [(small if abs(v) == sizes[0] else large) | (0x8000 if v < 0 else 0) for v in lower]
    return Codebook(tuple(halves), math.sqrt(sizes[0] * sizes[1] / (_value(small) * _value(large))))


def _tables(book: Codebook) -> dict[str, str]:
    """Bytes as the texts look them up, four in a word."""

    def word(numbers: Sequence[int]) -> str:
        return f"0x{sum(n << 8 * i for i, n in enumerate(numbers)):08x}u"

    halves = book.halves
    if len(halves) == 2:
        both = [*halves, *(n ^ 0x8000 for n in reversed(halves))]
        low = [n & 255 for n in both]
        return {"HIGH": word([n >> 8 for n in both]), "LOW": word(low[:1] if _alike(book) else low)}
    low, high = [n & 255 for n in halves], [n >> 8 for n in halves]
    return {"LOWER": word(low[4:]), "HIGHER": word(high[4:]), "LOW": word(low[:4]), "HIGH": word(high[:4])}


def _alike(book: Codebook) -> bool:
    """Whether one low byte serves all."""
    return len({n & 255 for n in book.halves}) == 1


@cache
def look_up(side: str, lower: tuple[float, ...]) -> tuple[str, float]:
    """Text of ``tile_<side>_pairs`` for two levels of the lower half of the codes, and what they are scaled by."""
    book = codebook(lower)
    text = PAIRS[2] if _alike(book) else BOTH_BYTES
    for word, value in (_tables(book) | {"SIDE": side}).items():
        text = text.replace(word, value)
    return text, book.scale


@cache
def snippet(name: str, side: Side, dim: int, lower: tuple[float, ...], apart: bool = False) -> MatrixSnippet:
    """The snippet of one codebook, without what brings queries into the stored basis and sums out of it.

    Args:
        name: Of the codebook and its code.
        side: Whose.
        dim: D.
        lower: Levels of the lower half of the codes, two or eight.
        apart: Whether the words stand in two fields, ``codes`` and ``rest``.
    """
    book, keys, k, bits = codebook(lower), side == "keys", side[0], 2 if len(lower) == 2 else 4
    places, chunk = 16 // bits, 128 // bits
    half = (KEYS_HALF if keys else VALUES_HALF) if dim % chunk else ""
    pairs = BOTH_BYTES if bits == 2 and not _alike(book) else PAIRS[bits]
    text = (APART_TEXT if apart else "") + (pairs + (KEYS if keys else VALUES)).replace("HALF\n", half)
    read = {f"{word}({k.upper()})": part for word, part in (APART if apart else WHOLE).items()}
    read = {word: part.replace("$", k).replace("@", k.upper()) for word, part in read.items()}
    words = read | _tables(book) | {
        "SIDE": k, "PLACES": f"{places}u", "DIM": f"{dim}u", "CHUNK": f"{chunk}u", "LEVEL": f"{book.scale:.9e}f",
    }  # fmt: skip
    for word, value in words.items():
        text = text.replace(word, value)
    names = ("codes", "rest") if apart else ("codes",)
    fields = [MatrixField(field, "uint32", dim * bits // len(names)) for field in names]
    fields.append(MatrixField("scale", "float16", 16))
    return MatrixSnippet(side, f"{name}_{k}{dim}", dim, tuple(fields), text, book.scale if keys else 1.0)
