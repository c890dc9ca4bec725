"""An outsider's first method: keep what comes. Exact, so it shows what the shell itself does to tokens."""

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl
from vq_core.kernels import Snippet


@attrs.frozen
class Settings:
    """None."""


@hookimpl
def vq_method():
    capabilities = Capabilities(exact=True, constant_exact=True, scale_equivariant=True, gaussian_error=lambda s, d: 0)
    return MethodFacts("identity", "stores the input in the model's dtype", Settings, capabilities=capabilities)


@hookimpl
def vq_prepare(ctx):
    return ctx


@hookimpl
def vq_layout(ctx):
    return Layout(block=1, fields=(Field("x", ctx.dtype, (128, ctx.head_dim), codes=True),))


@hookimpl
def vq_encode(x):
    return x


@hookimpl
def vq_pack(codes):
    return {"x": codes}


@hookimpl
def vq_decode(packed):
    return packed["x"].astype(mx.float32)


@hookimpl
def vq_snippet(state, side):
    tokens = 2 if side == "keys" else 1
    numbers = "for (int i = 0; i < N; ++i) for (int j = 0; j < 8; ++j) u[i * 8 + j] = float(x[(t + i) * D + c + j]);"
    return Snippet("identity", tokens, 8, numbers, integers={"N": tokens, "D": state.head_dim})
