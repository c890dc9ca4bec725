"""Masks of every form that models hand over, checked once and cut to the columns at hand."""

from __future__ import annotations

import attrs
import mlx.core as mx

from vq_core.attention.view import CacheView, Columns
from vq_core.errors import UnsupportedShapeError

LOWEST = float(mx.finfo(mx.float32).min)


@attrs.frozen(eq=False)
class Mask:
    """A mask over (L, T), normalised.

    Attributes:
        array: (B or 1, H or 1, R or 1, L or 1, T), bool (True is attended) or additive; ``None``: all is attended.
        causal: Lower-right aligned causal instead of an array.
        queries: L.
        length: T.
    """

    array: mx.array | None
    causal: bool
    queries: int
    length: int

    def block(self, columns: Columns, begin: int, end: int) -> mx.array | None:
        """The mask of queries ``begin`` to ``end`` over some columns, broadcastable to (B, H, R, l, count)."""
        seen = None
        if columns.valid is not None:
            seen = columns.valid[:, None, None, None, :]
        part = None
        if self.causal:
            rows = mx.arange(self.length - self.queries + begin, self.length - self.queries + end)[:, None]
            if columns.index is None:
                part = (mx.arange(columns.start, columns.start + columns.count) <= rows)[None, None, None]
            else:
                part = (columns.index[:, None, :] <= rows)[:, None, None]
        elif self.array is not None:
            part = self.array if self.array.shape[3] == 1 else self.array[:, :, :, begin:end]
            if columns.index is None:
                if (columns.start, columns.count) != (0, self.length):
                    part = part[..., columns.start : columns.start + columns.count]
            else:
                index = columns.index[:, None, None, None, :]
                part = mx.broadcast_to(part, (index.shape[0], *part.shape[1:]))
                index = mx.broadcast_to(index, (*part.shape[:-1], index.shape[-1]))
                part = mx.take_along_axis(part, index, axis=-1)
        if seen is None or part is None:
            return part if seen is None else seen
        return part & seen if part.dtype == mx.bool_ else mx.where(seen, part.astype(mx.float32), LOWEST)


def read_mask(mask: mx.array | str | None, view: CacheView, query_heads: int, queries: int) -> Mask:
    """Check a mask against the cache and the queries.

    Args:
        mask: ``None``, ``"causal"`` (lower-right aligned), or an array broadcastable to (B, H_q, L, T), bool or
            additive; (L, T) and (B, L, T) are accepted too.
        view: The cache.
        query_heads: H_q.
        queries: L.

    Raises:
        UnsupportedShapeError: naming the mask's shape and the one needed.
    """
    length = view.length
    if mask is None or (isinstance(mask, str) and mask == "causal" and queries == 1):
        return Mask(None, False, queries, length)
    if isinstance(mask, str):
        if mask != "causal":
            raise UnsupportedShapeError(f"mask {mask!r} is not known; accepted: None, 'causal' or an array")
        if queries > length:
            raise UnsupportedShapeError(
                f"a causal mask of {queries} queries needs as many tokens; the cache has {length}"
            )
        return Mask(None, True, queries, length)
    if not isinstance(mask, mx.array):
        raise UnsupportedShapeError(f"mask of type {type(mask).__name__}: accepted are None, 'causal' or an MLX array")
    heads, repeats = view.heads, query_heads // view.heads
    shape = {2: (1, 1, *mask.shape), 3: (mask.shape[0], 1, *mask.shape[1:])}.get(mask.ndim, mask.shape)
    wanted = (view.rows, query_heads, queries, length)
    if (
        len(shape) != 4
        or mask.ndim < 2
        or shape[3] != length
        or any(n not in (1, w) for n, w in zip(shape, wanted, strict=True))
    ):
        raise UnsupportedShapeError(
            f"mask of shape {mask.shape}: the cache holds {length} tokens, so the mask must be broadcastable to "
            f"(B, H_q, L, T) = {wanted} with all {length} columns"
        )
    array = mask.reshape(shape)
    folded = (shape[0], 1, 1, *shape[2:]) if shape[1] == 1 else (shape[0], heads, repeats, *shape[2:])
    return Mask(array.reshape(folded), False, queries, length)


def causal_mask(
    N: int, offset: int, sliding: int | None = None, window_size: int | None = None, return_array: bool = False
) -> mx.array | str | None:
    """The mask of N new tokens after ``offset`` ones, in the forms that mlx-lm's caches give.

    Args:
        N: New tokens.
        offset: Tokens before them.
        sliding: W of a cache that keeps the newest W tokens: N queries see W - 1 + N columns at most.
        window_size: The newest tokens that each query attends to; by default ``sliding``, else all.
        return_array: An array even where a word would do.

    Returns:
        ``None`` (all is attended), ``"causal"``, or bool (N, columns).
    """
    width = N + (offset if sliding is None else min(offset, sliding - 1))
    if N == 1 and (window_size is None or (sliding is not None and width <= window_size)):
        return None
    window_size = window_size or sliding
    if not return_array and (window_size is None or (sliding is not None and width <= window_size)):
        return "causal"
    rows, columns = mx.arange(width - N, width)[:, None], mx.arange(width)[None]
    mask = rows >= columns
    return mask if window_size is None else mask & (rows < columns + window_size)


def apply(scores: mx.array, mask: mx.array | None) -> mx.array:
    """Scores (B, H, R, l, n) float32 under a block of a mask."""
    if mask is None:
        return scores
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, LOWEST)
    # What is masked out is replaced: minus infinity minus itself, or a NaN of another row, must not get through.
    added = mask.astype(mx.float32)
    return mx.where(added <= LOWEST, LOWEST, scores + added)
