"""TurboQuant-Prod: keys in codes of b - 1 bits, and one random sign a coordinate of what they leave (arXiv 2504.19874).

A key k of D numbers is stored as its root mean square s, a code of b - 1 bits for each coordinate of y = P k / s (P a
random rotation, as turboquant_mse does it), and of the residual r = y - centroid[c] its own root mean square g and the
signs h of S r, m random projections.  A score is estimated without bias, for any query q:

    <q, k> ~ s (<P q, centroid[c]> + g sqrt(D) K / m <S P q, h>)

K belongs to S: sqrt(pi / 2) for independent N(0, 1) numbers (``sketch=gaussian``, as published), and
sqrt(pi) Gamma((D + 1) / 2) / (Gamma(D / 2) sqrt(D)) for orthogonal rows of norm sqrt(D) (``sketch=orthogonal``), which
is .2% less at D = 128.  At b = 1 there is no code: the sketch is of k itself.

**Never a default.** As published it loses at every width to turboquant_mse with ``scale=unbiased``, whose scores have
no bias either, and which stores 16 / D bits less.  D times the squared error of <q, k> / (|q| |k|), D = 128, 40 draws
of P and S (seeds 0 to 39) x 2,000 independent pairs, as tests/test_prod.py has them with DRAWS = 40:

    ====  ========  ==========  ====================================
    bits  gaussian  orthogonal  turboquant_mse, ``scale=unbiased``
    ====  ========  ==========  ====================================
    1     1.560     .566        .568
    2     .561      .202        .130
    3     .182      .0653       .0346
    4     .0533     .0192       .0093
    ====  ========  ==========  ====================================

The noise of the signs goes through the softmax: others report worse perplexity for it than for turboquant_mse of as
many bits.  ``orthogonal`` has 2.75 times less of it for the same bytes.

Bits per stored number: ``b + 32 / D`` for float16 models (two numbers a token), ``b + 64 / D`` for others; at one bit
half of that, for r is k.  A head size that is no multiple of 32 gets as many signs as fill words (80: m = 96), each of
a projection of its own, and codes that fill words.  Values are refused: they need a reconstruction, not a score.

``vq_decode`` gives the vector whose product with q is the estimate, s P^T (centroid[c] + g sqrt(D) K / m S^T h); as a
reconstruction it is worse than the codes alone.  A key of zeros decodes to zeros.  NaN, Inf and numbers whose squares'
sum is beyond float32 (from about 1e19 on) make their own token not finite, and no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, PrepareContext, hookimpl, setting
from vq_core.api.attend import Tile
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.codec.codebook import boundaries, count_below, gaussian_centroids, gaussian_error
from vq_core.codec.hadamard import SignHadamard, normaliser
from vq_core.codec.projection import HIGH, LOW, MOST, DenseRotation, Projection, fold_sum
from vq_core.codec.rotation import gaussian_matrix, orthogonal_sketch
from vq_core.kernels import KernelOffer, Snippet
from vq_core.kernels.device_form import DeviceForm
from vq_turboquant.parts import rotation_for
from vq_turboquant.scale import filled, root, unit_vectors

BLOCK, TILE_DIM = 32, 128
"""Tokens of a block, and head size, on tensor cores."""


@attrs.frozen
class Settings:
    """Settings of turboquant_prod."""

    bits: int = setting(
        4, accepted=(1, 2, 3, 4), help="bits of a number: one is a sign of the sketch, the others a code"
    )
    sketch: str = setting(
        "gaussian", accepted=("gaussian", "orthogonal"), help="published, or 2.75 times less noise at no bytes"
    )
    rotation: str = setting(
        "auto",
        accepted=("auto", "hadamard", "haar"),
        help="two sign-Hadamard rounds, a dense matrix, or the first where the size has one",
    )


def sketch_constant(kind: str, dim: int) -> float:
    """K: what makes the mean of signs times projections a dot product."""
    if kind == "gaussian":
        return math.sqrt(math.pi / 2)
    return math.sqrt(math.pi / dim) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))


def _error(settings: Settings, dim: int) -> float:
    """Relative squared error of the decoded vector: the sketch's noise is in all directions but the residual's."""
    left = gaussian_error(settings.bits - 1) if settings.bits > 1 else 1.0
    spread = math.pi / 2 if settings.sketch == "gaussian" else math.pi / 2 - 1 + 2 / dim
    return 1.1 * left * spread


@attrs.frozen(eq=False)
class State:
    """The prepared state, which is also the keys' half of attention.

    Attributes:
        bits: Of a code, b - 1; 0: no codes.
        dim: D.
        dtype: Of scale and residual's size.
        rotation: P; ``None`` without codes.
        sketch: S, (m, D).
        factor: sqrt(D) K / m.
        basis: (W + m, D) float32: P with rows of zeros below where codes fill up words, then factor S P.
        edges: Boundaries of the table.
        levels: Its centroids, (2**bits,) float32.
        arrays, undoing: The constants as kernels take them, for packing and for unpacking.
        tile_tokens: Centroids and signs are made for so many tokens at once.
    """

    bits: int
    dim: int
    dtype: str
    rotation: SignHadamard | DenseRotation | None
    sketch: Projection
    factor: float
    basis: mx.array
    edges: tuple[float, ...]
    levels: mx.array
    arrays: tuple[mx.array, ...] = ()
    undoing: tuple[mx.array, ...] = ()
    tile_tokens: int = 1024

    @property
    def codes(self) -> int:
        """W, codes of a token."""
        return filled(self.dim, self.bits) if self.bits else 0

    @property
    def signs(self) -> int:
        """m."""
        return int(self.sketch.first.shape[0])

    def centroids(self, tile: Tile) -> mx.array:
        """(N, H, n, W)."""
        return mx.take(self.levels, unpack_bits(tile["codes"], self.bits))

    def prepare_query(self, queries: mx.array) -> mx.array:
        """Rotate the queries, and project them: (..., W + m)."""
        return queries.astype(mx.float32) @ self.basis.T

    def scores(self, queries: mx.array, tile: Tile) -> mx.array:
        """Of the codes, and of the signs."""
        sketched = queries[..., self.codes :] @ signs_of(tile).swapaxes(-1, -2)
        if self.bits:
            coded = queries[..., : self.codes] @ self.centroids(tile).swapaxes(-1, -2)
            sketched = coded + sketched * tile["gap"].swapaxes(-1, -2)
        return sketched * tile["scale"].swapaxes(-1, -2)


def signs_of(tile: Tile) -> mx.array:
    """h of a tile, (N, H, n, m) of +1 and -1."""
    return unpack_bits(tile["sketch"], 1).astype(mx.float32) * 2 - 1


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    return MethodFacts(
        "turboquant_prod",
        "codes of b - 1 bits and one random sign of the residual: unbiased scores, for keys",
        Settings,
        sides=("keys",),
        paper="arXiv 2504.19874",
        capabilities=Capabilities(head_dims=tuple(range(1, MOST + 1)), scale_equivariant=True, gaussian_error=_error),
        verified=("bits=4", "bits=3", "bits=2", "bits=1"),
    )


@hookimpl
def vq_prepare(ctx: PrepareContext, settings: Settings) -> State:
    """Rotation, sketch and codebook."""
    bits, dim = settings.bits - 1, ctx.head_dim
    signs = filled(dim, 1)
    drawn = {"gaussian": gaussian_matrix, "orthogonal": orthogonal_sketch}[settings.sketch]
    sketch = Projection.of(drawn(signs, dim, (ctx.seed, 2)))
    factor = dim**0.5 * sketch_constant(settings.sketch, dim) / signs
    basis, rotation = sketch.matrix * factor, None
    if bits:
        rotation = rotation_for(settings.rotation, dim, (ctx.seed, 1))
        turned = mx.pad(rotation.matrix, [(0, filled(dim, bits) - dim), (0, 0)])
        basis = mx.concatenate([turned, basis @ rotation.matrix])
    levels = gaussian_centroids(bits) if bits else (0.0,)
    state = State(
        bits=bits,
        dim=dim,
        dtype="float16" if ctx.dtype == "float16" else "float32",
        rotation=rotation,
        sketch=sketch,
        factor=factor,
        basis=basis,
        edges=boundaries(levels),
        levels=mx.array(levels),
    )
    from vq_turboquant.kernels.prod import arrays

    return attrs.evolve(state, arrays=arrays(state), undoing=arrays(state, undo=True))


@hookimpl
def vq_layout(state: State) -> Layout:
    """Codes, signs and their scales, of 128 tokens."""
    # Where tensor cores take blocks of 32 tokens, neither order packs earlier than the other.
    fields = [Field("sketch", "uint32", (128, state.signs // 32), codes=True), Field("scale", state.dtype, (128, 1))]
    if state.bits:
        words = state.codes * state.bits // 32
        fields = [
            Field("codes", "uint32", (128, words), codes=True),
            *fields,
            Field("gap", state.dtype, (128, 1)),
        ]
    return Layout(1 if no_tiles(state) else BLOCK, fields)


def no_tiles(state: State) -> str:
    """Why a side's codes have no form for tensor cores; empty where they have."""
    if state.bits not in (1, 2):
        what = f"codes of {state.bits} bits" if state.bits else "a sketch without codes"
        return f"{what}: tensor cores take codes of 1 and 2 bits beside the sketch, bits=2 and bits=3"
    if state.dtype != "float16":
        return f"scales are {state.dtype}, those of models that are not float16; tensor cores take float16"
    if state.dim != TILE_DIM:
        return f"head size {state.dim} is not {TILE_DIM}: four lanes take a token's signs, a word each"
    return ""


