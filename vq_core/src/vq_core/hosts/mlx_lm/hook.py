"""The one attribute that is replaced: ``mx.fast.scaled_dot_product_attention``.

mlx-lm's models look it up at every call, whatever was imported first and whichever module calls it, so this
reaches layers that share another layer's keys, learned sinks and direct callers alike.  Arrays that carry no
tag go to MLX's own function.
"""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx

from vq_core.attention.packed import stock_attention
from vq_core.cache.tagged import StrictTag, reading_of

_lock = threading.Lock()
_original: Any = None
_users = 0


def packed_or_stock(q: Any, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None, **rest: Any) -> Any:
    """Attention on packed codes where keys and values carry a tag, else what was there before."""
    reading = reading_of(k, v)
    if reading is not None:
        return reading.attend(q, scale=scale, mask=mask, sinks=sinks)
    k, v = (x.dense() if type(x) is StrictTag else x for x in (k, v))
    return (_original or stock_attention)(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)


def install() -> None:
    """Replace the attribute, once; further calls only count."""
    global _original, _users
    with _lock:
        _users += 1
        if mx.fast.scaled_dot_product_attention is not packed_or_stock:
            _original = mx.fast.scaled_dot_product_attention
            mx.fast.scaled_dot_product_attention = packed_or_stock


def uninstall() -> None:
    """Undo one :func:`install`; the last one puts the original back, unless somebody has replaced ours."""
    global _users
    with _lock:
        _users = max(0, _users - 1)
        if not _users and mx.fast.scaled_dot_product_attention is packed_or_stock:
            mx.fast.scaled_dot_product_attention = _original


def installed() -> bool:
    """Whether attention goes through vq now."""
    return mx.fast.scaled_dot_product_attention is packed_or_stock
