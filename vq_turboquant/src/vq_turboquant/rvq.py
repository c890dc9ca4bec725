"""TurboQuant-RVQ: a rotated coordinate, then what its code leaves, each in a code of b bits (VeloxQuant-MLX).

A token x of D numbers is stored as its root mean square s and two codes for each coordinate.  With the coordinates
y = P x / s of a random rotation P, which look like N(0, 1) whatever x is:

    c1 = the nearest of the 2**b centroids that are best for N(0, 1)
    c2 = the nearest of the 2**b centroids of stage 2 to r = y - centroid1[c1]
    x^ = s P^T (centroid1[c1] + centroid2[c2])

Both codes are stored, so ``bits=2+2`` is 4 bits a number and no 2-bit method.  Bits per stored number are
``2 b + 16 / D`` for float16 models and ``2 b + 32 / D`` for others: at D = 128 2.125, 4.125, 6.125 and 8.125.  A head
size whose codes fill no whole 32-bit words takes the next one that does (80 at 3+3: 96 codes a stream).

**What it costs in quality.** Without a rotation between the stages two codes of b bits are one code of 2 b bits with
centroids that are not the best: one code of 2 b bits has less error, and turboquant_mse offers it up to 4 bits.
Relative squared error on N(0, 1), 2e6 samples, seed 0 (tests/test_rvq.py; the last column is theory):

    ========  =======  =======  ===============
    b + b     laplace  fitted   one 2b-bit code
    ========  =======  =======  ===============
    1 + 1     .1338    .1306    .1175
    2 + 2     .0260    .0197    .0095
    3 + 3     .00270   .00194   .00064
    4 + 4     .00034   .00018   .00004
    ========  =======  =======  ===============

**Stage 2.** ``laplace`` is the published one: best for Laplace's law.  Its scale is nowhere published; here the law
has the residual's own standard deviation (.6029, .3430, .1859, .0975 of s).  Matching the mean magnitude instead gives
.1306, .0283, .00251 and .00031: better but at 2+2.  ``fitted`` is best for the residual itself, a box with tails.

Where this differs from the original: values are coded too (there they stay float16); 3-bit codes are exactly 3 bits
(there ten a word); the root mean square is stored and not the norm, because it cannot be larger than the largest
number of the vector: what fits float16 as a model's output fits as a scale.  Codes are computed from the scale as it
is stored.

A vector of zeros decodes to zeros.  NaN, Inf and numbers whose squares' sum is beyond float32 (from about 1e19 on)
make their own token not finite, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, PrepareContext, Side, hookimpl, setting
from vq_core.api.attend import Tile
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.codec.codebook import (
    boundaries,
    count_below,
    gaussian_centroids,
    gaussian_error,
    laplace_centroids,
    residual_centroids,
)
from vq_core.codec.hadamard import SignHadamard, normaliser
from vq_core.codec.projection import DenseRotation
from vq_core.kernels import KernelOffer, Snippet
from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.matrix import HEAD_DIMS as TILED
from vq_turboquant.parts import rotation_for
from vq_turboquant.scale import filled, root, unit_vectors

HEAD_DIMS = (*range(1, 513), 640, 768, 896, 1024)
"""All that a dense matrix serves, and above them those with a Hadamard matrix."""
BLOCK = 32
"""Tokens that are packed at once where tensor cores serve."""
BITS = ("1+1", "2+2", "3+3", "4+4")
ERRORS = {"laplace": (0.1338, 0.0260, 0.00270, 0.00034), "fitted": (0.1306, 0.0197, 0.00194, 0.00018)}


@attrs.frozen
class Settings:
    """Settings of turboquant_rvq."""

    bits: str = setting("2+2", accepted=BITS, help="bits of a number's two codes; both are stored: 2+2 is 4 bits")
    stage2: str = setting(
        "laplace",
        accepted=("laplace", "fitted"),
        help="stage 2's table, at no bytes: published, or best for the residual",
    )
    rotation: str = setting(
        "auto",
        accepted=("auto", "hadamard", "haar"),
        help="two sign-Hadamard rounds, a dense matrix, or the first where the size has one",
    )


def stage2_centroids(bits: int, table: str) -> tuple[float, ...]:
    """The second table, in units of the token's scale."""
    if table == "fitted":
        return residual_centroids(bits, bits)
    spread = gaussian_error(bits) ** 0.5
    return tuple(spread * c for c in laplace_centroids(bits))


