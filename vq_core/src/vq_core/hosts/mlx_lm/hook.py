"""The one attribute that is replaced: ``mx.fast.scaled_dot_product_attention``.

mlx-lm's models look it up at every call, whatever was imported first and whichever module calls it, so this
reaches layers that share another layer's keys, learned sinks and direct callers alike.  Arrays that carry no
tag go to what was there before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vq_core.cache.tagged import StrictTag, reading_of

_BEFORE = "vq_before"
"""Attribute of our function: what it has replaced."""

_lock = threading.RLock()
_users = 0
_lease: Lease | None = None
"""What strict tags hold; ``None`` while there are no users."""
_leases = 0
"""Leases that still exist: the one above, and those of before that tags still hold."""


def _reading_tags(before: Callable[..., Any]) -> Callable[..., Any]:
    """Attention on packed codes where keys and values carry a tag, else ``before``.

    Each installation is a function of its own: somebody may wrap ours, and a later one of ours on top must lead
    to that wrapper and through it to our first, not in a circle.
    """

    def attention(q: Any, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None, **rest: Any) -> Any:
        reading = reading_of(k, v)
        if reading is None:
            k, v = (x.dense() if type(x) is StrictTag else x for x in (k, v))
            return before(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        if rest and rest.get("stream") is not None:
            with mx.stream(rest["stream"]):
                return reading.attend(q, scale=scale, mask=mask, sinks=sinks)
        return reading.attend(q, scale=scale, mask=mask, sinks=sinks)

    setattr(attention, _BEFORE, before)
    return attention


def install() -> None:
    """Replace the attribute, once; further calls only count."""
    global _users, _lease
    with _lock:
        _users += 1
        if _lease is None:
            _lease = Lease()
        if not installed():
            mx.fast.scaled_dot_product_attention = _reading_tags(mx.fast.scaled_dot_product_attention)


def uninstall() -> None:
    """Undo one :func:`install`; the last one puts back what was there, unless somebody has replaced ours.

    While another thread is between a layer's update and its attention, that attention is waited for: ours is taken
    away when the last strict tag is gone.
    """
    global _users, _lease
    with _lock:
        _users = max(0, _users - 1)
        if not _users:
            _lease = None  # the last to hold it, now or later, takes ours away
        _remove_unused()


def _remove_unused() -> None:
    if not _users and not _leases and installed():
        mx.fast.scaled_dot_product_attention = getattr(mx.fast.scaled_dot_product_attention, _BEFORE)


def installed() -> bool:
    """Whether attention is ours now; not where somebody has replaced it since, perhaps by a wrapper around ours."""
    return hasattr(mx.fast.scaled_dot_product_attention, _BEFORE)


class WhileInstalled:
    """Lets tags do without a dense side only while attention is ours, which then stays as long as they do."""

    def lease(self) -> Lease | None:
        """To be held by strict tags; ``None`` where they must not be strict."""
        # No lock: asked at every update. What is read here is held before anything is decided, and a lease that is
        # held keeps ours in place, however many are uninstalled meanwhile.
        lease = _lease
        return lease if lease is not None and installed() else None


class Lease:
    """Keeps attention ours until nobody holds it; one is shared by all tags while there are users.

    Python counts who holds it, so that no step has to.
    """

    def __init__(self) -> None:
        global _leases
        with _lock:
            _leases += 1
        # Not ``__del__``: that would run, and fail, while the interpreter takes this module apart.
        weakref.finalize(self, _returned).atexit = False


def _returned() -> None:
    global _leases
    with _lock:
        _leases -= 1
        _remove_unused()
