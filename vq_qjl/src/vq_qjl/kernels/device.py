"""QJL's device form: the order in which tensor cores take signs, 128 of a token at a time, and norms of tokens.

Blocks of 32 tokens stand in front, each of them one piece of every field.  With token = 16 i + 8 a + g, sign
128 x + 8 j + 2 t + b and lane 4 g + t, the sign is bit j + 16 b of the word [x][lane][i][a]: one shift brings a pair to
where two halves have their signs.  The norm is at [g][i][a].

A word of zeros is signs of zero in both orders: a page's rest is alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from vq_core.api import Field, Layout
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.kernels.skeleton.matrix import HEAD_DIMS, MOST_WIDTH
from vq_qjl.method import PAGE, Qjl

BLOCK, CHUNK = 32, 128
"""Tokens of a block; signs of a token that four lanes hold, in a word each."""
WIDTHS = tuple(range(CHUNK, MOST_WIDTH + 1, CHUNK))


def declines(state: Qjl) -> str:
    """Why a sketch has no form for tensor cores; empty where it has."""
    if state.outliers:
        return "with outliers each group of 32 tokens has a sketched query of its own"
    if state.sketch.width not in WIDTHS:
        return f"a sketch of {state.sketch.width} signs is none of {', '.join(map(str, WIDTHS))}"
    if state.metadata != "float16":
        return f"norms are {state.metadata}, those of models that are not float16; tensor cores take float16"
    if state.dim not in HEAD_DIMS:
        return f"head size {state.dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    return ""


def layout(state: Qjl) -> Layout:
    """Of the device form: the canonical bytes, blocks in front."""
    return Layout(
        BLOCK,
        (
            Field("signs", "uint32", (PAGE // BLOCK, state.sketch.width), 0, codes=True),
            Field("weight", "float16", (PAGE // BLOCK, BLOCK), 0),
        ),
        PAGE,
    )


def to_device(state: Qjl, packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Canonical fields (..., *field.shape) of whole blocks of tokens, in the device's order; bits are kept."""
    return ordered(packed["signs"], packed["weight"])


def ordered(words: mx.array, weight: mx.array) -> dict[str, mx.array]:
    """The same of words (..., n, m / 32) and norms (..., n, 1)."""
    bits = unpack_bits(words, 1)
    lead, blocks, width = bits.shape[:-2], bits.shape[-2] // BLOCK, bits.shape[-1]
    # Axes: i, a, g: the token; x, j, t, b: the sign.
    x = _moved(bits.reshape(*lead, blocks, 2, 2, 8, width // CHUNK, 16, 4, 2), "iagxjtb", "xgtiabj")
    norms = _moved(weight.reshape(*lead, blocks, 2, 2, 8), "iag", "gia")
    packed = pack_bits(x.reshape(*lead, blocks, width, BLOCK), 1)
    return {"signs": packed.reshape(*lead, blocks, width), "weight": norms.reshape(*lead, blocks, BLOCK)}


def from_device(state: Qjl, held: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Undo :func:`to_device`."""
    bits = unpack_bits(held["signs"][..., None], 1)
    lead, blocks, width = bits.shape[:-3], bits.shape[-3], bits.shape[-2]
    x = _moved(bits.reshape(*lead, blocks, width // CHUNK, 8, 4, 2, 2, 2, 16), "xgtiabj", "iagxjtb")
    norms = _moved(held["weight"].reshape(*lead, blocks, 8, 2, 2), "gia", "iag")
    return {
        "signs": pack_bits(x.reshape(*lead, blocks * BLOCK, width), 1),
        "weight": norms.reshape(*lead, blocks * BLOCK, 1),
    }


def _moved(x: mx.array, have: str, want: str) -> mx.array:
    """The last axes, named, in another order."""
    lead = x.ndim - len(have)
    return x.transpose(*range(lead), *(lead + have.index(name) for name in want))
