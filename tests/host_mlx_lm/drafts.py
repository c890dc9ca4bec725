"""Drafts for speculative decoding, and what the caches of a run were given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from vq_core import PackedKVCache

from .models import build

DRAFTS = ("good", "bad", "half")


def draft_of(kind: str, name: str = "llama", **changes: Any) -> Any:
    """A draft for ``build(name)``: that model again, another one, or that model wrong at every second call."""
    model = build(name, seed=3 if kind == "bad" else 0, **changes)
    if kind == "half":
        calls = itertools.count()

        class Half(type(model)):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
                logits = super().__call__(*args, **kwargs)
                return mx.roll(logits, 1, axis=-1) if next(calls) % 2 else logits

        model.__class__ = Half
    return model


class Fed:
    """Calls on one cache: ``("update", keys, values)`` and ``("trim", n)``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def tokens(self) -> tuple[mx.array, mx.array]:
        """Keys and values that were given and not taken back."""
        keys, values = None, None
        for what, *given in self.calls:
            if what == "trim":
                left = keys.shape[2] - given[0]
                keys, values = keys[:, :, :left], values[:, :, :left]
            elif keys is None:
                keys, values = given
            else:
                keys, values = mx.concatenate([keys, given[0]], axis=2), mx.concatenate([values, given[1]], axis=2)
        return keys, values


@contextmanager
def recorded(caches: list[Any], monkeypatch: Any) -> Iterator[list[Fed]]:
    """What each of these caches is given while the block runs."""
    fed = {id(cache): Fed() for cache in caches}
    update, trim = PackedKVCache.update_and_fetch, PackedKVCache.trim

    def updating(self: PackedKVCache, keys: mx.array, values: mx.array) -> Any:
        if id(self) in fed:
            fed[id(self)].calls.append(("update", keys, values))
        return update(self, keys, values)

    def trimming(self: PackedKVCache, n: int) -> int:
        dropped = trim(self, n)
        if id(self) in fed and dropped:
            fed[id(self)].calls.append(("trim", dropped))
        return dropped

    with monkeypatch.context() as patch:
        patch.setattr(PackedKVCache, "update_and_fetch", updating)
        patch.setattr(PackedKVCache, "trim", trimming)
        yield [fed[id(cache)] for cache in caches]