@attrs.frozen(eq=False)
class State:
    """The prepared state, which is also both halves of attention.

    Attributes:
        bits: Of each code, b.
        dim: D.
        dtype: Of the scale.
        rotation: P.
        matrix: (W, D) float32, P with rows of zeros below where codes fill up words: W codes a stream.
        edges: Boundaries of the two tables.
        levels: Their centroids, (2**b,) float32 each.
        arrays, undoing: The same as kernels take it, for packing and for unpacking.
        side: ``"keys"`` or ``"values"``.
        stage2: Which table.
        tile_tokens: Centroids are made for so many tokens at once.
    """

    bits: int
    dim: int
    dtype: str
    rotation: SignHadamard | DenseRotation
    matrix: mx.array
    edges: tuple[tuple[float, ...], tuple[float, ...]]
    levels: tuple[mx.array, mx.array]
    arrays: tuple[mx.array, ...] = ()
    undoing: tuple[mx.array, ...] = ()
    side: Side = "keys"
    stage2: str = "laplace"
    tile_tokens: int = 1024

    @property
    def codes(self) -> int:
        """W."""
        return int(self.matrix.shape[0])

    @property
    def signs(self) -> mx.array | None:
        """Of the rotation, where it is one of signs and the stored basis has a number for each channel."""
        plain = self.codes == self.dim and isinstance(self.rotation, SignHadamard)
        return self.rotation.signs if plain else None  # type: ignore[union-attr]

    @property
    def sums(self) -> mx.array:
        """(4**b,) float32: the sum of two centroids at c1 + 2**b c2."""
        return (self.levels[1][:, None] + self.levels[0]).reshape(-1)

    def unit(self, tile: Tile) -> mx.array:
        """Sums of centroids of a tile, (N, H, n, W), before the scale."""
        first, second = (unpack_bits(tile[name], self.bits) for name in ("codes", "rest"))
        return mx.take(self.sums, first + second * 2**self.bits)

    def prepare_query(self, queries: mx.array) -> mx.array:
        """Rotate the queries as the keys were."""
        return queries.astype(mx.float32) @ self.matrix.T

    def scores(self, queries: mx.array, tile: Tile) -> mx.array:
        """Dot products in the rotated basis."""
        return (queries @ self.unit(tile).swapaxes(-1, -2)) * tile["scale"].swapaxes(-1, -2)

    def accumulate(self, weights: mx.array, tile: Tile) -> mx.array:
        """Sums in the rotated basis."""
        return (weights * tile["scale"].swapaxes(-1, -2).astype(mx.float32)) @ self.unit(tile)

    def finish(self, sums: mx.array) -> mx.array:
        """Rotate back."""
        return sums @ self.matrix


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    can = Capabilities(
        head_dims=HEAD_DIMS,
        scale_equivariant=True,
        gaussian_error=lambda s, d: 1.05 * ERRORS[s.stage2][BITS.index(s.bits)],
    )
    return MethodFacts(
        "turboquant_rvq",
        "rotation, two codes a coordinate: its own and its residual's, one scale a token",
        Settings,
        paper="VeloxQuant-MLX, after TurboQuant, arXiv 2504.19874",
        capabilities=can,
        verified=tuple(f"bits={bits}" for bits in BITS),
    )


