"""Caches that were handed out, and what they held when nobody holds them any more."""

from __future__ import annotations

import weakref
from typing import Any

from vq_core.cache.report import LayerReport, describe
from vq_core.hosts.mlx_lm.layers import OURS
from vq_core.hosts.mlx_lm.report import held_bytes


class Made:
    """A cache as long as somebody holds it, and what it held when nobody does any more."""

    def __init__(self, cache: Any, keep: bool = True):
        self.name = "" if cache is None else type(cache).__name__
        self.ours = isinstance(cache, OURS)
        self._report: LayerReport | None = None
        self._nbytes = 0
        self._cache = cache if not keep or cache is None else _reference(cache)
        if isinstance(self._cache, weakref.ref):
            # What was held is told from the instance's dictionary: the cache itself is gone by then.
            weakref.finalize(cache, self._close, cache.__dict__).atexit = False

    def _alive(self) -> Any:
        return self._cache() if isinstance(self._cache, weakref.ref) else self._cache

    def report(self) -> LayerReport | None:
        """Of one of our caches, ``None`` if there never was one."""
        cache = self._alive()
        return cache.report() if isinstance(cache, OURS) else self._report

    def nbytes(self) -> int:
        """Bytes of a native cache's arrays; mlx-lm's own ``nbytes`` raises while some of them are empty."""
        cache = self._alive()
        return self._nbytes if cache is None else held_bytes(cache)

    def _close(self, held: dict[str, Any]) -> None:
        if self.ours:
            self._report = describe(held["policy"], held["_history"], held["reads"], held["layer"], held["sliding"])
        else:
            self._nbytes = held_bytes(held)


def _reference(cache: Any) -> Any:
    try:
        return weakref.ref(cache)
    except TypeError:  # a class with slots, of somebody else
        return None
