"""TurboQuant-MSE: a random rotation, one codebook for every coordinate, one scale a vector (arXiv 2504.19874).

A vector x of norm n is rotated, y = R x / n; each coordinate is coded as the nearest of the 2**bits centroids that
are best for N(0, 1), scaled by 1 / sqrt(D) for the D numbers that were rotated together; x^ = s R^T c.  After the
rotation every vector looks Gaussian, so one table serves all data and nothing is calibrated.  Attention needs no
inverse a token: queries are rotated once a step, and the weighted sum of values is rotated back once a query head.

**Rotation.** ``hadamard``: two rounds of random signs and a Hadamard transform (one round leaves a one-hot vector with
coordinates of one size: error .26 instead of .117 at 2 bits; two are within 12% of theory on structured vectors, and
``haar``, a dense random matrix, within 5%).  ``auto``: hadamard where the head size has one, haar elsewhere.

**Scale.** The codes shrink a vector, <x, x^> / n^2 = .638 .886 .968 .991 for 1 to 4 bits, and the scale may put that
right at no cost: ``raw`` keeps the norm, as published; ``matched`` gives x^ the norm of x; ``unbiased`` makes
<x, x^> = n^2.  Error of the output of attention, 4096 keys of 128 at 2 bits, logits of spread 1: .495, .320, .209;
logits of spread 3: .195, .193, .210.  Values of a common mean under diffuse attention: .118, .068, .038, for errors
of mean zero average out and a bias does not.  The squared error of x^ itself goes the other way (.116, .119, .131).
So ``auto``, the default, is matched for keys, which is never far from the best, and unbiased for values.

**Mean.** ``first``: the mean of each head's first 32 packed tokens is kept once a sequence, and what is coded is what
differs from it.  This is exact: the mean is added back wherever a token is read.  It helps keys with channels far from
zero (output error .33 to .11 at 3 bits), which rotary embeddings leave only in slowly rotating channels, and values
under diffuse attention; it packs in blocks of 32 tokens and costs 64 bits a channel once a sequence.  One token far
out among those 32 moves the mean for all that follow by a 32nd of itself: ``sink_tokens`` keeps the first ones apart.

Bits per stored number: ``bits + 16 / D`` for float16 models, ``bits + 32 / D`` for others, for whole ``bits``.  **2.5
and 3.5 count everything**: D / 2 - 32 channels have one bit more than the rest, each of the two groups has a rotation
and a scale of its own, and codes and both scales together are 2.5 or 3.5 bits a number of a float16 model.  That
comes out even for head sizes of 128, 192, 256 and so on (the paper's 32 of 128 channels); others are refused.
Which channels have the extra bit is drawn from the seed, once for a layer side: the paper takes those of largest
norm, but what is chosen from a sequence's tokens would make the rotation of a query another one for each row.

Where this differs from the paper: exact sums and a fixed order of additions, so that codes depend on nothing but the
vector; with ``raw`` codes come from the scale as stored.  A codebook value on the edge of two takes the lower.  A
head size whose codes fill no whole 32-bit words stores up to the next that does (80 at 3 bits: 96 codes).

What numbers do: norms are taken in float32. A scale that float16 cannot hold is its largest number; above a norm of
1e19 (float32 and bfloat16 models) the squares overflow, and that vector reads as no numbers, as one that holds NaN
or infinities does.
A vector whose scale is too small to be stored reads as zero, or as the mean where one is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.api import (
    Capabilities,
    Field,
    Layout,
    MethodFacts,
    PrepareContext,
    Side,
    UnsupportedShapeError,
    hookimpl,
    setting,
)
from vq_core.api.attend import Tile
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.codec.codebook import count_below, gaussian_centroids
from vq_core.codec.hadamard import SignHadamard
from vq_core.codec.projection import fold_sum
from vq_core.kernels import KernelOffer
from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.matrix import HEAD_DIMS
from vq_core.kernels.skeleton.snippet import Snippet
from vq_turboquant.parts import Part, extra_channels, groups_of, part_of
from vq_turboquant.scale import narrowed

MODES = ("raw", "matched", "unbiased")
BLOCK = 32
"""Tokens whose mean is removed."""
MOST = 512
"""Largest head size."""


@attrs.frozen
class MseSettings:
    """Settings of turboquant_mse."""

    bits: float = setting(
        4.0, accepted=(1, 2, 2.5, 3, 3.5, 4),
        help="bits of a code, beside 16/D for the scale; 2.5 and 3.5: all that is stored, two scales included",
    )  # fmt: skip
    rotation: str = setting(
        "auto", accepted=("auto", "hadamard", "haar"),
        help="two sign-Hadamard rounds or a dense matrix; auto: the first where the head size allows; costs no bytes",
    )  # fmt: skip
    scale: str = setting(
        "auto", accepted=("auto", *MODES),
        help="what the scale of a token keeps; auto: matched for keys, unbiased for values; costs no bytes",
    )  # fmt: skip
    mean: str = setting(
        "none", accepted=("none", "first"),
        help="first: removes each head's mean of its first 32 packed tokens; 64 bits a channel once a sequence",
    )  # fmt: skip


def _gaussian_error(settings: MseSettings, head_dim: int) -> float:
    """Relative squared error on N(0, 1) of the unbiased scale, the largest of the three, with 5% to spare."""
    at = (0.568, 0.131, 0.0347, 0.0093)
    whole = int(settings.bits)
    if whole == settings.bits:
        return 1.05 * at[whole - 1]
    more = extra_channels(head_dim) / head_dim
    return 1.05 * (more * at[whole] + (1 - more) * at[whole - 1])


FACTS = MethodFacts(
    name="turboquant_mse",
    summary="random rotation, Lloyd-Max codes of 1 to 4 bits, one scale a vector",
    paper="arXiv 2504.19874",
    settings=MseSettings,
    capabilities=Capabilities(
        head_dims=tuple(range(1, MOST + 1)), scale_equivariant=True, gaussian_error=_gaussian_error
    ),
    verified=("bits=1", "bits=2", "bits=3", "bits=4"),
)


# ---- what is prepared


@attrs.frozen(eq=False)
class MseState:
    """The prepared state, which is also both halves of attention.

    Attributes:
        parts: One, or two for fractional bits.
        head_dim: D.
        dtype: Of the scales.
        mode: One of raw, matched and unbiased.
        mean: Whether a mean is removed.
        order: (D,) uint32: where each channel lies in the parts' channels one after the other; None: there.
        matrix: (W, D): all rotations, with rows of zeros for codes that fill up words.
        levels: (32,): twice the centroids, so that number = level * scale; the second part's from 16 on.
        side: ``"keys"`` or ``"values"``.
        tile_tokens: Centroids are made for so many tokens at once.
    """

    parts: tuple[Part, ...]
    head_dim: int
    dtype: str
    mode: str
    mean: bool
    order: mx.array | None
    matrix: mx.array
    levels: mx.array
    side: Side
    tile_tokens: int = 1024

    @property
    def width(self) -> int:
        """W, numbers of a token in the stored basis."""
        return int(self.matrix.shape[0])

    @property
    def signs(self) -> mx.array | None:
        """Of the rotation, where it is one of signs and the stored basis has a number for each channel."""
        rotation = self.parts[0].rotation
        plain = not self.parts[1:] and self.width == self.head_dim
        return rotation.signs if plain and isinstance(rotation, SignHadamard) else None

    def unit(self, tile: Tile, number: int) -> mx.array:
        """Levels of a part, (N, H, n, its width), before the scale."""
        part, begin = self.parts[number], sum(p.words for p in self.parts[:number])
        words = tile["codes"][..., begin : begin + part.words]
        return mx.take(self.levels, unpack_bits(words, part.bits) + 16 * number)

    def prepare_query(self, queries: mx.array) -> mx.array:
        """Rotate the queries as the keys were."""
        return queries.astype(mx.float32) @ self.matrix.T

    def scores(self, queries: mx.array, tile: Tile) -> mx.array:
        """Dot products in the rotated basis, and with the mean where one was removed."""
        total, begin = None, 0
        for number, part in enumerate(self.parts):
            scale = tile["scale"][..., number : number + 1].swapaxes(-1, -2).astype(mx.float32)
            own = (queries[..., begin : begin + part.width] @ self.unit(tile, number).swapaxes(-1, -2)) * scale
            total, begin = own if total is None else total + own, begin + part.width
        assert total is not None
        return total + queries @ tile["turned"][..., None] if self.mean else total

    def accumulate(self, weights: mx.array, tile: Tile) -> mx.array:
        """Sums in the rotated basis."""
        weights = weights.astype(mx.float32)
        sums = []
        for number in range(len(self.parts)):
            scale = tile["scale"][..., number : number + 1].swapaxes(-1, -2).astype(mx.float32)
            sums.append((weights * scale) @ self.unit(tile, number))
        total: mx.array = sums[0] if len(sums) == 1 else mx.concatenate(sums, axis=-1)
        return total + weights.sum(axis=-1, keepdims=True) * tile["turned"][..., None, :] if self.mean else total

    def finish(self, sums: mx.array) -> mx.array:
        """Rotate back."""
        return sums @ self.matrix


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    return FACTS


@hookimpl
def vq_prepare(ctx: PrepareContext, settings: MseSettings) -> MseState:
    """Rotations of this side and codebooks."""
    dim, side = ctx.head_dim, int(ctx.side == "keys")
    if dim > MOST:
        raise UnsupportedShapeError(f"head size {dim}: turboquant_mse accepts up to {MOST}")
    groups = groups_of(settings.bits, dim, (ctx.seed, side, 2))
    kind = settings.rotation
    parts = tuple(part_of(b, c, kind, (ctx.seed, side, i)) for i, (b, c) in enumerate(groups))
    rows = []
    for part in parts:
        spread = mx.zeros((part.dim, dim))
        spread[:, part.channels] = part.rotation.matrix
        rows.append(mx.pad(spread, [(0, part.width - part.dim), (0, 0)]))
    tables = [mx.array(gaussian_centroids(part.bits)) * 2 for part in parts]
    levels = mx.concatenate([mx.pad(table, (0, 16 - table.size)) for table in tables])
    mode = settings.scale if settings.scale != "auto" else "matched" if side else "unbiased"
    order = mx.argsort(mx.concatenate([part.channels for part in parts])).astype(mx.uint32) if parts[1:] else None
    return MseState(
        parts, dim, "float16" if ctx.dtype == "float16" else "float32", mode, settings.mean == "first", order,
        mx.concatenate(rows), mx.pad(levels, (0, 32 - levels.size)), ctx.side,
    )  # fmt: skip


@hookimpl
def vq_layout(state: MseState) -> Layout:
    """Codes and scales of 128 tokens, and the mean of a sequence, as it is and rotated."""
    fields = [
        Field("codes", "uint32", (128, sum(part.words for part in state.parts)), codes=True),
        Field("scale", state.dtype, (128, len(state.parts))),
    ]
    if state.mean:
        fields.append(Field("mean", "float32", (state.head_dim,), axis=None))
        fields.append(Field("turned", "float32", (state.width,), axis=None))
    # A form for tensor cores has blocks of 32 tokens, and one order must not pack later than the other.
    return Layout(BLOCK if state.mean or not no_tiles(state) else 1, tuple(fields))


def no_tiles(state: MseState) -> str:
    """Why a side's codes have no form for tensor cores; empty where they have."""
    if state.parts[1:]:
        return f"two groups of channels, of {state.parts[0].bits} and {state.parts[1].bits} bits, are not one codebook"
    if state.parts[0].bits not in (2, 4):
        return f"codes of {state.parts[0].bits} bits are not the 2 or 4 that bytes are looked up by"
    if state.mean:
        return "mean=first: products on tensor cores leave a mean out"
    if state.dtype != "float16":
        return f"scales are {state.dtype}, those of models that are not float16; tensor cores take float16"
    if state.head_dim not in HEAD_DIMS:
        return f"head size {state.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    return ""


