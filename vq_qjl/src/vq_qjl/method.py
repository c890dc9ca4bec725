"""QJL: keys as signs of a random sketch, one bit each, and a norm (arXiv 2406.03482, repository amirzandieh/QJL).

A key k is stored as h = sign(S k), m bits, and its norm; <q, k> is estimated by sqrt(pi/2)/m * |k| * <S q, h>, which is
unbiased; queries are not quantized.  Keys only: what is estimated is a score, and not a vector that could be averaged.

**The constant.** For rows s of norm sqrt(d),

    E[<s, q> sign(<s, k>)] = <q, k> / |k| * sqrt(2 / pi) * b

with b = 1 for Gaussian rows. Rows of Haar orthogonal matrices (``projection=orthogonal``, the default: 2.75 times less
variance) are uniform on a sphere, b = sqrt(d / 2) Gamma(d / 2) / Gamma((d + 1) / 2); the constant is divided by it.

**Exact sums.** S is rounded to whole numbers of 2**-11 of its longest row. S is random, and what multiplies queries is
the rounded matrix too: what is lost is that 2 parts in 10**5 of its entries' variance are uniform. Sums of products
fit float32's 24 bits (:mod:`vq_core.codec.projection`): a sign does not depend on the order in which anybody adds.

**Outlier channels** (``outliers=8`` is published): in each group of 32 tokens the channels with the largest norms are
sketched apart, by a matrix of their own, with a norm of their own.  With q = q_in + q_out the estimate is

    c |k_in| <S q - S[:, out] q_out, h_in> + c' |k_out| <S' q_out, h_out>

Where this differs from the paper and its code:

* Orthogonal rows (default, as in the released code) get the exact constant; that code is biased by .20% at d = 128.
* The inlier norm is taken from the inliers. As the root of a difference of float16 norms it is zero for 14% of keys
  with outliers of 100 times the others.
* S' is a matrix of its own for the outliers' few numbers, orthogonal in their space, and not columns of S.
* Stored is the norm over sqrt(d), which fits float16 wherever the numbers do.
* Every token is packed once it leaves the exact window, also those that are generated; any head size up to 512.
* sign(0) is -1, on both sides. A key whose norm is below 2**-40 is a zero vector.

Bits per stored number, for float16 models (for others each 16 is 32):

    m / D + 16 / D                                              without outliers
    m / D + 16 / D + m' / D + 16 / D + outliers / (4 D)         with outliers, m' being ``outlier_sketch``
"""

from __future__ import annotations

import math
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
    SettingsError,
    UnsupportedShapeError,
    hookimpl,
    setting,
)
from vq_core.api.attend import Tile
from vq_core.codec.bits import WORD, pack_bits, unpack_bits
from vq_core.codec.projection import HIGH, LOW, MOST, fold_sum, split
from vq_core.codec.rotation import gaussian_matrix, orthogonal_sketch
from vq_core.kernels import KernelOffer, Snippet
from vq_core.kernels.device_form import DeviceForm

PAGE, GROUP = 128, 32
SMALLEST = 2.0**-80
"""Squared norms up to this one are zero: below, squares of float32 numbers lose their bits."""
CHANNELS = 256
"""Channels that a uint8 can name."""
AN_OUTLIER = 32
"""Signs an outlier channel, unless the setting says another number: 256 for 8, as in the released code."""


