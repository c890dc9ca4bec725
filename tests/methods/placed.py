"""Stores what it is given with the place it was told, and decodes to it moved by the distance to the place of reading.

A shell that mistakes a position or a page changes the numbers.
"""

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl


@attrs.frozen
class Settings:
    """None."""


@hookimpl
def vq_method():
    return MethodFacts("placed", "stores tokens and their places", Settings, capabilities=Capabilities(exact=True))


@hookimpl
def vq_prepare(ctx):
    return ctx


@hookimpl
def vq_layout(ctx):
    fields = (
        Field("x", "float32", (32, ctx.head_dim), codes=True),
        Field("at", "int32", (1, 32), axis=1),
    )
    return Layout(8, fields, 32)


@hookimpl
def vq_encode(x, positions):
    return x.astype(mx.float32), mx.broadcast_to(positions[:, None, None], (*x.shape[:2], 1, x.shape[2]))


@hookimpl
def vq_pack(codes):
    return {"x": codes[0], "at": codes[1]}


@hookimpl
def vq_decode(packed, positions):
    moved = (packed["at"] - positions[:, None, None]).swapaxes(-1, -2)
    return packed["x"] + moved