# ---- the mathematics


@hookimpl
def vq_start(state: MseState, x: mx.array) -> Mapping[str, mx.array]:
    """Mean of the first block's numbers, as it is and in the stored basis.

    Those whose squares float32 cannot hold are left out, as NaN and infinities are: what is left of the other tokens
    after such a mean would have no norm either.
    """
    if not state.mean:
        return {}
    x = x.astype(mx.float32).swapaxes(-1, -2)
    finite = x.square() < mx.inf  # False for NaN
    total, count = fold_sum(mx.where(finite, x / BLOCK, 0)), finite.sum(axis=-1, keepdims=True)
    mean = (total * (BLOCK / mx.maximum(count, 1)))[..., 0]
    # One vector at a time, as a product of broadcast rows: a matrix product may round otherwise for other batches.
    turned = fold_sum(mean[..., None, :] * state.matrix)[..., 0]
    return {"mean": mean, "turned": turned}


def without_mean(state: MseState, x: mx.array, sequence: Mapping[str, mx.array]) -> mx.array:
    """x less the mean, where one is removed."""
    return x.astype(mx.float32) - sequence["mean"][:, :, None, :] if state.mean else x


def quantize(part: Part, x: mx.array, mode: str, dtype: str) -> tuple[mx.array, mx.array]:
    """Codes and scales of one part.

    Args:
        part: Which.
        x: (..., D), any float dtype.
        mode: One of :data:`MODES`.
        dtype: Of the scale.

    Returns:
        Codes (..., d) uint32 and scales (..., 1).
    """
    v = mx.take(x, part.channels, axis=-1).astype(mx.float32)
    norm = mx.sqrt(fold_sum(v * v))
    raw = narrowed(norm / part.span, dtype)
    divisor = raw.astype(mx.float32) * part.span if mode == "raw" else norm
    y = part.rotation.rotate(v / mx.where(divisor > 0, divisor, 1))
    codes = count_below(y, part.edges)
    if mode == "raw":
        return codes, raw
    decoded = mx.take(part.units, codes)
    if mode == "matched":
        shrunk = mx.sqrt(fold_sum(decoded * decoded))
    else:
        shrunk = fold_sum(y * decoded)
    # Nothing is shrunk where the vector is zero, or not a number: the norm says which.
    scale = mx.where(shrunk > 0, norm / (mx.where(shrunk > 0, shrunk, 1) * part.span), norm)
    return codes, narrowed(scale, dtype)