@attrs.frozen
class QjlSettings:
    """Settings of QJL."""

    bits: int = setting(2, accepted=(1, 2, 3, 4), help="signs a number: a sketch of bits * D, in whole bytes, a key")
    sketch: int = setting(
        0,
        minimum=0,
        maximum=4096,
        help="signs a key, a multiple of 8, in the place of bits * D; 0: bits * D. Costs sketch / D bits a number",
    )
    projection: str = setting(
        "orthogonal",
        accepted=("orthogonal", "gaussian"),
        help="rows of S; the published gaussian costs the same and has 2.75 times the variance",
    )
    outliers: int = setting(
        0,
        minimum=0,
        maximum=CHANNELS,
        help="channels a group of 32 tokens that are sketched apart: + (outlier_sketch + 16 + outliers / 4) / D bits",
    )
    outlier_sketch: int = setting(
        0, minimum=0, maximum=4096, help="signs a key for them, a multiple of 32; 0: 32 an outlier channel"
    )

    def __attrs_post_init__(self) -> None:
        for name, step in (("sketch", 8), ("outlier_sketch", 32)):
            if getattr(self, name) % step:
                said = f"must be a multiple of {step}, such as {-(-getattr(self, name) // step) * step}"
                raise SettingsError(f"{name}={getattr(self, name)!r} is not accepted: {name} {said}")
        if self.outlier_sketch and not self.outliers:
            said = "is of no use without outliers: set outliers, such as outliers=8, or leave it out"
            raise SettingsError(f"outlier_sketch={self.outlier_sketch} {said}")

    def width(self, dim: int) -> int:
        """m, for a head size."""
        return self.sketch or -(-self.bits * dim // 8) * 8

    @property
    def outlier_width(self) -> int:
        """m' of the outliers' sketch."""
        return self.outlier_sketch or AN_OUTLIER * self.outliers


def _gaussian_error(settings: QjlSettings, dim: int) -> float:
    """Relative squared error of the vector that stands for a key, from the estimate's variance, with 10% to spare."""

    def error(width: int, size: int) -> float:
        whole = settings.projection == "orthogonal" and width % size == 0
        return (math.pi / 2 - whole) * size / width

    apart = error(settings.outlier_width, settings.outliers) if settings.outliers else 0.0
    return 1.1 * max(error(settings.width(dim), dim), apart)


FACTS = MethodFacts(
    name="qjl",
    summary="keys as signs of a random sketch, one bit each, and a norm; scores without bias",
    paper="arXiv 2406.03482",
    settings=QjlSettings,
    sides=("keys",),
    capabilities=Capabilities(
        head_dims=tuple(range(1, MOST + 1)), scale_equivariant=True, gaussian_error=_gaussian_error
    ),
    verified=("bits=1", "bits=2"),
)


def unbiased(dim: int, projection: str) -> float:
    """What makes sqrt(pi / 2) / m * |k| * <S q, h> exact, 1 / b above."""
    if projection == "gaussian":
        return 1.0
    return math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2)) * math.sqrt(2 / dim)


