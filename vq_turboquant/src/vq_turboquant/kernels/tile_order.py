"""The order in which tensor cores take codes of 2 and 4 bits of symmetric codebooks, and scales of tokens.

Blocks of 32 tokens stand in front, each of them one piece of every field.  A chunk of channels is what one word of
each of four rows holds: 64 channels at 2 bits, 32 at 4.  With token = 16 i + 8 a + rest, lane 4 g + t, place j of a
word and half b, the word [chunk][lane][i][a] holds

* of keys: token 16 i + 8 a + g, channel 8 (chunk * places + j) + 2 t + b;
* of values: token 16 i + 8 a + 2 t + b, channel 8 (chunk * places + j) + g.

Where half a chunk is left over (96 channels at 2 bits), its word [lane][a] holds i = 0 in the first half of the places
and i = 1 in the second.

Within a word codes lie so that they are found by permutations of bytes, four at once:

* 2 bits: j = 4 x + 2 y + o is in bits 16 x + 2 y + 4 (o + 2 b) and the next;
* 4 bits: code n = 2 j + b, if it is below 8, is in the first three bits of nibble n; else 15 less the code is, whose
  centroid is the same but for its sign, and the fourth bit of nibble 2 n + 1 (n below 4) or 2 n - 8 is 1.

A word of zeros is codes of zero in both orders: a page's rest is alike.

Scale of keys: [g][i][a].  Of values: [t][i][a][b].
"""

from __future__ import annotations

import mlx.core as mx

from vq_core.api import Side

BLOCK, PAGE = 32, 128


def ordered(side: Side, bits: int, codes: mx.array, scale: mx.array) -> tuple[mx.array, mx.array]:
    """Codes (..., n, D) and scales (..., n, 1) as words (..., n / 32, D * bits) and scales (..., n / 32, 32)."""
    lead, blocks, D = codes.shape[:-2], codes.shape[-2] // BLOCK, codes.shape[-1]
    codes, parts = codes.reshape(*lead, blocks, BLOCK, D), []
    for begin, width in chunks(bits, D):
        have, want, sizes = _axes(side, bits, width)
        x = codes[..., begin : begin + width].reshape(*lead, blocks, *(sizes[name] for name in have))
        x = _moved(x, have, want).reshape(*lead, blocks, width * bits, 32 // bits)
        parts.append(_bits_placed(bits, x).sum(axis=-1).astype(mx.uint32))
    x = scale.reshape(*lead, blocks, 2, 2, 8) if side == "keys" else scale.reshape(*lead, blocks, 2, 2, 4, 2)
    x = _moved(x, "iag", "gia") if side == "keys" else _moved(x, "iatb", "tiab")
    return mx.concatenate(parts, axis=-1), x.reshape(*lead, blocks, BLOCK)


def canonical(side: Side, bits: int, words: mx.array, scale: mx.array) -> tuple[mx.array, mx.array]:
    """Undo :func:`ordered`."""
    lead, blocks, D, at, parts = words.shape[:-2], words.shape[-2], words.shape[-1] // bits, 0, []
    for _, width in chunks(bits, D):
        have, want, sizes = _axes(side, bits, width)
        x = _bits_taken(bits, words[..., at : at + width * bits, None])
        x = _moved(x.reshape(*lead, blocks, *(sizes[name] for name in want)), want, have)
        parts.append(x.reshape(*lead, blocks * BLOCK, width))
        at += width * bits
    if side == "keys":
        x = _moved(scale.reshape(*lead, blocks, 8, 2, 2), "gia", "iag")
    else:
        x = _moved(scale.reshape(*lead, blocks, 4, 2, 2, 2), "tiab", "iatb")
    return mx.concatenate(parts, axis=-1), x.reshape(*lead, blocks * BLOCK, 1)


def chunks(bits: int, dim: int) -> list[tuple[int, int]]:
    """First channel and channels of each run that is laid out alike: whole chunks, and a half one."""
    chunk = 128 // bits
    whole = dim // chunk * chunk
    return [(begin, width) for begin, width in ((0, whole), (whole, dim - whole)) if width]


def _moved(x: mx.array, have: str, want: str) -> mx.array:
    """The last axes, named, in another order."""
    lead = x.ndim - len(have)
    return x.transpose(*range(lead), *(lead + have.index(name) for name in want))


# Axes: i, a: halves of the 32 tokens, quarters; g, t: the lane; c: chunk; j: place in a word; b: half of a word.
AXES = {"keys": ("iagcjtb", "cgtiajb"), "values": ("iatbcjg", "cgtiajb")}
HALF_AXES = {"keys": ("iagjtb", "gtaijb"), "values": ("iatbjg", "gtaijb")}


def _axes(side: Side, bits: int, width: int) -> tuple[str, str, dict[str, int]]:
    places = 16 // bits
    sizes = {"i": 2, "a": 2, "g": 8, "t": 4, "b": 2, "j": places, "c": width * bits // 128}
    if width * bits % 128:
        return (*HALF_AXES[side], sizes | {"j": places // 2})
    return (*AXES[side], sizes)


def _first_bits(bits: int) -> mx.array:
    """Where each code of a word begins, j before b."""
    if bits == 4:
        return mx.arange(8, dtype=mx.uint32) * 4
    places = [16 * (j >> 2) + 2 * (j >> 1 & 1) + 4 * ((j & 1) + 2 * b) for j in range(8) for b in range(2)]
    return mx.array(places, mx.uint32)


def _sign_bits() -> mx.array:
    return mx.array([8 * n + 7 if n < 4 else 8 * n - 29 for n in range(8)], mx.uint32)


def _bits_placed(bits: int, codes: mx.array) -> mx.array:
    """Codes (..., codes of a word), each where it lies in the word."""
    if bits == 2:
        return mx.left_shift(codes, _first_bits(bits))
    above = codes >= 8
    size = mx.where(above, 15 - codes, codes).astype(mx.uint32)
    return mx.left_shift(size, _first_bits(bits)) | mx.left_shift(above.astype(mx.uint32), _sign_bits())


def _bits_taken(bits: int, words: mx.array) -> mx.array:
    """Undo :func:`_bits_placed` of the summed words (..., 1)."""
    found = mx.right_shift(words, _first_bits(bits))
    if bits == 2:
        return found & mx.array(3, mx.uint32)
    size, above = found & mx.array(7, mx.uint32), mx.right_shift(words, _sign_bits()) & mx.array(1, mx.uint32)
    return mx.where(above != 0, 15 - size, size).astype(mx.uint32)
