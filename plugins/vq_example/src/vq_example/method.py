"""A vector as a random rotation sees it: codes of a fixed codebook, and one scale a token.

A token x is stored as its root mean square r and, for each coordinate of P x / r, the nearest of the 2**bits
centroids that are best for N(0, 1); P is a random orthogonal matrix.  After the rotation every vector looks
Gaussian, so one table serves all data, and nothing has to be calibrated (TurboQuant-MSE, arXiv 2504.19874).

The rotation is never undone a token: queries are rotated once a step, and the weighted sum of values is rotated
back once a step.  The scale is the root mean square and not the norm, because it cannot be larger than the largest
number of the vector: what fits float16 as a model's output fits as a scale.

Bits per stored number: ``bits + 16 / D`` for float16 models, ``bits + 32 / D`` for others; a head size whose codes
fill no whole 32-bit words takes the next one that does (80 at 3 bits: 96 codes).
"""

from __future__ import annotations

import math

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, PrepareContext, Side, hookimpl, setting
from vq_core.api.attend import Tile
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.codec.codebook import boundaries, count_below, gaussian_centroids
from vq_core.codec.rotation import random_orthogonal
from vq_core.kernels import Snippet


@attrs.frozen
class Settings:
    """Settings of the example."""

    bits: int = setting(4, accepted=(1, 2, 3, 4), help="bits of a code; bytes grow in proportion")


@attrs.frozen(eq=False)
class Rotated:
    """The prepared state, which is also both halves of attention.

    Where the codes of D coordinates fill no whole 32-bit words, the rotation has rows of zeros below: what is coded
    for them is multiplied by zero wherever it is read.
    """

    bits: int
    dtype: str
    rotation: mx.array  # (W, D), W codes a token
    levels: mx.array  # (2**bits,)
    tile_tokens: int = 1024  # centroids are made for so many tokens at once

    def unit(self, tile: Tile) -> mx.array:
        """Centroids of a tile, (N, H, n, W), before the scale."""
        return mx.take(self.levels, unpack_bits(tile["codes"], self.bits))

    def prepare_query(self, queries: mx.array) -> mx.array:
        """Rotate the queries as the keys were."""
        return queries.astype(mx.float32) @ self.rotation.T

    def scores(self, queries: mx.array, tile: Tile) -> mx.array:
        """Dot products in the rotated basis."""
        return (queries @ self.unit(tile).swapaxes(-1, -2)) * tile["scale"].swapaxes(-1, -2)

    def accumulate(self, weights: mx.array, tile: Tile) -> mx.array:
        """Sums in the rotated basis."""
        return (weights * tile["scale"].swapaxes(-1, -2).astype(mx.float32)) @ self.unit(tile)

    def finish(self, sums: mx.array) -> mx.array:
        """Rotate back."""
        return sums @ self.rotation


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    # The table's squared error on N(0, 1) with 5% to spare.
    can = Capabilities(scale_equivariant=True, gaussian_error=lambda s, d: (0.382, 0.124, 0.0364, 0.01)[s.bits - 1])
    return MethodFacts("example", "rotation, codebook, one scale", Settings, paper="arXiv 2504.19874", capabilities=can)


@hookimpl
def vq_prepare(ctx: PrepareContext, settings: Settings) -> Rotated:
    """The rotation of this side and the codebook."""
    rotation = random_orthogonal(ctx.head_dim, (ctx.seed, ctx.side == "keys"))
    rotation = mx.pad(rotation, [(0, -ctx.head_dim % (32 // math.gcd(32, settings.bits))), (0, 0)])
    dtype = "float16" if ctx.dtype == "float16" else "float32"
    return Rotated(settings.bits, dtype, rotation, mx.array(gaussian_centroids(settings.bits)))


@hookimpl
def vq_layout(state: Rotated) -> Layout:
    """Codes and scales of 128 tokens."""
    words = state.rotation.shape[0] * state.bits // 32
    return Layout(1, (Field("codes", "uint32", (128, words), codes=True), Field("scale", state.dtype, (128, 1))))


@hookimpl
def vq_encode(state: Rotated, x: mx.array) -> tuple[mx.array, mx.array]:
    """Scale, rotate, count the boundaries below; from the scale as it is stored."""
    x = x.astype(mx.float32)
    scale = mx.sqrt(x.square().mean(axis=-1, keepdims=True)).astype(getattr(mx, state.dtype))
    rotated = x @ state.rotation.T / mx.where(scale > 0, scale, 1)
    return count_below(rotated, boundaries(gaussian_centroids(state.bits))), scale


@hookimpl
def vq_pack(state: Rotated, codes: tuple[mx.array, mx.array]) -> dict[str, mx.array]:
    """Codes into words."""
    return {"codes": pack_bits(codes[0], state.bits), "scale": codes[1]}


@hookimpl
def vq_decode(state: Rotated, packed: Tile) -> mx.array:
    """Scale times centroid, rotated back."""
    return (state.unit(packed) * packed["scale"].astype(mx.float32)) @ state.rotation


@hookimpl
def vq_attend(state: Rotated) -> Rotated:
    """Straight from the codes, on either side."""
    return state


@hookimpl
def vq_snippet(state: Rotated, side: Side) -> Snippet:
    """How fused attention reads eight codes of a token: centroids by look-up, one scale a token."""
    tokens, words = 2 if side == "keys" else 1, state.rotation.shape[0] * state.bits // 32
    numbers = """
for (int i = 0; i < N; ++i) {
  const int bit = c * bits, at = (t + i) * W + bit / 32;
  uint word = codes[at] >> uint(bit & 31);
  if ((bit & 31) + 8 * bits > 32) word |= codes[at + 1] << uint(32 - (bit & 31));
  VQ_UNROLL
  for (int j = 0; j < 8; ++j) u[i * 8 + j] = levels[word >> uint(j * bits) & ((1u << uint(bits)) - 1u)];
}
"""
    return Snippet(
        "example", tokens, 8, numbers, "return vq_float2(float(scale[t]), 0.0f);", "token",
        constants={"levels": mx.pad(state.levels, (0, 16 - state.levels.size))},
        integers={"N": tokens, "bits": state.bits, "W": words},
        width=state.rotation.shape[0], prepare=state.prepare_query, finish=state.finish,
    )  # fmt: skip
