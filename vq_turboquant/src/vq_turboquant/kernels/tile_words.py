"""Text that makes one word of the order of :mod:`vq_turboquant.kernels.tile_order`, for kernels that write it."""

from __future__ import annotations

from vq_core.api import Side

WORD = """
const uint places = 16u / uint(BITS), chunk = r / 128u, inner = r % 128u;
// Where half a chunk is left over its words hold both halves of the tokens.
const bool half_chunk = chunk * 128u + 128u > TOTAL;
const uint turn = half_chunk ? inner / 2u : inner / 4u, g = turn / 4u, t = turn & 3u, a = inner & 1u;
uint found = 0u;
VQ_UNROLL
for (uint j = 0u; j < places; ++j) {
  const uint i = half_chunk ? j / (places / 2u) : inner / 2u & 1u, place = half_chunk ? j % (places / 2u) : j;
  VQ_UNROLL
  for (uint b = 0u; b < 2u; ++b) {
    const uint channel = 8u * (chunk * places + place) + CHANNEL, token = 16u * i + 8u * a + TOKEN;
    const uint code = CODE;
    if (BITS == 2) {
      found |= (code & 3u) << (16u * (j / 4u) + 2u * (j / 2u & 1u) + 4u * ((j & 1u) + 2u * b));
    } else {
      const uint k = 2u * j + b, above = code >> 3 & 1u, size = (above != 0u ? ~code : code) & 7u;
      found |= size << (4u * k) | above << (k < 4u ? 8u * k + 7u : 8u * k - 29u);
    }
  }
}
"""
SIDE_PARTS: dict[Side, dict[str, str]] = {
    "keys": {"CHANNEL": "2u * t + b", "TOKEN": "g", "PLACE": "(r / 2u & 1u) * 16u + (r & 1u) * 8u + r / 4u"},
    "values": {
        "CHANNEL": "g",
        "TOKEN": "2u * t + b",
        "PLACE": "(r / 4u & 1u) * 16u + (r / 2u & 1u) * 8u + r / 8u * 2u + (r & 1u)",
    },
}


def filled(text: str, side: Side, **words: str) -> str:
    """A text with what a side's lanes hold, and further words, in the places of their names."""
    for name, part in (SIDE_PARTS[side] | words).items():
        text = text.replace(name, part)
    return text


def word(side: Side, bits: str, total: str, code: str) -> str:
    """Text of ``found``, word ``r`` of a block.

    Args:
        side: Whose.
        bits: Text of a code's bits, 2 or 4, a compile-time number.
        total: Text of the words of a block.
        code: Text of the code of ``token``, of the block, and ``channel``; higher bits may be set.
    """
    return filled(WORD, side, BITS=bits, TOTAL=total, CODE=code)
