"""VecInfer's device form: the order in which tensor cores take codes of 8 bits for 8 channels.

Blocks of 32 tokens stand in front, each of them one piece.  With token = 16 i + 8 a + rest, lane 4 g + t and M places a
token, the code

* of keys, token 16 i + 8 a + g, place 4 x + q, is byte q of the word [x][g][i][a];
* of values, token 16 i + 8 a + 2 t + b, place 4 x + 2 y + h, is byte 2 a + b of the word [x][h][t][y][i].

A word of zeros is codes of zero in both orders: a page's rest is alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from vq_core.api import Field, Layout, Side
from vq_core.kernels.skeleton.matrix import HEAD_DIMS
from vq_vecinfer.method import PAGE, VecInfer

BLOCK = 32
SUB, BITS = 8, 8
AXES = {"keys": ("iagxq", "xgiaq"), "values": ("iatbxyh", "xhtyiab")}
"""Of a block's codes by token and place, and in the device's order."""
SIZES = {"i": 2, "a": 2, "g": 8, "q": 4, "t": 4, "b": 2, "y": 2, "h": 2}


def declines(state: VecInfer) -> str:
    """Why a side has no form for tensor cores; empty where it has."""
    if (state.sub, state.bits) != (SUB, BITS):
        said = f"codes of {state.bits} bits for {state.sub} channels"
        return f"{said}: tensor cores take {BITS} bits for {SUB} channels, centroids=256,sub=8"
    if state.mean is not None:
        return "mean=true: products on tensor cores leave a mean out"
    if state.head_dim not in HEAD_DIMS:
        return f"head size {state.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    return ""


def layout(state: VecInfer) -> Layout:
    """Of the device form: the canonical bytes, blocks in front."""
    return Layout(BLOCK, (Field("codes", "uint32", (PAGE // BLOCK, state.head_dim), 0, codes=True),), PAGE)


def to_device(state: VecInfer, packed: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Canonical words of whole blocks of tokens, in the device's order; bits are kept."""
    return {"codes": ordered(state.side, state.head_dim, packed["codes"])}


def ordered(side: Side, dim: int, words: mx.array) -> mx.array:
    """The same of words (..., n * D / 32): (..., n / 32, D)."""
    have, want = AXES[side]
    lead = words.shape[:-1]
    x = mx.contiguous(words).view(mx.uint8)
    moved = _moved(x.reshape(*lead, -1, *_sizes(have, dim)), have, want)
    return mx.contiguous(moved.reshape(*lead, -1, 4 * dim)).view(mx.uint32)


def from_device(state: VecInfer, held: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Undo :func:`to_device`."""
    want, have = AXES[state.side]
    lead = held["codes"].shape[:-2]
    x = mx.contiguous(held["codes"]).view(mx.uint8)
    moved = _moved(x.reshape(*lead, -1, *_sizes(have, state.head_dim)), have, want)
    return {"codes": mx.contiguous(moved.reshape(*lead, -1)).view(mx.uint32)}


def _sizes(axes: str, dim: int) -> tuple[int, ...]:
    sizes = SIZES | {"x": dim // (4 * SUB)}
    return tuple(sizes[name] for name in axes)


def _moved(x: mx.array, have: str, want: str) -> mx.array:
    """The last axes, named, in another order."""
    lead = x.ndim - len(have)
    return x.transpose(*range(lead), *(lead + have.index(name) for name in want))