@hookimpl
def vq_encode(state: MseState, x: mx.array, sequence: Mapping[str, mx.array]) -> list[tuple[mx.array, mx.array]]:
    """Norm, rotation, boundaries counted, scale: for each part."""
    x = without_mean(state, x, sequence)
    return [quantize(part, x, state.mode, state.dtype) for part in state.parts]


@hookimpl
def vq_pack(state: MseState, codes: list[tuple[mx.array, mx.array]]) -> Mapping[str, mx.array]:
    """Codes into words."""
    words = []
    for part, (found, _) in zip(state.parts, codes, strict=True):
        if part.width > part.dim:
            found = mx.pad(found, [(0, 0)] * 3 + [(0, part.width - part.dim)])
        words.append(pack_bits(found, part.bits))
    return joined(words, [scale for _, scale in codes])


def joined(words: list[mx.array], scales: list[mx.array]) -> dict[str, mx.array]:
    """The parts' words and scales one after the other."""
    if len(words) == 1:
        return {"codes": words[0], "scale": scales[0]}
    return {"codes": mx.concatenate(words, axis=-1), "scale": mx.concatenate(scales, axis=-1)}


def dequantize(part: Part, words: mx.array, scale: mx.array) -> mx.array:
    """Words (..., w) and scales (..., 1) of one part to numbers (..., d), float32."""
    decoded = mx.take(part.units, unpack_bits(words, part.bits)[..., : part.dim])
    return part.rotation.undo(decoded) * (scale.astype(mx.float32) * part.span)