@hookimpl
def vq_prepare(ctx: PrepareContext, settings: Settings) -> State:
    """The rotation of this side and the two codebooks."""
    bits, dim = int(settings.bits[0]), ctx.head_dim
    rotation = rotation_for(settings.rotation, dim, (ctx.seed, ctx.side == "keys"))
    first, second = gaussian_centroids(bits), stage2_centroids(bits, settings.stage2)
    state = State(
        bits,
        dim,
        "float16" if ctx.dtype == "float16" else "float32",
        rotation,
        mx.pad(rotation.matrix, [(0, filled(dim, bits) - dim), (0, 0)]),
        (boundaries(first), boundaries(second)),
        (mx.array(first), mx.array(second)),
        side=ctx.side,
        stage2=settings.stage2,
    )
    from vq_turboquant.kernels.rvq import arrays

    return attrs.evolve(state, arrays=arrays(state), undoing=arrays(state, undo=True))


@hookimpl
def vq_layout(state: State) -> Layout:
    """Two streams of codes, and scales, of 128 tokens."""
    words = state.codes * state.bits // 32
    return Layout(
        # A form for tensor cores has blocks of 32 tokens, and one order must not pack later than the other.
        1 if no_tiles(state) else BLOCK,
        (
            Field("codes", "uint32", (128, words), codes=True),
            Field("rest", "uint32", (128, words), codes=True),
            Field("scale", state.dtype, (128, 1)),
        ),
    )


def no_tiles(state: State) -> str:
    """Why a side's codes have no form for tensor cores; empty where they have."""
    if state.bits > 2:
        sums = 4**state.bits
        return f"codes of {state.bits}+{state.bits} bits have {sums} sums, more than the 16 that bytes are looked up by"
    if state.dtype != "float16":
        return f"scales are {state.dtype}, those of models that are not float16; tensor cores take float16"
    if state.dim not in TILED:
        return f"head size {state.dim} is none of {', '.join(map(str, TILED))}"
    return ""


@hookimpl
def vq_encode(state: State, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Both codes of each coordinate, and the scale."""
    unit, scale = unit_vectors(x, state.dtype)
    y = state.rotation.rotate(unit) * root(state.dim)
    y = mx.pad(y, [(0, 0)] * 3 + [(0, state.codes - state.dim)])
    codes = count_below(y, state.edges[0])
    rest = count_below(y - mx.take(state.levels[0], codes), state.edges[1])
    return codes, rest, scale


@hookimpl
def vq_pack(state: State, codes: tuple[mx.array, mx.array, mx.array]) -> dict[str, mx.array]:
    """Codes into words."""
    return {"codes": pack_bits(codes[0], state.bits), "rest": pack_bits(codes[1], state.bits), "scale": codes[2]}


@hookimpl
def vq_decode(state: State, packed: Tile) -> mx.array:
    """The sum of two centroids, rotated back, times the scale."""
    unit = state.unit(packed)[..., : state.dim] * normaliser(state.dim)
    return state.rotation.undo(unit) * (packed["scale"].astype(mx.float32) * root(state.dim))


@hookimpl
def vq_kernels() -> Sequence[KernelOffer]:
    """Rotate, quantize and pack both streams in one pass, and back: :mod:`vq_turboquant.kernels.rvq`."""
    from vq_turboquant.kernels.rvq import OFFERS

    return OFFERS


@hookimpl
def vq_attend(state: State) -> State:
    """Straight from the codes, on either side."""
    return state


@hookimpl
def vq_snippet(state: State, side: Side) -> Snippet:
    """One look-up a number, of the sum of its two centroids; one scale a token."""
    from vq_turboquant.kernels.rvq import snippet

    return snippet(state, side)


@hookimpl
def vq_device() -> Sequence[DeviceForm]:
    """Codes of 1+1 and 2+2 bits as tensor cores take them: :mod:`vq_turboquant.kernels.rvq_form`."""
    from vq_turboquant.kernels.rvq_form import FORMS

    return FORMS
