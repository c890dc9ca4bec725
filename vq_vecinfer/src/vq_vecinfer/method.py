"""VecInfer: product quantization of smoothed, Hadamard-transformed keys and of plain values (arXiv 2510.06175).

Keys: with lambda = sqrt(max |K|) for each KV head and channel (from calibration, at least 1e-4, float32), what is
stored of a key k is y = (k / lambda) H, H the orthonormal Hadamard matrix; a query is read as (q * lambda) H, which
leaves every product q.k as it is.  Values are stored as they are.  A stored vector is cut into D / sub sub-vectors,
and of each the number of the nearest of C centroids is kept.  The codebooks are learnt by k-means from the model's own
keys and values (``vq calibrate``); codebooks of random numbers give garbage text.

**Nearest.** The largest x.c - ||c||^2 / 2, which has one order, in float32 and without contraction: the sum begins at
-||c||^2 / 2, and the products of the channels are added from the first to the last.  Among equals the lowest number
wins.  Numbers are cut to +-1e30 before.  A sub-vector that holds a NaN or an infinity gets code 0.

Where this differs from the paper and its ports:

* Centroid 0 is the origin: zero vectors decode to zeros (without ``mean``), and no sub-vector to something farther
  from it than nothing.
* lambda is of the KV head, from the keys; queries of grouped heads share it.  It is float32: in float16 q * lambda
  can overflow.
* The codes of a page are one stream of bits, so that log2(C) / sub bits a number are exact for every head size; where
  a token's codes fill no whole 32-bit words, the fewest tokens whose codes do are one block.
* No number is stored a token: what is far larger than anything in the calibration text comes back as the nearest
  that the centroids can give.

Options: ``codebooks=subspace``, a codebook for each of the D / sub places, shared by the heads.  ``mean=true``: the
mean of each channel (of keys: of the stored basis), from calibration, is taken off before and added again; lambda is
then of what is left.  It is kept with the sequence, D float32 numbers a head, since no two heads have the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx

from vq_core.api import (
    Artifact,
    Calibration,
    Capabilities,
    Field,
    Layout,
    MethodFacts,
    PluginError,
    PrepareContext,
    SettingsError,
    Side,
    UnsupportedShapeError,
    hookimpl,
    setting,
)
from vq_core.api.attend import Tile
from vq_core.codec.bits import WORD, pack_bits, unpack_bits
from vq_core.codec.hadamard import hadamard, unhadamard
from vq_core.kernels import KernelOffer, Snippet
from vq_core.kernels.device_form import DeviceForm
from vq_vecinfer.kmeans import kmeans

PAGE = 128
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Multiples of 8 with a Hadamard matrix."""
DEFAULTS = {"keys": (4, 4096), "values": (8, 256)}
"""sub and centroids of each side, as the paper's port has them."""
ERRORS = {
    (2, 256): 0.0093, (2, 1024): 0.0030, (2, 4096): 0.0010, (4, 256): 0.0977, (4, 1024): 0.0516, (4, 4096): 0.0272,
    (8, 256): 0.3260, (8, 1024): 0.2367, (8, 4096): 0.176,
}  # fmt: skip
"""Relative squared error on N(0, 1) by sub and centroids: docs/results/vecinfer-errors.py; (2, 1024), (2, 4096) and
(8, 4096) with its EACH = 16 and ROUNDS = 10."""
SPARE = 1.25
"""Room for codebooks learnt from few."""
FLOOR, LIMIT = 1e-4, 1e30
LEAST = 4
"""Sub-vectors that a centroid must have been learnt from, on average; 64 and more serve it well."""
AT_ONCE = 2**20
"""Products of sub-vectors and centroids that encoding holds at once: 4 MiB."""


