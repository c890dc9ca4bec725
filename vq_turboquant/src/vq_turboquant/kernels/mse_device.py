"""turboquant_mse's device form: codes and scales in the order of :mod:`vq_turboquant.kernels.tile_order`."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from vq_core.api import Field, Layout
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_turboquant.kernels.tile_order import BLOCK, PAGE, canonical, ordered
from vq_turboquant.mse import MseState


def layout(state: MseState) -> Layout:
    """Of the device form: the canonical bytes, blocks in front."""
    return Layout(
        BLOCK,
        (
            Field("codes", "uint32", (PAGE // BLOCK, state.head_dim * state.parts[0].bits), 0, codes=True),
            Field("scale", "float16", (PAGE // BLOCK, BLOCK), 0),
        ),
        PAGE,
    )


def to_device(state: MseState, packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Canonical fields (..., *field.shape) of whole blocks of tokens, in the device's order; bits are kept."""
    bits = state.parts[0].bits
    words, scale = ordered(state.side, bits, unpack_bits(packed["codes"], bits), packed["scale"])
    return {"codes": words, "scale": scale}


def from_device(state: MseState, held: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Undo :func:`to_device`."""
    bits = state.parts[0].bits
    codes, scale = canonical(state.side, bits, held["codes"], held["scale"])
    return {"codes": pack_bits(codes, bits), "scale": scale}
