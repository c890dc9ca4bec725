"""turboquant_mse's part of the fused attention: eight codes of a token as centroids, one scale a token.

A code of 1 bit is a sign, and one of 2 bits a sign and one of two sizes, so these become numbers without a look-up;
wider ones are looked up.  Where a mean was removed it is added here, in the stored basis, so that a tile's numbers
are the stored values; else the scale is applied once a token.
"""

from __future__ import annotations

import struct

from vq_core.api import Side
from vq_core.codec.codebook import gaussian_centroids
from vq_core.kernels.skeleton.snippet import Snippet
from vq_turboquant.mse import MseState
from vq_turboquant.parts import Part

TILE = 8


def _bits_of(value: float) -> str:
    """A float32 by its bits."""
    return f"{struct.unpack('<I', struct.pack('<f', value))[0]}u"


def _level(bits: int, table: int) -> str:
    """Text of the level of the code in the last bits of ``code``."""
    sizes = [_bits_of(2 * v) for v in gaussian_centroids(bits)[2 ** (bits - 1) :]]
    if bits == 1:
        return f"as_type<float>({sizes[0]} | (~code & 1u) << 31)"
    if bits == 2:  # codes 0 to 3 are the larger and the smaller below zero, the smaller and the larger above
        return f"as_type<float>(((code ^ code >> 1) & 1u ? {sizes[0]} : {sizes[1]}) | (~code & 2u) << 30)"
    return f"levels[{table} + int(code & {2**bits - 1}u)]"


def _numbers(part: Part, number: int, channel: int, word: int, words: int, tokens: int, scales: int, mean: bool) -> str:
    """Text that reads a tile of one part.

    Args:
        part, number: Which.
        channel, word: Where it begins among a token's numbers and words.
        words: Of a token.
        tokens: Of the tile.
        scales: Of a token.
        mean: Whether numbers are scaled and the mean is added here.
    """
    bits = part.bits
    straddles = f"if ((bit & 31) > {32 - TILE * bits}) word |= codes[at + 1] << uint(32 - (bit & 31));"
    value = _level(bits, 16 * number)
    if mean:
        value = f"{value} * size + turned[c + j]"
    return f"""
for (int i = 0; i < {tokens}; ++i) {{
  const int bit = (c - {channel}) * {bits}, at = (t + i) * {words} + {word} + (bit >> 5);
  uint word = codes[at] >> uint(bit & 31);
  {straddles if 32 % (TILE * bits) else ""}
  {f"const float size = float(scale[(t + i) * {scales} + {number}]);" if mean else ""}
  VQ_UNROLL
  for (int j = 0; j < {TILE}; ++j) {{
    const uint code = word >> uint(j * {bits});
    u[i * {TILE} + j] = {value};
  }}
}}
"""


def snippet(state: MseState, side: Side) -> Snippet:
    """One side's."""
    tokens, scales = 2 if side == "keys" else 1, len(state.parts)
    words, texts, channel, word = sum(part.words for part in state.parts), [], 0, 0
    for number, part in enumerate(state.parts):
        texts.append(_numbers(part, number, channel, word, words, tokens, scales, state.mean))
        channel, word = channel + part.width, word + part.words
    numbers, affine = texts[0], "return vq_float2(float(scale[t]), 0.0f);"
    if scales == 2:
        first = state.parts[0].width
        numbers = f"if (c < {first}) {{{texts[0]}}} else {{{texts[1]}}}"
        affine = f"return vq_float2(float(scale[t * 2 + (c < {first} ? 0 : 1)]), 0.0f);"
    looked_up = any(part.bits > 2 for part in state.parts)
    return Snippet(
        name="turboquant_mse_mean" if state.mean else "turboquant_mse",
        tokens=tokens,
        channels=TILE,
        numbers=numbers,
        affine="" if state.mean else affine,
        per="" if state.mean else "token",
        constants={"levels": state.levels} if looked_up else {},
        integers={"N": tokens, **{f"bits{i}": part.bits for i, part in enumerate(state.parts)}, "W": words},
        width=state.width,
        prepare=state.prepare_query,
        finish=state.finish,
        signs=state.signs,
    )
