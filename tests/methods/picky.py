"""A method with every restriction of shape, side and trimming, so that the kit's own refusals are tested."""

import attrs
import mlx.core as mx

from vq_core.api import (
    Capabilities,
    Field,
    Layout,
    MethodFacts,
    UnsupportedShapeError,
    hookimpl,
)
from vq_core.kernels import Snippet

HEAD_DIMS = (64, 128)


@attrs.frozen
class Settings:
    """None."""


@hookimpl
def vq_method():
    capabilities = Capabilities(head_dims=HEAD_DIMS, exact=True, trimmable=False)
    return MethodFacts("picky", "restricted in every way", Settings, sides=("values",), capabilities=capabilities)


@hookimpl
def vq_prepare(ctx):
    if ctx.head_dim not in HEAD_DIMS:
        raise UnsupportedShapeError(f"picky: head size {ctx.head_dim}; accepted are 64 and 128")
    return ctx


@hookimpl
def vq_layout(ctx):
    return Layout(block=16, page=64, fields=(Field("x", ctx.dtype, (ctx.head_dim, 64), axis=1, codes=True),))


@hookimpl
def vq_encode(x):
    return x.swapaxes(-1, -2)


@hookimpl
def vq_pack(codes):
    return {"x": codes}


@hookimpl
def vq_decode(packed):
    return packed["x"].swapaxes(-1, -2).astype(mx.float32)


@hookimpl
def vq_snippet(state):
    """Values along tokens, so a tile is some of those too."""
    numbers = "for (int i = 0; i < 4; ++i) for (int j = 0; j < 4; ++j) u[i * 4 + j] = float(x[(c + j) * 64 + t + i]);"
    return Snippet("picky", 4, 4, numbers)
