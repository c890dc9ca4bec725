"""KIVI: asymmetric low-bit quantization of the KV cache (arXiv 2402.02750, repository jy-yuan/KIVI).

Keys are quantized per channel, in groups of ``group_size`` consecutive tokens; values per token, in groups of
``group_size`` consecutive channels.  For each group zero = min, scale = (max - min) / (2**bits - 1), and
code = clip(rint((x - zero) / scale)), computed in float32 from scale and zero **as stored**.

Where this differs from the paper and its code:

* One frontier for both sides. The paper keeps a sliding window of R values but empties the key window at once;
  here the newest R to R + group_size - 1 tokens are exact on both sides, and groups lie at multiples of
  ``group_size`` from the first packed token, so the bytes do not depend on how a prompt was chunked.
* The tokens of the current chunk are attended exactly, also those that the same update has packed.
* A group of equal values reproduces exactly (the paper's code divides zero by zero).
* ``mx.quantize`` is not used: its formula is another one and gives other codes. Its bit layout is: codes are a
  least-significant-first stream of ``bits`` bits in uint32 words (3 bits are exactly 3), so that
  ``mx.quantized_matmul`` reads them on every backend. Keys are stored transposed, (D, tokens), a page at a time.

Bits per stored number: ``bits + 32 / group_size`` for float16 and bfloat16 models, ``bits + 64 / group_size`` for
float32 models, whose scale and zero are float32.  A bfloat16 model whose zero or scale does not fit float16 gets
float32 metadata for that layer side from then on; what was stored before keeps its value.  A head size that is
no multiple of the group size has its last channel group of values filled up with the edge value; the filling is
stored, counted, and cut on reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, PrepareContext, Side, hookimpl, setting
from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.kernels import KernelOffer
from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet

FLOAT16_MAX = 65504.0


@attrs.frozen
class KiviSettings:
    """Settings of KIVI."""

    bits: int = setting(2, accepted=(2, 3, 4, 8), help="bits of a code; bytes grow in proportion")
    group_size: int = setting(
        32, accepted=(32, 64, 128), help="numbers that share a scale and a zero; adds 32/group_size bits a number"
    )


def _gaussian_error(settings: KiviSettings, head_dim: int) -> float:
    """Relative squared error on N(0, 1), with 15% to spare: measured at 2 bits and groups of 32, then by step width."""
    at_two_bits = {32: 0.1545, 64: 0.2027, 128: 0.2505}[settings.group_size]
    steps: int = 2**settings.bits - 1
    return 1.15 * at_two_bits * (3 / steps) ** 2


FACTS = MethodFacts(
    name="kivi",
    summary="per-channel keys and per-token values in groups, min/max codes of 2, 3, 4 or 8 bits",
    paper="arXiv 2402.02750",
    settings=KiviSettings,
    capabilities=Capabilities(constant_exact=True, scale_equivariant=True, gaussian_error=_gaussian_error),
    verified=("bits=2", "bits=3", "bits=4", "bits=8"),
)


@attrs.frozen(eq=False)
class KiviState:
    """What the hooks need of one layer side.

    Attributes:
        bits, group_size: The settings.
        side: ``"keys"`` (groups of tokens) or ``"values"`` (groups of channels).
        head_dim: D.
        padded: Channels of a stored value: D filled up to whole groups.
        metadata: Dtype of scale and zero.
        may_widen: Whether data can be out of float16's range.
    """

    bits: int
    group_size: int
    side: Side
    head_dim: int
    padded: int
    metadata: Literal["float16", "float32"]
    may_widen: bool


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    return FACTS


@hookimpl
def vq_prepare(ctx: PrepareContext, settings: KiviSettings) -> KiviState:
    """No constants: KIVI has none."""
    size = settings.group_size
    return KiviState(
        bits=settings.bits,
        group_size=size,
        side=ctx.side,
        head_dim=ctx.head_dim,
        padded=-(-ctx.head_dim // size) * size,
        metadata="float32" if ctx.dtype == "float32" else "float16",
        may_widen=ctx.dtype == "bfloat16",
    )


@hookimpl
def vq_layout(state: KiviState) -> Layout:
    """Codes, scale and zero of a page of 128 tokens."""
    page, bits, size = 128, state.bits, state.group_size
    wide = "float32" if state.may_widen else None
    if state.side == "keys":
        block, axis = size, 1
        codes, groups = (state.head_dim, page * bits // 32), (state.head_dim, page // size)
    else:
        block, axis = 1, 0
        codes, groups = (page, state.padded * bits // 32), (page, state.padded // size)
    return Layout(
        block,
        (
            Field("codes", "uint32", codes, axis, codes=True),
            Field("scale", state.metadata, groups, axis, wide=wide),
            Field("zero", state.metadata, groups, axis, wide=wide),
        ),
        page,
    )


@attrs.frozen(eq=False)
class KiviCodes:
    """Unpacked codes (..., groups, group_size) and their metadata (..., groups) as stored."""

    codes: mx.array
    scale: mx.array
    zero: mx.array


@hookimpl
def vq_encode(state: KiviState, x: mx.array) -> KiviCodes:
    """Group along tokens (keys) or channels (values), quantize.  NaN stays in its group, with code 0."""
    found = quantize(state, x)
    return KiviCodes(found.codes, *stored(state, found.scale, found.zero))


def quantize(state: KiviState, x: mx.array) -> KiviCodes:
    """Codes, and scale and zero as they are kept, in float32."""
    x = x.astype(mx.float32)
    if state.side == "keys":
        x = x.swapaxes(-1, -2)
    elif state.padded != state.head_dim:
        x = mx.pad(x, [(0, 0)] * 3 + [(0, state.padded - state.head_dim)], mode="edge")
    groups = x.reshape(*x.shape[:-1], -1, state.group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    # A minimum does not promise which zero it is, nor does a maximum; -0.0 - 0.0 would be a scale of -0.0.
    low, high = mx.where(low == 0, 0.0, low), mx.where(high == 0, 0.0, high)
    levels = 2**state.bits - 1
    scale, zero = kept(state, (high - low) / levels, low)
    step, base = scale[..., None], zero[..., None]
    usable = (step > 0) & (step < mx.inf)
    steps = (groups - base) / mx.where(usable, step, 1.0)
    codes = mx.clip(mx.round(steps), 0, levels)
    return KiviCodes(mx.where(usable & (codes >= 0), codes, 0).astype(mx.uint32), scale, zero)


def kept(state: KiviState, scale: mx.array, zero: mx.array) -> tuple[mx.array, mx.array]:
    """Scale and zero as the store keeps them, still in float32.

    Each number is rounded to float16 where it fits, whatever the array's dtype, so that what a group stores does
    not depend on its neighbours.  Only a bfloat16 model can hold numbers that do not fit.
    """
    if state.metadata == "float32":
        return scale, zero
    fits: mx.array | bool = True
    if state.may_widen:
        fits = (mx.abs(zero) <= FLOAT16_MAX) & (scale <= FLOAT16_MAX)
    found = [mx.where(fits, a.astype(mx.float16).astype(mx.float32), a) for a in (scale, zero)]
    return found[0], found[1]


def stored(state: KiviState, scale: mx.array, zero: mx.array) -> tuple[mx.array, mx.array]:
    """Kept numbers in the dtype of the store.

    For a bfloat16 model, and only there, a flush looks at the data, which waits for it.
    """
    if state.metadata == "float32" or (scale.dtype == mx.float16 and zero.dtype == mx.float16):
        return scale, zero
    if state.may_widen:
        outside = [(mx.abs(a) > FLOAT16_MAX) & (mx.abs(a) < mx.inf) for a in (scale, zero)]
        if mx.any(outside[0] | outside[1]).item():
            return scale, zero
    return scale.astype(mx.float16), zero.astype(mx.float16)


@hookimpl
def vq_pack(state: KiviState, codes: KiviCodes) -> Mapping[str, mx.array]:
    """Codes into words; scale and zero as they are."""
    flat = codes.codes.reshape(*codes.codes.shape[:-2], -1)
    return {"codes": pack_bits(flat, state.bits), "scale": codes.scale, "zero": codes.zero}


@hookimpl
def vq_decode(state: KiviState, packed: Mapping[str, mx.array]) -> mx.array:
    """code * scale + zero in float32."""
    codes = unpack_bits(packed["codes"], state.bits)
    groups = codes.reshape(*codes.shape[:-1], -1, state.group_size).astype(mx.float32)
    scale, zero = (packed[name].astype(mx.float32)[..., None] for name in ("scale", "zero"))
    x = (groups * scale + zero).reshape(codes.shape)
    return x.swapaxes(-1, -2) if state.side == "keys" else x[..., : state.head_dim]


@hookimpl
def vq_kernels() -> Sequence[KernelOffer]:
    """Quantize and pack in one pass, and unpack: :mod:`vq_kivi.kernels`."""
    from vq_kivi.kernels import OFFERS

    return OFFERS


@hookimpl
def vq_device() -> Sequence[DeviceForm]:
    """The order in which tensor cores take codes: :mod:`vq_kivi.kernels.device`."""
    from vq_kivi.kernels.form import FORMS

    return FORMS


@attrs.frozen(eq=False)
class KiviKeys:
    """Scores by ``mx.quantized_matmul`` on transposed pages: q (M, D) times codes (D, tokens)."""

    state: KiviState

    def prepare_query(self, queries: mx.array) -> mx.array:
        """Nothing to fold."""
        return queries

    def scores(self, queries: mx.array, tile: Mapping[str, mx.array]) -> mx.array:
        """(N, H, M, page)."""
        pages, heads = tile["codes"].shape[:2]
        if queries.shape[0] == pages or mx.default_device() != mx.cpu:
            return _matmul(self.state, queries, tile)
        # On the CPU quantized_matmul copies the queries for every page, as much memory as the scores take. The
        # gathering product computes the same, bit for bit, and reads them where they lie.
        page = mx.arange(pages * heads, dtype=mx.uint32).reshape(pages, heads)
        codes, scale, zero = (tile[name].flatten(0, 1) for name in ("codes", "scale", "zero"))
        return mx.gather_qmm(
            queries.flatten(0, 1), codes, scale.astype(queries.dtype), zero.astype(queries.dtype),
            lhs_indices=page % heads, rhs_indices=page, transpose=False,
            group_size=self.state.group_size, bits=self.state.bits,
        )  # fmt: skip


@attrs.frozen(eq=False)
class KiviValues:
    """Sums by ``mx.quantized_matmul`` on pages of values: weights (M, tokens) times codes (tokens, D)."""

    state: KiviState

    def accumulate(self, weights: mx.array, tile: Mapping[str, mx.array]) -> mx.array:
        """(N, H, M, D filled up to whole groups)."""
        return _matmul(self.state, weights, tile)

    def finish(self, sums: mx.array) -> mx.array:
        """Cut the filling."""
        return sums[..., : self.state.head_dim]


def _matmul(state: KiviState, x: mx.array, tile: Mapping[str, Any]) -> mx.array:
    return mx.quantized_matmul(
        x, tile["codes"], tile["scale"].astype(x.dtype), tile["zero"].astype(x.dtype),
        transpose=False, group_size=state.group_size, bits=state.bits,
    )  # fmt: skip


@hookimpl
def vq_attend(state: KiviState, side: Side) -> KiviKeys | KiviValues:
    """Straight from the codes, on every MLX backend."""
    return KiviKeys(state) if side == "keys" else KiviValues(state)


@hookimpl
def vq_snippet(state: KiviState) -> Snippet:
    """Eight codes of a group at a time: :mod:`vq_kivi.kernels.snippets`."""
    from vq_kivi.kernels.snippets import snippet

    return snippet(state)
