"""Attention straight from packed codes, by the fastest tier that fits.

One step (few queries): the fused kernels where there are any, see :mod:`vq_core.attention.fused`; else, in plain MLX
operations, scores of all pages, of the sink tokens and of the window in one row, one softmax, then the weighted sums.
The transient memory is a few rows of scores, whatever the codes weigh.

Long queries (prefill): on a GPU the history is decoded into a bounded scratch for MLX's own attention, see
:mod:`vq_core.attention.prefill`; else it is decoded tile by tile and multiplied, with an online softmax.  Each tile is
made to depend on the sums so far, so that MLX cannot schedule the decoding of many tiles first.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vq_core.attention import view as views
from vq_core.attention.choice import Fit, field_dtypes, fit, not_served, proven
from vq_core.attention.fused import Step, additive, fresh_of, kernel_step, matrix_step, rows_at_once
from vq_core.attention.masks import Mask, apply, read_mask
from vq_core.attention.prefill import attend_scratch, begin, why_tiles
from vq_core.attention.ready import Ready, keep
from vq_core.attention.ready import kind as known
from vq_core.attention.sides import compute_dtype
from vq_core.attention.step import attend_step
from vq_core.attention.tiled import attend_tiled
from vq_core.attention.view import CacheView, Columns
from vq_core.errors import CacheStateError, SettingsError, UnsupportedShapeError
from vq_core.kernels.skeleton.matrix import INFINITE_BITS, scale_bits

STEP_QUERIES = 16
"""Longest query that takes the one-step path; longer ones decode tiles, which costs less per query."""

stock_attention = mx.fast.scaled_dot_product_attention
"""MLX's own attention, taken before any host replaces the attribute."""