@hookimpl
def vq_encode(state: State, x: mx.array) -> dict[str, mx.array]:
    """Codes, unpacked, of the rotated key; signs of the projected residual, in the basis in which it was coded."""
    unit, scale = unit_vectors(x, state.dtype)
    if not state.bits:
        return {"sketch": state.sketch(unit) > 0, "scale": scale}
    assert state.rotation is not None
    y = state.rotation.rotate(unit) * root(state.dim)
    codes = count_below(y, state.edges)
    residual = y - mx.take(state.levels, codes)
    gap = mx.sqrt(fold_sum(residual.square()) / state.dim).astype(getattr(mx, state.dtype))
    signs = state.sketch(residual * normaliser(state.dim)) > 0
    codes = mx.pad(codes, [(0, 0)] * 3 + [(0, state.codes - state.dim)])
    return {"codes": codes, "sketch": signs, "scale": scale, "gap": gap}


@hookimpl
def vq_pack(state: State, codes: dict[str, mx.array]) -> dict[str, mx.array]:
    """Codes and signs into words."""
    packed = {"sketch": pack_bits(codes["sketch"].astype(mx.uint32), 1)}
    if state.bits:
        packed["codes"] = pack_bits(codes["codes"], state.bits)
    return codes | packed


@hookimpl
def vq_decode(state: State, packed: Tile) -> mx.array:
    """The vector whose product with a query is the estimated score."""
    signs, whole = signs_of(packed), state.sketch.scale / HIGH
    # Signs times whole numbers: sums that are exact, in any order.
    back = (signs @ state.sketch.first) * whole + (signs @ state.sketch.second) * (whole / LOW)
    size = packed["scale"].astype(mx.float32) * root(state.dim)
    if not state.bits:
        return (back * state.factor) * normaliser(state.dim) * size
    assert state.rotation is not None
    y = state.centroids(packed)[..., : state.dim] + (packed["gap"].astype(mx.float32) * state.factor) * back
    return state.rotation.undo(y * normaliser(state.dim)) * size


@hookimpl
def vq_kernels() -> Sequence[KernelOffer]:
    """Rotate, quantize, project what is left and pack in one pass, and back: :mod:`vq_turboquant.kernels.prod`."""
    from vq_turboquant.kernels.prod import OFFERS

    return OFFERS


@hookimpl
def vq_attend(state: State) -> State:
    """Straight from codes and signs."""
    return state


@hookimpl
def vq_snippet(state: State) -> Snippet:
    """Centroids, then signs, each with a scale of its own."""
    from vq_turboquant.kernels.prod_snippet import snippet

    return snippet(state)


@hookimpl
def vq_device() -> Sequence[DeviceForm]:
    """Codes of 1 and 2 bits and signs as tensor cores take them: :mod:`vq_turboquant.kernels.prod_form`."""
    from vq_turboquant.kernels.prod_form import FORMS

    return FORMS
