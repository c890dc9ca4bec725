"""What keys and values of one update must be, before anything of a cache is asked."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vq_core.errors import UnsupportedShapeError

DTYPES = ("float16", "bfloat16", "float32")


def check_pair(keys: Any, values: Any) -> None:
    """Refuse what is no pair of arrays (B, H, L, D).

    Raises:
        UnsupportedShapeError: naming the shapes or dtypes.
    """
    for name, x in (("keys", keys), ("values", values)):
        if not isinstance(x, mx.array):
            raise UnsupportedShapeError(f"{name} must be an MLX array (B, H, L, D), got {type(x).__name__}")
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise UnsupportedShapeError(
            f"keys {keys.shape} and values {values.shape} must be (B, H, L, D) with the same B, H and L"
        )
    if 0 in keys.shape or 0 in values.shape:
        raise UnsupportedShapeError(
            f"keys {keys.shape}, values {values.shape}: every length must be at least 1 (S = 0 adds no token)"
        )
    if keys.dtype != values.dtype:
        raise UnsupportedShapeError(f"keys are {keys.dtype}, values {values.dtype}: they must agree")


def shape_of(keys: mx.array, values: mx.array) -> tuple[Any, ...]:
    """B, H, D of the keys, D of the values and dtype."""
    return (*keys.shape[:2], keys.shape[3], values.shape[3], str(keys.dtype).removeprefix("mlx.core."))