def attend(
    view: CacheView,
    queries: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    tier: str = "auto",
    fallback: str = "error",
    trying: bool = False,
) -> mx.array:
    """Attention of some queries over a cache.

    Args:
        view: The cache, T tokens.
        queries: (B, H_q, L, D), H_q a multiple of the KV heads. Not changed.
        scale: Multiplies the dot products.
        mask: ``None``, ``"causal"`` (lower-right aligned) or an array, bool or additive, see :func:`read_mask`.
        sinks: The model's learned attention sinks, (H_q,): one more logit in each softmax.
        tier: ``"auto"``: the fastest that fits; ``"matrix"`` and ``"kernel"``: the fused kernels for up to
            16 queries, on tensor cores or anywhere; ``"mlx"``: plain
            MLX operations; ``"reference"``: dense float32 over the decoded cache.
        fallback: What a kernel that fails its probe does, see :class:`~vq_core.cache.policy.LayerPolicy`.
        trying: The call is that probe.

    Returns:
        (B, H_q, L, D_v) in the queries' dtype.

    Raises:
        CacheStateError: the cache is empty.
        UnsupportedShapeError: queries, scale, mask or sinks that do not fit the cache, or a tier asked for by name that
            cannot do it, naming the limit.
        SettingsError: a tier of another name.
        PluginError: a kernel fails its probe.
    """
    fresh = fresh_of(view)
    steady = None if trying else view.steady
    ready: Ready | None = None if steady is None else steady.ready
    if ready is not None and ready.like(queries, scale, mask, sinks, tier, fresh, view.length):
        step = ready.kind.step(view)
        if step is not None:
            return step(view, queries, sinks, None, ready.stored)
    key = None if trying else _key(view, queries, scale, mask, sinks, tier, fresh)
    kind = None if key is None else known(key)
    if kind is not None and queries.shape[2] <= view.length:  # of more a causal mask is refused
        step = kind.step(view)
        if step is not None:
            if steady is not None and sinks is None:
                steady.ready = Ready(
                    kind, tier, scale, mask, queries.shape, queries.dtype, fresh,  # type: ignore[arg-type]
                    step.stored(view), (0,) * view.rows,
                )  # fmt: skip
            return step(view, queries, sinks)
    _check(view, queries, sinks, tier)
    scale = _number(scale)
    B, heads, L, D = queries.shape
    checked = read_mask(mask, view, heads, L)
    if tier != "reference" and _as_stock(view, checked, sinks):
        q = queries.astype(view.keys.exact.dtype)
        stock = mask if checked.array is None else checked.array.flatten(1, 2)
        out = stock_attention(q, view.keys.exact, view.values.exact, scale=scale, mask=stock, sinks=sinks)
        if L > STEP_QUERIES and view.keys.bound.backend not in (None, "simulator"):
            begin(out)
        return out.astype(queries.dtype)
    if tier in ("auto", "matrix", "kernel") and max(view.packed):
        done = _by_kernels(view, queries, scale, checked, sinks, tier, fallback, trying)
        if isinstance(done, Step):
            if key is not None:
                keep(key, view, done)
            given = None if checked.array is None else additive(checked.array, view.heads)
            return done(view, queries, sinks, given)
        if done is not None:
            return done
    compute = mx.float32 if tier == "reference" else compute_dtype(view.keys.exact.dtype)
    q = (queries.astype(mx.float32) * scale).astype(compute).reshape(B, view.heads, heads // view.heads, L, D)
    if tier == "reference":
        out = _reference(view, q, checked, sinks)
    elif L <= STEP_QUERIES:
        out = attend_step(view, q, checked, sinks)
    else:
        out = attend_tiled(view, q, checked, sinks)
    return out.reshape(B, heads, L, -1).astype(queries.dtype)


HIGHEST_SCALE = 1e38
TIERS = ("auto", "matrix", "kernel", "mlx", "reference")


def _key(
    view: CacheView, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None, tier: str,
    fresh: int,
) -> tuple[Any, ...] | None:  # fmt: skip
    """What a ready step depends on, but for the exact tokens.

    ``None`` where that cannot be told, and for what :func:`_check` refuses.
    """
    keys, values = view.keys, view.values
    if not (mask is None or isinstance(mask, str)) or not isinstance(scale, (float, int)):
        return None
    if not isinstance(queries, mx.array) or not (sinks is None or isinstance(sinks, mx.array)):
        return None
    if queries.ndim != 4 or queries.shape[2] > STEP_QUERIES:
        return None
    told = None if sinks is None else (sinks.shape, sinks.dtype)
    return (
        keys.bound, values.bound, tier, fresh, mask, scale, told, queries.shape, queries.dtype, view.packed, view.sinks,
        keys.pages.table is None, values.pages.table is None,
        *(field_dtypes(keys) if keys.bound.layout.widens else ()),
        *(field_dtypes(values) if values.bound.layout.widens else ()),
    )  # fmt: skip


def _by_kernels(
    view: CacheView, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None, tier: str, fallback: str,
    trying: bool,
) -> mx.array | Step | None:  # fmt: skip
    """By the fastest kernels that fit, or a step ready to run; ``None`` where plain operations serve."""
    found, L = fit(view), queries.shape[2]
    if L > STEP_QUERIES:
        if why_tiles(view, found, mask, sinks) or (not trying and proven(view, found, queries, "long", 0, fallback)):
            return None
        return attend_scratch(view, found, queries, scale, mask, sinks).astype(queries.dtype)
    why = ""
    if tier != "kernel":
        why = _why_no_matrix(view, found, queries, scale, mask)
        if not why:
            assert found.matrix is not None
            why = "" if trying else proven(view, found, queries, "matrix", 0, fallback)
        if not why and found.matrix is not None:
            return matrix_step(view, found.matrix, queries, scale, mask, sinks, found.backend)
    if tier != "matrix":
        why = found.why
        if found.kernels is not None:
            rows = rows_at_once(found.kernels, queries.shape[1] // view.heads * L)
            why = "" if trying else proven(view, found, queries, "kernel", rows, fallback)
            if not why:
                return kernel_step(view, found.kernels, queries, scale, mask, sinks, found.backend)
    if tier != "auto":
        raise not_served(tier, why)
    return None


def _why_no_matrix(view: CacheView, found: Fit, queries: mx.array, scale: float, mask: Mask) -> str:
    """Why tensor cores do not serve some queries; nothing where they do."""
    if found.matrix is None:
        return found.matrix_why
    if mask.array is not None:
        return "masks that are arrays are not for tensor cores"
    if not 0 < scale_bits(scale) < INFINITE_BITS:
        return f"a scale of {scale}: on tensor cores it must be above 0"
    if queries.dtype != view.keys.dtype:
        return f"queries of {queries.dtype} over exact tokens of {view.keys.dtype}"
    return ""


def _as_stock(view: CacheView, mask: Mask, sinks: mx.array | None) -> bool:
    """Whether nothing is packed, and MLX's own attention takes the mask's and the sinks' dtype."""
    dtype = view.keys.dtype
    if not view.plain or view.packed[0] or view.sinks[0] or (sinks is not None and sinks.dtype != dtype):
        return False
    return mask.array is None or mask.array.dtype in (mx.bool_, dtype)


def _check(view: CacheView, queries: mx.array, sinks: mx.array | None, tier: str) -> None:
    if tier not in TIERS:
        raise SettingsError(f"attention must be one of {', '.join(TIERS)}; got {tier!r}")
    if view.length == 0:
        raise CacheStateError("attention on an empty cache: call update_and_fetch first")
    if not isinstance(queries, mx.array):
        raise UnsupportedShapeError(f"queries must be an MLX array (B, H_q, L, D), got {type(queries).__name__}")
    dim = view.keys.bound.ctx.key_dim
    if queries.ndim != 4 or queries.shape[0] != view.rows or queries.shape[3] != dim or queries.shape[2] < 1:
        raise UnsupportedShapeError(
            f"queries of shape {queries.shape}: (B, H_q, L, D) must have B={view.rows}, D={dim}"
        )
    if not mx.issubdtype(queries.dtype, mx.floating):
        raise UnsupportedShapeError(f"queries are {queries.dtype}: they must be floating point")
    if queries.shape[1] % view.heads or not queries.shape[1]:
        raise UnsupportedShapeError(
            f"{queries.shape[1]} query heads: the number must be a multiple of the {view.heads} KV heads"
        )
    if sinks is not None and not isinstance(sinks, mx.array):
        raise UnsupportedShapeError(f"sinks must be an MLX array (H_q,) or None, got {type(sinks).__name__}")
    if sinks is not None and sinks.shape != (queries.shape[1],):
        raise UnsupportedShapeError(f"sinks of shape {sinks.shape}: one logit a query head, ({queries.shape[1]},)")


def _number(scale: Any) -> float:
    """A scale that was checked: finite, and so in the kernels' float32."""
    try:
        found = float(scale)
    except (TypeError, ValueError):
        raise UnsupportedShapeError(f"scale {scale!r} is no number; usual is D ** -0.5") from None
    if not abs(found) <= HIGHEST_SCALE:
        raise UnsupportedShapeError(f"scale {found}: a finite number up to {HIGHEST_SCALE:.0e} is accepted")
    return found


def _reference(view: CacheView, q: mx.array, mask: Mask, sinks: mx.array | None) -> mx.array:
    keys = views.dense(view, view.keys, mx.float32)
    values = views.dense(view, view.values, mx.float32)
    scores = q @ keys[:, :, None].swapaxes(-1, -2)
    columns = Columns(0, view.length)
    if not view.even:
        pads = [view.length - n for n in view.lengths]
        index = mx.broadcast_to(mx.arange(view.length), (view.rows, view.length))
        columns = Columns(0, view.length, index, mx.array([[i >= p for i in range(view.length)] for p in pads]))
    scores = apply(scores, mask.block(columns, 0, q.shape[3]))
    if sinks is not None:
        extra = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, *q.shape[1:3], 1, 1), (*scores.shape[:-1], 1))
        return mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1] @ values[:, :, None]
    return mx.softmax(scores, axis=-1) @ values[:, :, None]


__all__ = ["attend", "stock_attention"]