@attrs.frozen
class VecInferSettings:
    """Settings of VecInfer."""

    sub: int = setting(
        0, accepted=(0, 2, 4, 8), help="channels that share a code; 0: 4 for keys, 8 for values. log2(C) / sub bits"
    )
    centroids: int = setting(
        0, accepted=(0, 256, 1024, 4096), help="C, codes of 8, 10 or 12 bits; 0: 4096 for keys, 256 for values"
    )
    codebooks: str = setting(
        "shared", accepted=("shared", "subspace"), help="one for all places, or one each: D / sub times the constants"
    )
    mean: bool = setting(False, help="take off each channel's mean: 32 D bits a head and sequence")
    artifact: str = setting("", help="file that vq calibrate has made, with the same settings; needed")

    def of(self, side: Side) -> tuple[int, int]:
        """sub and centroids of a side."""
        sub, centroids = DEFAULTS[side]
        return self.sub or sub, self.centroids or centroids


def _gaussian_error(settings: VecInferSettings, head_dim: int) -> float:
    return SPARE * max(ERRORS[settings.of("keys")], ERRORS[settings.of("values")])


FACTS = MethodFacts(
    name="vecinfer",
    summary="product quantization with codebooks learnt from the model, 1 to 6 bits, nothing stored a token",
    paper="arXiv 2510.06175",
    settings=VecInferSettings,
    per_layer=True,
    capabilities=Capabilities(head_dims=HEAD_DIMS, needs_calibration=True, gaussian_error=_gaussian_error),
    verified=("sub=8,centroids=256", "sub=4,centroids=256", "sub=4,centroids=1024,mean=true", "sub=2,centroids=256"),
)


@attrs.frozen(eq=False)
class VecInfer:
    """The prepared state of a layer side, which is also its half of attention.

    Attributes:
        side: ``"keys"`` or ``"values"``.
        head_dim: D.
        bits: Of a code.
        codebook: (S, C, sub) float32, S 1 or D / sub.
        halves: (S, C) float32, ||c||^2 / 2.
        smooth: (H, D) float32, lambda; ``None`` for values.
        inverse: (H, D) float32, 1 / lambda.
        mean: (H, D) float32 in the stored basis, or ``None``.
        tile_tokens: Centroids are put together for so many tokens at once.
    """

    side: Side
    head_dim: int
    bits: int
    codebook: mx.array
    halves: mx.array
    smooth: mx.array | None
    inverse: mx.array | None
    mean: mx.array | None
    tile_tokens: int = 1024

    @property
    def sub(self) -> int:
        """Channels of a code."""
        return int(self.codebook.shape[2])

    @property
    def places(self) -> int:
        """Codes a token, M."""
        return self.head_dim // self.sub

    @property
    def block(self) -> int:
        """The fewest tokens whose codes fill whole words."""
        return WORD // math.gcd(WORD, self.places * self.bits)

    def stored(self, x: mx.array, tile: Tile) -> mx.array:
        """Tokens (B, H, n, D) in the stored basis, float32, without the mean."""
        y = x.astype(mx.float32)
        if self.inverse is not None:
            y = hadamard(y * self.inverse[:, None])
        return y - tile["mean"][:, :, None] if self.mean is not None else y

    def unit(self, tile: Tile) -> mx.array:
        """What a tile's codes stand for in the stored basis, (N, H, n, D)."""
        y = centroids_of(self, unpack_bits(tile["codes"], self.bits))
        return y + tile["mean"][:, :, None] if self.mean is not None else y

    def prepare_query(self, queries: mx.array) -> mx.array:
        """(q * lambda) H of queries (B, any multiple of H heads, any, D)."""
        assert self.smooth is not None
        q, heads = queries.astype(mx.float32), self.smooth.shape[0]
        grouped = q.reshape(q.shape[0], heads, -1, self.head_dim) * self.smooth[:, None]
        return hadamard(grouped).reshape(q.shape)

    def scores(self, queries: mx.array, tile: Tile) -> mx.array:
        """Dot products in the stored basis."""
        return queries @ self.unit(tile).swapaxes(-1, -2)

    def accumulate(self, weights: mx.array, tile: Tile) -> mx.array:
        """Sums of values, which are stored as they are."""
        return weights @ self.unit(tile)

    def finish(self, sums: mx.array) -> mx.array:
        """Nothing to undo."""
        return sums


# ---- the mathematics


