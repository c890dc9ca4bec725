"""Random keys and values to fill caches with, in chunks: no long array is made that a cache does not hold."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

CHUNK = 4096
"""Tokens of a chunk, a multiple of the steps by which mlx-lm's caches and ours grow."""
OUTLIER_EVERY, OUTLIER_SCALE, OUTLIER_OFFSET = 16, 4.0, 3.0
"""Keys of real models have a few channels that are much larger than the rest, always the same ones."""


def chunks(
    tokens: int, *, batch: int, kv_heads: int, head_dim: int, dtype: str, seed: int, chunk: int = CHUNK
) -> Iterator[tuple[mx.array, mx.array]]:
    """Keys and values (B, H, n, D), evaluated, ``tokens`` of them in all; the same for the same arguments."""
    kind = getattr(mx, dtype)
    outlier = mx.arange(head_dim) % OUTLIER_EVERY == OUTLIER_EVERY // 2
    scale, offset = mx.where(outlier, OUTLIER_SCALE, 1.0), mx.where(outlier, OUTLIER_OFFSET, 0.0)
    for number, start in enumerate(range(0, tokens, chunk)):
        shape = (batch, kv_heads, min(chunk, tokens - start), head_dim)
        first, second = mx.random.split(mx.random.key((seed << 24) + number))
        keys = (mx.random.normal(shape, key=first) * scale + offset).astype(kind)
        values = mx.random.normal(shape, key=second).astype(kind)
        mx.eval(keys, values)
        yield keys, values
