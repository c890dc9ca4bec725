"""Drafts for speculative decoding."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx

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
