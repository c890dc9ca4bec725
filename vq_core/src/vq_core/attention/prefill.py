"""Long queries on a GPU: the history decoded by one kernel a side into a bounded scratch, for MLX's own attention.

MLX's attention does not return what two partial results would be merged by, so the scratch holds all tokens; where
that passes a bound, or MLX has no fused attention for the shape, the history is walked in tiles instead
(:mod:`vq_core.attention.tiled`).
"""

from __future__ import annotations

import mlx.core as mx

from vq_core.attention.choice import Fit
from vq_core.attention.fused import exact_arrays, facts_of, field_arrays, table_of
from vq_core.attention.masks import Mask
from vq_core.attention.view import CacheView

SCRATCH = 1 << 28
"""Bytes of keys and values that are decoded at once: 65,536 tokens of 8 heads of 128 in float16."""
CUDA_WIDEST = 128
METAL_SIZES = (64, 80, 96, 128)


def why_tiles(view: CacheView, found: Fit, mask: Mask, sinks: mx.array | None) -> str:
    """Why a reading's long queries walk tiles; nothing where they read a scratch."""
    if found.dense is None:
        return found.dense_why
    if not view.plain:
        return "rows of unequal length, or tokens that have left the window, need masks of their own"
    keys, values = view.keys.exact, view.values.exact
    size = view.rows * view.heads * view.length * (keys.shape[3] + values.shape[3]) * keys.dtype.size
    if size > SCRATCH:
        return f"{size} bytes of decoded tokens; at most {SCRATCH} are held at once"
    return _no_attention(view, found, mask, sinks)


def _no_attention(view: CacheView, found: Fit, mask: Mask, sinks: mx.array | None) -> str:
    """Why MLX would make all scores at once instead of fusing."""
    D, Dv, dtype = view.keys.exact.shape[3], view.values.exact.shape[3], view.keys.exact.dtype
    if sinks is not None and (found.backend == "cuda" or sinks.dtype != dtype):
        return "MLX has no fused attention with sinks here"
    if mask.array is not None and (found.backend == "cuda" or mask.array.dtype not in (mx.bool_, dtype)):
        return "MLX has no fused attention for this mask here"
    if found.backend == "metal" and (Dv != D or D not in METAL_SIZES):
        return f"MLX's fused attention on Metal is for head sizes {', '.join(map(str, METAL_SIZES))}"
    if found.backend == "cuda" and (Dv != D or D > CUDA_WIDEST or D % 8 or dtype == mx.float32):
        return f"MLX's fused attention on CUDA is for 16-bit heads of up to {CUDA_WIDEST}"
    return ""


def attend_scratch(
    view: CacheView, found: Fit, q: mx.array, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Attention of any number of queries (B, H_q, L, D): (B, H_q, L, D_v)."""
    from vq_core.attention.packed import stock_attention

    keys, values = decoded(view, found, q)
    given = "causal" if mask.causal else None if mask.array is None else mask.array.flatten(1, 2)
    out: mx.array = stock_attention(q.astype(keys.dtype), keys, values, scale=scale, mask=given, sinks=sinks)
    begin(out)
    return out


def begin(out: mx.array) -> None:
    """Let the device start while Python describes the next layers, which for packed caches takes it longer.

    Waits for nothing. Within a transformation, where nothing may be evaluated, nothing starts.
    """
    try:
        mx.async_eval(out)  # type: ignore[no-untyped-call]
    except ValueError as error:
        if "graph transformation" not in str(error):
            raise


def decoded(view: CacheView, found: Fit, after: mx.array) -> tuple[mx.array, mx.array]:
    """All keys and values (B, H, T, D), decoded not before an array is there: MLX would decode many layers first."""
    assert found.dense is not None
    sides = view.keys, view.values
    fields = [field_arrays(side, known) for side, known in zip(sides, found.sides, strict=True)]
    given: list[mx.array] = [*fields[0], *fields[1]]
    given = mx.depends(given, [after]) if given else given
    halves = given[: len(fields[0])], given[len(fields[0]) :]
    facts, regular = facts_of(view), [side.pages.table is None for side in sides]
    numbers = {"length": view.length, "before": view.length - min(view.lengths)}
    made = []
    for side, kernel, part, plain in zip(sides, found.dense, halves, regular, strict=True):
        exact, first = exact_arrays(side)
        if side.sinks is None:
            first = _NONE[exact.dtype]  # the window itself, which else stands for them, might be copied once more
        y: mx.array = kernel(
            facts, exact, first, table_of(side, view.rows, plain), *part, backend=found.backend, **numbers,
            regular=int(plain), depth=side.pages.depth,
        )[0]  # fmt: skip
        made.append(y)
    return made[0], made[1]


_NONE = {dtype: mx.array([[[[0.0]] * 8]], dtype) for dtype in (mx.float16, mx.bfloat16, mx.float32)}
"""First tokens where there are none, (1, 1, 8, 1)."""
