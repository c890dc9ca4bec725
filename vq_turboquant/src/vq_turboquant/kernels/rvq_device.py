"""turboquant_rvq's device form: its two codes as one of twice the bits, c = c1 + 2**b c2, as tensor cores take codes.

Both tables are symmetric, so a number is one of 4**b sums of centroids, and the sum of 4**b - 1 - c is that of c with
the other sign: what :mod:`vq_turboquant.kernels.tile_order` lays out for one codebook of 2 b bits serves, for b of 1
and 2.  Of its words every other one, those of the tokens 16 i + 8 a + rest with a = 0, stands in ``codes``, and those
with a = 1 in ``rest``: as many bytes as in the method's own order, and no word is put together when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from vq_core.api import Field, Layout
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_turboquant.kernels.tile_order import BLOCK, PAGE, canonical, ordered
from vq_turboquant.rvq import State


def layout(state: State) -> Layout:
    """Of the device form: the canonical bytes, blocks in front."""
    words = (PAGE // BLOCK, state.dim * state.bits)
    return Layout(
        BLOCK,
        (
            Field("codes", "uint32", words, 0, codes=True),
            Field("rest", "uint32", words, 0, codes=True),
            Field("scale", "float16", (PAGE // BLOCK, BLOCK), 0),
        ),
        PAGE,
    )


def to_device(state: State, packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Canonical fields (..., *field.shape) of whole blocks of tokens, in the device's order; bits are kept."""
    first, second = (unpack_bits(packed[name], state.bits) for name in ("codes", "rest"))
    words, scale = ordered(state.side, 2 * state.bits, first + second * 2**state.bits, packed["scale"])
    return {"codes": words[..., 0::2], "rest": words[..., 1::2], "scale": scale}


def from_device(state: State, held: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Undo :func:`to_device`."""
    words = mx.stack([held["codes"], held["rest"]], axis=-1)
    codes, scale = canonical(state.side, 2 * state.bits, words.reshape(*words.shape[:-2], -1), held["scale"])
    both = 2**state.bits
    return {"codes": pack_bits(codes % both, state.bits), "rest": pack_bits(codes // both, state.bits), "scale": scale}
