"""turboquant_prod's device form: codes of one or two bits and 128 signs of a token, as tensor cores take them.

Blocks of 32 tokens stand in front, each of them one piece of every field.  Codes of two bits lie as
:mod:`vq_turboquant.kernels.tile_order` says.  With token = 16 i + 8 a + g and lane 4 g + t, sign 8 j + 2 t + b is bit
j + 16 b of the word [lane][i][a]; codes of one bit, which are signs too, lie alike.  Scale and gap are at [g][i][a].

A word of zeros is codes and signs of zero in both orders: a page's rest is alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from vq_core.api import Field, Layout
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_turboquant.kernels.tile_order import BLOCK, PAGE, canonical, ordered
from vq_turboquant.prod import State


def layout(state: State) -> Layout:
    """Of the device form: the canonical bytes, blocks in front."""
    blocks = PAGE // BLOCK
    return Layout(
        BLOCK,
        (
            Field("codes", "uint32", (blocks, state.dim * state.bits), 0, codes=True),
            Field("sketch", "uint32", (blocks, state.signs), 0, codes=True),
            Field("scale", "float16", (blocks, BLOCK), 0),
            Field("gap", "float16", (blocks, BLOCK), 0),
        ),
        PAGE,
    )


def to_device(state: State, packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Canonical fields (..., *field.shape) of whole blocks of tokens, in the device's order; bits are kept."""
    codes = unpack_bits(packed["codes"], state.bits)
    two = state.bits == 2
    return {
        "codes": ordered("keys", 2, codes, packed["scale"])[0] if two else _signs_ordered(codes),
        "sketch": _signs_ordered(unpack_bits(packed["sketch"], 1)),
        "scale": _placed(packed["scale"]),
        "gap": _placed(packed["gap"]),
    }


def from_device(state: State, held: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Undo :func:`to_device`."""
    two = state.bits == 2
    codes = canonical("keys", 2, held["codes"], held["scale"])[0] if two else _signs(held["codes"])
    return {
        "codes": pack_bits(codes, state.bits),
        "sketch": pack_bits(_signs(held["sketch"]), 1),
        "scale": _taken(held["scale"]),
        "gap": _taken(held["gap"]),
    }


def _signs_ordered(bits: mx.array) -> mx.array:
    """Bits (..., n, 128) as words (..., n / 32, 128)."""
    lead, blocks = bits.shape[:-2], bits.shape[-2] // BLOCK
    x = _moved(bits.reshape(*lead, blocks, 2, 2, 8, 16, 4, 2), "iagjtb", "gtiabj")
    return pack_bits(x.reshape(*lead, blocks, 128, 32), 1)[..., 0]


def _signs(words: mx.array) -> mx.array:
    """Undo :func:`_signs_ordered`."""
    bits = unpack_bits(words[..., None], 1)
    lead, blocks = bits.shape[:-3], bits.shape[-3]
    x = _moved(bits.reshape(*lead, blocks, 8, 4, 2, 2, 2, 16), "gtiabj", "iagjtb")
    return x.reshape(*lead, blocks * BLOCK, 128)


def _placed(x: mx.array) -> mx.array:
    """Numbers of tokens (..., n, 1) as (..., n / 32, 32)."""
    lead, blocks = x.shape[:-2], x.shape[-2] // BLOCK
    return _moved(x.reshape(*lead, blocks, 2, 2, 8), "iag", "gia").reshape(*lead, blocks, BLOCK)


def _taken(x: mx.array) -> mx.array:
    """Undo :func:`_placed`."""
    lead, blocks = x.shape[:-2], x.shape[-2]
    return _moved(x.reshape(*lead, blocks, 8, 2, 2), "gia", "iag").reshape(*lead, blocks * BLOCK, 1)


def _moved(x: mx.array, have: str, want: str) -> mx.array:
    """The last axes, named, in another order."""
    lead = x.ndim - len(have)
    return x.transpose(*range(lead), *(lead + have.index(name) for name in want))
