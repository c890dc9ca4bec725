"""int8 around the mean of the first block: a method with a field of the sequence."""

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl
from vq_core.kernels import Snippet


@attrs.frozen
class Settings:
    """None."""


@hookimpl
def vq_method():
    capabilities = Capabilities(scale_equivariant=True, gaussian_error=lambda settings, head_dim: 1e-4)
    return MethodFacts("centred", "int8 a token, around the mean of the first 32", Settings, capabilities=capabilities)


@hookimpl
def vq_prepare(ctx):
    return ctx


@hookimpl
def vq_layout(ctx):
    codes, step = Field("codes", "int8", (128, ctx.head_dim), codes=True), Field("step", "float32", (128, 1))
    return Layout(block=32, fields=(codes, step, Field("mean", "float32", (1, ctx.head_dim), axis=None)))


@hookimpl
def vq_start(x):
    x = x.astype(mx.float32)
    return {"mean": mx.where(mx.abs(x) < mx.inf, x, 0).mean(axis=2, keepdims=True)}


@hookimpl
def vq_encode(x, sequence):
    rest = x.astype(mx.float32) - sequence["mean"]
    step = mx.abs(rest).max(axis=-1, keepdims=True) / 127
    codes = mx.where((step > 0) & (step < mx.inf), mx.round(rest / step), 0)
    return {"codes": mx.where(mx.isnan(codes), 0, codes).astype(mx.int8), "step": step}


@hookimpl
def vq_pack(codes):
    return codes


@hookimpl
def vq_decode(packed):
    return packed["codes"].astype(mx.float32) * packed["step"] + packed["mean"]


@hookimpl
def vq_snippet(state, side):
    tokens = 2 if side == "keys" else 1
    numbers = """
for (int i = 0; i < N; ++i) {
  const float by = step[t + i];
  for (int j = 0; j < 8; ++j) u[i * 8 + j] = float(codes[(t + i) * D + c + j]) * by + float(mean[c + j]);
}
"""
    return Snippet("centred", tokens, 8, numbers, integers={"N": tokens, "D": state.head_dim})