def assembled(state: MseState, parts: list[mx.array], packed: Mapping[str, mx.array]) -> mx.array:
    """Numbers of the parts as the head has them, and the mean back."""
    x = parts[0]
    if state.order is not None:
        x = mx.take(mx.concatenate(parts, axis=-1), state.order, axis=-1)
    return x + packed["mean"][:, :, None, :] if state.mean else x


@hookimpl
def vq_decode(state: MseState, packed: Mapping[str, mx.array]) -> mx.array:
    """Centroids rotated back, times the scale."""
    found = [dequantize(part, *columns(state, packed, i)) for i, part in enumerate(state.parts)]
    return assembled(state, found, packed)


def columns(state: MseState, packed: Mapping[str, mx.array], number: int) -> tuple[mx.array, mx.array]:
    """Words and scales of one part."""
    if len(state.parts) == 1:
        return packed["codes"], packed["scale"]
    begin = sum(part.words for part in state.parts[:number])
    words = packed["codes"][..., begin : begin + state.parts[number].words]
    return words, packed["scale"][..., number : number + 1]


@hookimpl
def vq_kernels() -> Sequence[KernelOffer]:
    """Rotate, quantize and pack in one launch, and back: :mod:`vq_turboquant.kernels.mse`."""
    from vq_turboquant.kernels.mse import OFFERS

    return OFFERS


@hookimpl
def vq_attend(state: MseState) -> Any:
    """Straight from the codes, on either side."""
    return state


@hookimpl
def vq_snippet(state: MseState, side: Side) -> Snippet:
    """How fused attention reads eight codes of a token: :mod:`vq_turboquant.kernels.mse_snippets`."""
    from vq_turboquant.kernels.mse_snippets import snippet

    return snippet(state, side)


@hookimpl
def vq_device() -> Sequence[DeviceForm]:
    """Codes of 2 and 4 bits as tensor cores take them: :mod:`vq_turboquant.kernels.mse_form`."""
    from vq_turboquant.kernels.mse_form import FORMS

    return FORMS