@attrs.frozen(eq=False)
class Sketch:
    """m rows for vectors of d numbers.

    Attributes:
        rows: (m, d) float32, whole numbers.
        columns: The same, (d, m).
        unit: ``weight * unit * <rows q, h>`` is the estimate; weight is the norm over sqrt(d).
    """

    rows: mx.array
    columns: mx.array
    unit: float

    @classmethod
    def of(cls, width: int, dim: int, projection: str, seed: Sequence[int]) -> Sketch:
        """Draw the matrix.

        Raises:
            UnsupportedShapeError: dim above 512, for which the sums would not be exact.
        """
        if dim > MOST:
            raise UnsupportedShapeError(f"a sketch of vectors of {dim} numbers: at most {MOST} are accepted")
        drawn = (gaussian_matrix if projection == "gaussian" else orthogonal_sketch)(width, dim, seed)
        norm: Any = mx.sqrt(fold_sum(drawn.square())).max().item()
        longest = norm * (1 - 2.0**-10)  # an orthogonal row may be just above its norm
        scale = 2.0 ** math.ceil(math.log2(longest))
        rows = mx.round(drawn * (HIGH / scale))
        unit = math.sqrt(math.pi / 2) / width * unbiased(dim, projection) * math.sqrt(dim) * (scale / HIGH)
        return cls(rows, mx.contiguous(rows.T), unit)

    @property
    def width(self) -> int:
        """m."""
        return int(self.rows.shape[0])

    def encode(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Signs and weights of vectors (..., d), float32.

        Returns:
            bits: (..., m) bool: S x > 0, so that 0 and NaN count as -1.
            weight: (..., 1) float32, the norm over sqrt(d): the root mean square, never above the largest number.
        """
        square = fold_sum(x.square())
        first, second = split(x / mx.where(square > SMALLEST, mx.sqrt(square), 1))
        bits = (first @ self.columns) * LOW + second @ self.columns > 0
        return bits, mx.where(square <= SMALLEST, 0, mx.sqrt(square / x.shape[-1]))

    def decode(self, signs: mx.array, weight: mx.array) -> mx.array:
        """The vector (..., d) whose product with a query is the estimate; signs (..., m) float32."""
        return (signs @ self.rows) * (weight.astype(mx.float32) * self.unit)

    def query(self, queries: mx.array) -> mx.array:
        """S q in units in which weight * <S q, h> is the estimate, (..., m) float32."""
        return (queries.astype(mx.float32) * self.unit) @ self.columns


def pack_signs(bits: mx.array) -> mx.array:
    """Bits (..., m) into uint32 words, or into bytes where m fills no whole words; the first bit is the lowest."""
    short = -bits.shape[-1] % WORD
    words = pack_bits(mx.pad(bits.astype(mx.uint32), [(0, 0)] * (bits.ndim - 1) + [(0, short)]), 1)
    return words.view(mx.uint8)[..., : bits.shape[-1] // 8] if short else words


def unpack_signs(packed: mx.array, width: int) -> mx.array:
    """Undo :func:`pack_signs`: -1 and +1, (..., m) float32."""
    if packed.dtype == mx.uint8:
        packed = mx.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % 4)]).view(mx.uint32)
    return unpack_bits(packed, 1)[..., :width].astype(mx.float32) * 2 - 1


@attrs.frozen(eq=False)
class Qjl:
    """The prepared state, which is also the keys' half of attention.

    Attributes:
        sketch: Of the keys, or of their inlier channels.
        metadata: Dtype of the norms.
        outliers: Channels a group that are sketched apart.
        apart: Their sketch.
    """

    sketch: Sketch
    metadata: str
    outliers: int = 0
    apart: Sketch | None = None
    tile_tokens: int = 1024  # signs are floats for so many tokens at once

    @property
    def dim(self) -> int:
        """D."""
        return int(self.sketch.rows.shape[1])

    def channels(self, tile: Tile) -> mx.array:
        """Outlier channels of each group as indexes; what a page holds beyond its tokens may be any byte."""
        return mx.minimum(tile["channels"].astype(mx.uint32), self.dim - 1)

    def prepare_query(self, queries: mx.array) -> dict[str, mx.array]:
        """S q, and for outliers q itself."""
        sketched = {"sketched": self.sketch.query(queries)}
        return sketched | {"plain": queries.astype(mx.float32)} if self.outliers else sketched

    def scores(self, queries: Mapping[str, mx.array], tile: Tile) -> mx.array:
        """Weighted sums of signed S q, less the outliers' part of S q, plus the outliers' own estimate."""
        signs = unpack_signs(tile["signs"], self.sketch.width)
        found = (queries["sketched"] @ signs.swapaxes(-1, -2)) * tile["weight"].swapaxes(-1, -2)
        if self.apart is None:
            return found
        ids, heads = self.channels(tile), signs.shape[:2]
        # What <S q, h> says of the outlier channels, taken back: <S[:, out] q_out, h> = <q_out, S[:, out]^T h>.
        of_group = signs.reshape(*heads, -1, GROUP, self.sketch.width)
        told = of_group @ mx.take(self.sketch.columns, ids, axis=0).swapaxes(-1, -2)
        told = told.reshape(*heads, -1, self.outliers) * (tile["weight"].astype(mx.float32) * self.sketch.unit)
        own = self.apart.decode(unpack_signs(tile["outlier_signs"], self.apart.width), tile["outlier_weight"])
        dense = mx.put_along_axis(mx.zeros((*own.shape[:3], self.dim)), _of_tokens(ids), own - told, axis=-1)
        return found + queries["plain"] @ dense.swapaxes(-1, -2)


def outlier_channels(x: mx.array, count: int) -> mx.array:
    """The channels of the largest norm over each group of 32 tokens; of equal ones the first; one with a NaN is large.

    Args:
        x: (B, H, n, D) float32, D at most 256, n whole groups.
        count: Channels a group.

    Returns:
        (B, H, n / 32, count) uint8, ascending.
    """
    B, H, _, D = x.shape
    energy = fold_sum(x.square().reshape(B, H, -1, GROUP, D).swapaxes(-1, -2))[..., 0]
    energy = mx.where(mx.isnan(energy), mx.inf, energy)
    # The bits of positive floats are in their order. Below them is the channel, so that no two are equal.
    place = mx.arange(CHANNELS - 1, CHANNELS - 1 - D, -1).astype(mx.uint64)
    key = mx.left_shift(energy.view(mx.uint32).astype(mx.uint64), mx.array(8, mx.uint64)) + place
    largest = mx.bitwise_and(mx.sort(key, axis=-1)[..., D - count :], mx.array(CHANNELS - 1, mx.uint64))
    return mx.sort(CHANNELS - 1 - largest.astype(mx.int32), axis=-1).astype(mx.uint8)


def _of_tokens(channels: mx.array) -> mx.array:
    """Channels of groups (..., g, o) as indexes for each of their tokens, (..., 32 g, o)."""
    return mx.repeat(channels.astype(mx.uint32), GROUP, axis=-2)


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    return FACTS


@hookimpl
def vq_prepare(ctx: PrepareContext, settings: QjlSettings) -> Qjl:
    """Draw the sketches."""
    dim, count = ctx.head_dim, settings.outliers
    metadata = "float16" if ctx.dtype == "float16" else "float32"
    if count and dim > CHANNELS:
        said = f"outlier channels are stored as bytes, which serves head sizes up to {CHANNELS}, not {dim}"
        raise UnsupportedShapeError(f"outliers={count}: {said}; use outliers=0")
    if count > dim:
        said = f"head size {dim} has no more than {dim} channels; use at most outliers={dim}, or outliers=0"
        raise SettingsError(f"outliers={count} is not accepted: {said}")
    made = settings.projection
    sketch = Sketch.of(settings.width(dim), dim, made, (ctx.seed, 0))
    if not count:
        return Qjl(sketch, metadata)
    return Qjl(sketch, metadata, count, Sketch.of(settings.outlier_width, count, made, (ctx.seed, 1)))


@hookimpl
def vq_layout(state: Qjl) -> Layout:
    """Signs and a norm a token; with outliers both twice, and the channels of each group of 32 tokens."""
    from vq_qjl.kernels.device import declines

    def signs(name: str, width: int) -> Field:
        size = WORD if width % WORD == 0 else 8
        return Field(name, f"uint{size}", (PAGE, width // size), codes=True)

    fields = (signs("signs", state.sketch.width), Field("weight", state.metadata, (PAGE, 1)))
    if state.apart is None:
        # Where tensor cores take blocks of 32 tokens, neither order packs earlier than the other.
        return Layout(1 if declines(state) else GROUP, fields, PAGE)
    apart = (signs("outlier_signs", state.apart.width), Field("outlier_weight", state.metadata, (PAGE, 1)))
    return Layout(GROUP, (*fields, *apart, Field("channels", "uint8", (PAGE // GROUP, state.outliers))), PAGE)


@hookimpl
def vq_encode(state: Qjl, x: mx.array) -> dict[str, mx.array]:
    """Bits, one a sign and unpacked, and norms as they are stored."""
    x, stored = x.astype(mx.float32), getattr(mx, state.metadata)
    if state.apart is None:
        bits, weight = state.sketch.encode(x)
        return {"signs": bits, "weight": weight.astype(stored)}
    channels = outlier_channels(x, state.outliers)
    ids = _of_tokens(channels)
    own, own_weight = state.apart.encode(mx.take_along_axis(x, ids, axis=-1))
    bits, weight = state.sketch.encode(mx.put_along_axis(x, ids, mx.array(0.0), axis=-1))
    return {
        "signs": bits, "weight": weight.astype(stored),
        "outlier_signs": own, "outlier_weight": own_weight.astype(stored), "channels": channels,
    }  # fmt: skip


@hookimpl
def vq_pack(state: Qjl, codes: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Signs into bits."""
    return {name: pack_signs(a) if name.endswith("signs") else a for name, a in codes.items()}


@hookimpl
def vq_decode(state: Qjl, packed: Tile) -> mx.array:
    """The vector whose product with a query is the estimate; it is no reconstruction of the key."""
    found = state.sketch.decode(unpack_signs(packed["signs"], state.sketch.width), packed["weight"])
    if state.apart is None:
        return found
    own = state.apart.decode(unpack_signs(packed["outlier_signs"], state.apart.width), packed["outlier_weight"])
    return mx.put_along_axis(found, _of_tokens(state.channels(packed)), own, axis=-1)


@hookimpl
def vq_kernels() -> Sequence[KernelOffer]:
    """Encode in one pass, decode in one: :mod:`vq_qjl.kernels`."""
    from vq_qjl.kernels import OFFERS

    return OFFERS


@hookimpl
def vq_attend(state: Qjl) -> Qjl:
    """Straight from the signs."""
    return state


@hookimpl
def vq_snippet(state: Qjl) -> Snippet | str:
    """Signs against S q: :mod:`vq_qjl.kernels.snippets`; outliers need a query for each group."""
    from vq_qjl.kernels.snippets import snippet

    return snippet(state)


@hookimpl
def vq_device() -> Sequence[DeviceForm]:
    """Signs as tensor cores take them: :mod:`vq_qjl.kernels.form`."""
    from vq_qjl.kernels.form import FORMS

    return FORMS
