"""Keys as the signs of a random sketch and a norm (after QJL, arXiv 2406.03482): no codebook, no scale, keys only."""

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl, setting
from vq_core.codec import bits, rotation
from vq_core.kernels import Snippet


@attrs.frozen
class Settings:
    sketch: int = setting(256, accepted=(64, 128, 256, 512), help="signs a key; sketch / D bits a number")


@attrs.frozen(eq=False)
class SignSketch:  # the prepared state, and the keys' half of attention
    sketch: mx.array  # (m, D)

    def prepare_query(self, queries):
        return queries.astype(mx.float32) @ self.sketch.T

    def scores(self, queries, tile):
        return (queries @ signs(tile).swapaxes(-1, -2)) * tile["weight"].swapaxes(-1, -2)


def signs(tile):
    return bits.unpack_bits(tile["signs"], 1).astype(mx.float32) * 2 - 1


@hookimpl
def vq_method():
    return MethodFacts("sign_sketch", "signs", Settings, ("keys",), capabilities=Capabilities(scale_equivariant=True))


@hookimpl
def vq_prepare(ctx, settings):
    return SignSketch(rotation.orthogonal_sketch(settings.sketch, ctx.head_dim, ctx.seed))


@hookimpl
def vq_layout(state):
    signs = Field("signs", "uint32", (128, state.sketch.shape[0] // 32), codes=True)
    return Layout(1, (signs, Field("weight", "float32", (128, 1))))


@hookimpl
def vq_encode(state, x):
    norm = mx.linalg.norm(x.astype(mx.float32), axis=-1, keepdims=True)
    return x.astype(mx.float32) @ state.sketch.T > 0, norm * ((mx.pi / 2) ** 0.5 / state.sketch.shape[0])


@hookimpl
def vq_pack(codes):
    return {"signs": bits.pack_bits(codes[0].astype(mx.uint32), 1), "weight": codes[1]}


@hookimpl
def vq_decode(state, packed):  # the vector whose dot product with a query is the estimate
    return signs(packed) @ state.sketch * packed["weight"]


@hookimpl
def vq_attend(state):
    return state


@hookimpl
def vq_snippet(state):
    """Sixteen signs of each of two tokens; the weight is the tokens' scale."""
    numbers = """
for (int i = 0; i < 2; ++i) {
  const uint word = signs[(t + i) * W + c / 32] >> uint(c & 31);
  for (int j = 0; j < 16; ++j) u[i * 16 + j] = (word >> uint(j) & 1u) != 0u ? 1.0f : -1.0f;
}
"""
    m = state.sketch.shape[0]
    affine = "return vq_float2(float(weight[t]), 0.0f);"
    return Snippet(
        "sign_sketch", 2, 16, numbers, affine, "token", integers={"W": m // 32}, width=m, prepare=state.prepare_query
    )
