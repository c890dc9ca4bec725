"""KIVI's device form: the order in which tensor cores take codes, scales and zeros; see docs/kernels/device-form.md.

Blocks of 32 tokens stand in front, each of them one piece of every field.  Words hold pairs of codes, the first in the
low half: a pair's place in its half is that of a whole number in the last bits of a float16.  A chunk of channels is
what one word of each of four rows holds: 64 channels at 2 bits, 32 at 4, 16 at 8.

With token = 16 i + 8 a + rest, lane 4 g + t, place j of a word and half b, the word [chunk][lane][i][a] holds

* of keys: token 16 i + 8 a + g, channel 8 (chunk * places + j) + 2 t + b;
* of values: token 16 i + 8 a + 2 t + b, channel 8 (chunk * places + j) + g.

Where half a chunk is left over (96 or 160 channels at 2 bits), its word [lane][a] holds i = 0 in the first half of
the places and i = 1 in the second.

Scale and zero of keys: [channels / 32][t][4][b] is channel 32 x + 8 k + 2 t + b.  Of values: [group][t][i][a][b] is
token 16 i + 8 a + 2 t + b.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from vq_core.api import Field, Layout, Side
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.kernels.skeleton.matrix import HEAD_DIMS
from vq_kivi.method import KiviState, vq_layout

BLOCK = 32
BITS = (2, 4, 8)


def declines(state: KiviState) -> str:
    """Why a layer side has no device form; empty where it has."""
    if state.bits not in BITS:
        return f"codes of {state.bits} bits do not fill halves of words; {', '.join(map(str, BITS))} do"
    if state.group_size != BLOCK:
        return f"groups of {state.group_size} are not the {BLOCK} tokens or channels of a tile"
    if state.metadata != "float16":
        return f"scale and zero are {state.metadata}; tensor cores take float16"
    if state.head_dim not in HEAD_DIMS:
        return f"head size {state.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    return ""


def layout(state: KiviState) -> Layout:
    """Of the device form: the canonical bytes, blocks in front."""
    page, D = 128, state.head_dim
    wide = {field.name: field.wide for field in vq_layout(state).fields}
    return Layout(
        BLOCK,
        (
            Field("codes", "uint32", (page // BLOCK, D * state.bits), 0, codes=True),
            Field("scale", "float16", (page // BLOCK, D), 0, wide=wide["scale"]),
            Field("zero", "float16", (page // BLOCK, D), 0, wide=wide["zero"]),
        ),
        page,
    )


def to_device(state: KiviState, packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Canonical fields (..., *field.shape) of whole blocks of tokens, in the device's order; bits are kept."""
    codes = unpack_bits(packed["codes"], state.bits)
    if state.side == "keys":
        codes = codes.swapaxes(-1, -2)
    lead, blocks, D = codes.shape[:-2], codes.shape[-2] // BLOCK, state.head_dim
    codes = codes.reshape(*lead, blocks, BLOCK, D)
    parts = [
        _words(state.side, state.bits, codes[..., begin : begin + width])
        for begin, width in _chunks(state.bits, state.head_dim)
    ]
    found = {"codes": mx.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]}
    for name in ("scale", "zero"):
        x = packed[name]
        if state.side == "keys":  # (D, blocks) -> channels (x, k, t, b) -> (x, t, k, b)
            x = x.swapaxes(-1, -2).reshape(*lead, blocks, D // 32, 4, 4, 2)
            x = x.swapaxes(-2, -3)
        else:  # (tokens, groups) -> tokens (i, a, t, b), groups -> (group, t, i, a, b)
            x = x.reshape(*lead, blocks, 2, 2, 4, 2, D // 32)
            x = _moved(x, "iatbg", "gtiab")
        found[name] = x.reshape(*lead, blocks, D)
    return found


def from_device(state: KiviState, held: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Undo :func:`to_device`."""
    words, at, parts = held["codes"], 0, []
    lead, blocks, D = words.shape[:-2], words.shape[-2], state.head_dim
    for _, width in _chunks(state.bits, state.head_dim):
        size = width * state.bits
        parts.append(_codes(state.side, state.bits, words[..., at : at + size], width))
        at += size
    codes = mx.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    codes = codes.reshape(*lead, blocks * BLOCK, D)
    codes = codes.swapaxes(-1, -2) if state.side == "keys" else codes
    found = {"codes": pack_bits(codes, state.bits)}
    for name in ("scale", "zero"):
        x = held[name]
        if state.side == "keys":
            x = x.reshape(*lead, blocks, D // 32, 4, 4, 2).swapaxes(-2, -3)
            found[name] = x.reshape(*lead, blocks, D).swapaxes(-1, -2)
        else:
            x = x.reshape(*lead, blocks, D // 32, 4, 2, 2, 2)
            found[name] = _moved(x, "gtiab", "iatbg").reshape(*lead, blocks * BLOCK, D // 32)
    return found


def _chunks(bits: int, dim: int) -> list[tuple[int, int]]:
    """First channel and channels of each run that is laid out alike: whole chunks, and a half one."""
    chunk = 128 // bits
    whole = dim // chunk * chunk
    return [(begin, width) for begin, width in ((0, whole), (whole, dim - whole)) if width]


def _moved(x: mx.array, have: str, want: str) -> mx.array:
    """The last axes, named, in another order."""
    lead = x.ndim - len(have)
    return x.transpose(*range(lead), *(lead + have.index(name) for name in want))


# Axes: i, a: halves of the 32 tokens, quarters; g, t: the lane; c: chunk; j: place in a word; b: half of a word.
KEYS = ("iagcjtb", "cgtiajb")
VALUES = ("iatbcjg", "cgtiajb")
KEYS_HALF = ("iagjtb", "gtaijb")
VALUES_HALF = ("iatbjg", "gtaijb")


def _axes(side: Side, bits: int, width: int) -> tuple[str, str, dict[str, int]]:
    places = 16 // bits
    sizes = {"i": 2, "a": 2, "g": 8, "t": 4, "b": 2, "j": places, "c": width * bits // 128}
    if width * bits % 128:
        have, want = KEYS_HALF if side == "keys" else VALUES_HALF
        return have, want, sizes | {"j": places // 2}
    return (*(KEYS if side == "keys" else VALUES), sizes)


def _shifts(bits: int) -> mx.array:
    return (mx.arange(16 // bits, dtype=mx.uint32)[:, None] * bits + mx.array([0, 16], mx.uint32)).reshape(-1)


def _words(side: Side, bits: int, codes: mx.array) -> mx.array:
    """Codes (..., 32 tokens, channels) of a run of channels to words (..., channels * bits)."""
    have, want, sizes = _axes(side, bits, codes.shape[-1])
    lead = codes.shape[:-2]
    x = _moved(codes.reshape(*lead, *(sizes[name] for name in have)), have, want)
    pairs = mx.left_shift(x.reshape(*lead, codes.shape[-1] * bits, 32 // bits), _shifts(bits))
    return pairs.sum(axis=-1).astype(mx.uint32)


def _codes(side: Side, bits: int, words: mx.array, width: int) -> mx.array:
    """Undo :func:`_words`."""
    have, want, sizes = _axes(side, bits, width)
    lead = words.shape[:-1]
    x = mx.bitwise_and(mx.right_shift(words[..., None], _shifts(bits)), mx.array(2**bits - 1, mx.uint32))
    x = _moved(x.reshape(*lead, *(sizes[name] for name in want)), want, have)
    return x.reshape(*lead, BLOCK, width)