def nearest(state: VecInfer, y: mx.array) -> mx.array:
    """Codes of vectors in the stored basis: (..., D) float32 to (..., M) uint32."""
    vectors = y.reshape(-1, state.places, state.sub)
    step = max(1, AT_ONCE // (state.places * state.codebook.shape[1]))
    parts: list[mx.array] = []
    for i in range(0, vectors.shape[0], step):
        some = vectors[i : i + step]
        # One after another: MLX, which evaluates later, would else hold the sums of many at once.
        parts.append(_nearest(state, mx.depends(some, parts[-1]) if parts else some))
    codes = mx.concatenate(parts) if parts else mx.zeros((0, state.places), mx.uint32)
    return codes.reshape(*y.shape[:-1], state.places)


def _nearest(state: VecInfer, vectors: mx.array) -> mx.array:
    finite = (mx.abs(vectors) < mx.inf).all(axis=-1)
    x = mx.clip(mx.where(finite[..., None], vectors, 0.0), -LIMIT, LIMIT)
    total = -state.halves  # (S, C)
    for j in range(state.sub):
        total = total + x[..., j : j + 1] * state.codebook[..., j]
    return mx.where(finite, mx.argmax(total, axis=-1), 0).astype(mx.uint32)


def centroids_of(state: VecInfer, codes: mx.array) -> mx.array:
    """What codes (..., n * M) stand for: (..., n, D) float32."""
    books, count = state.codebook.shape[:2]
    codes = codes.reshape(*codes.shape[:-1], -1, state.places)
    if books > 1:
        codes = codes + mx.arange(0, books * count, count, dtype=mx.uint32)
    found = mx.take(state.codebook.reshape(-1, state.sub), codes, axis=0)
    return found.reshape(*codes.shape[:-1], state.head_dim)


def smoothing(calibration: Calibration, mean: bool) -> mx.array:
    """lambda, (H, D)."""
    low, high = calibration.low, calibration.high
    if mean:
        low, high = low - calibration.mean, high - calibration.mean
    return mx.maximum(mx.sqrt(mx.maximum(mx.abs(low), mx.abs(high))), FLOOR)


# ---- the hooks


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    return FACTS


def _check(ctx: PrepareContext) -> None:
    if ctx.head_dim not in HEAD_DIMS:
        raise UnsupportedShapeError(
            f"vecinfer: head size {ctx.head_dim} is no multiple of 8 with a Hadamard matrix; accepted are "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )


@hookimpl
def vq_calibrate(ctx: PrepareContext, settings: VecInferSettings, calibration: Calibration) -> Mapping[str, mx.array]:
    """lambda and the mean from all tokens, codebooks from the sampled ones."""
    import numpy as np  # here: listing methods imports their modules and should not pay for numpy

    _check(ctx)
    sub, centroids = settings.of(ctx.side)
    heads, tokens, dim = calibration.samples.shape
    shared = settings.codebooks == "shared"
    needed = -(-LEAST * centroids // (heads * (dim // sub if shared else 1)))
    if tokens < needed:
        raise SettingsError(
            f"{tokens} tokens are too few to learn {centroids} centroids ({settings.codebooks} codebooks) from "
            f"{heads} heads of {dim}: at least {needed} are needed; give a longer text or more samples"
        )
    made: dict[str, mx.array] = {}
    x, mean = calibration.samples, calibration.mean
    if ctx.side == "keys":
        made["smooth"] = smoothing(calibration, settings.mean)
        x, mean = (hadamard(a / s) for a, s in ((x, made["smooth"][:, None]), (mean, made["smooth"])))
    if settings.mean:
        made["mean"] = mean
        x = x - mean[:, None]
    vectors = np.array(x).reshape(heads * tokens, dim // sub, sub)
    books = [vectors.reshape(-1, sub)] if shared else [vectors[:, m] for m in range(dim // sub)]
    seed = (ctx.seed, ctx.layer or 0, ctx.side == "keys")
    found = [kmeans(v, centroids, calibration.rounds, (*seed, m)) for m, v in enumerate(books)]
    return made | {"codebook": mx.array(np.stack(found))}


@hookimpl
def vq_prepare(ctx: PrepareContext, settings: VecInferSettings, artifact: Artifact) -> VecInfer:
    """What was learnt, checked for its shapes."""
    _check(ctx)
    sub, centroids = settings.of(ctx.side)
    heads, dim = ctx.kv_heads, ctx.head_dim
    wanted: dict[str, tuple[int, ...]] = {
        "codebook": (1 if settings.codebooks == "shared" else dim // sub, centroids, sub)
    }
    if ctx.side == "keys":
        wanted["smooth"] = (heads, dim)
    if settings.mean:
        wanted["mean"] = (heads, dim)
    held = artifact.arrays
    for name in {*wanted, *held}:
        got = held[name].shape if name in held and held[name].dtype == mx.float32 else None
        if name not in wanted or got != wanted[name]:
            raise PluginError(
                f"vecinfer: {name} of the artifact is {got}, not {wanted.get(name)} float32: make it again"
            )
    book = held["codebook"]
    halves = mx.zeros(book.shape[:2])
    for j in range(sub):
        halves = halves + book[..., j] * book[..., j]
    smooth = held.get("smooth")
    return VecInfer(
        ctx.side, dim, centroids.bit_length() - 1, book, halves * 0.5, smooth,
        None if smooth is None else 1 / smooth, held.get("mean"),
    )  # fmt: skip


@hookimpl
def vq_layout(state: VecInfer) -> Layout:
    """The codes of 128 tokens in one stream of bits, and the mean of the sequence.

    Where tensor cores take blocks of 32 tokens neither order packs earlier than the other.
    """
    from vq_vecinfer.kernels import device

    codes = Field("codes", "uint32", (PAGE * state.places * state.bits // WORD,), codes=True)
    mean = () if state.mean is None else (Field("mean", "float32", (state.head_dim,), axis=None),)
    return Layout(state.block if device.declines(state) else device.BLOCK, (codes, *mean), PAGE)


@hookimpl
def vq_start(state: VecInfer, x: mx.array) -> dict[str, mx.array]:
    """The mean, from calibration: every sequence has the same."""
    assert state.mean is not None
    return {"mean": mx.broadcast_to(state.mean, (x.shape[0], *state.mean.shape))}


@hookimpl
def vq_encode(state: VecInfer, x: mx.array, sequence: Tile) -> mx.array:
    """The nearest centroids, (B, H, n * M) uint32."""
    return nearest(state, state.stored(x, sequence)).reshape(*x.shape[:2], -1)


@hookimpl
def vq_pack(state: VecInfer, codes: mx.array) -> dict[str, mx.array]:
    """Codes into words."""
    return {"codes": pack_bits(codes, state.bits)}


def restored(state: VecInfer, y: mx.array) -> mx.array:
    """Tokens out of the stored basis."""
    return y if state.smooth is None else unhadamard(y) * state.smooth[:, None]


@hookimpl
def vq_decode(state: VecInfer, packed: Tile) -> mx.array:
    """Centroids, and for keys the transform undone."""
    return restored(state, state.unit(packed))


@hookimpl
def vq_attend(state: VecInfer) -> VecInfer:
    """Straight from the codes, on either side."""
    return state


@hookimpl
def vq_kernels() -> Sequence[KernelOffer]:
    """Nearest and pack in one pass, and back: :mod:`vq_vecinfer.kernels`."""
    from vq_vecinfer.kernels import OFFERS

    return OFFERS


@hookimpl
def vq_snippet(state: VecInfer, side: Side) -> Snippet:
    """Centroids by look-up: :mod:`vq_vecinfer.kernels.snippets`."""
    from vq_vecinfer.kernels.snippets import snippet

    return snippet(state, side)


@hookimpl
def vq_device() -> Sequence[DeviceForm]:
    """Codes of 8 bits for 8 channels as tensor cores take them: :mod:`vq_vecinfer.kernels.form`."""
    from vq_vecinfer.kernels.form import FORMS

    return FORMS
