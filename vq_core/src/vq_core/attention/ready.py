"""What attention keeps from one decode step to the next: steps made ready need no check.

Layers of one kind share a step, for all that it depends on is the same; what is a layer's own stays with its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.attention.fused import Step, exact_splits
from vq_core.attention.view import CacheView

MOST_KINDS = 256


@attrs.define(eq=False)
class Kind:
    """Steps that differ in the exact tokens only.

    Attributes:
        last: The newest one, and what it is for: a model's layers ask for the same one after another.
        by_splits: One for each number of splits of the exact tokens: others of it are like it but for the counts.
    """

    last: tuple[Any, Step]
    by_splits: dict[tuple[int, int], Step]

    def step(self, view: CacheView) -> Step | None:
        """The step of a reading; ``None`` where one has to be made from the beginning."""
        key = (view.exact, view.hidden, view.length)
        if self.last[0] == key:
            return self.last[1]
        before = self.by_splits.get(exact_splits(view))
        if before is None:
            return None
        step = before.grown(view)
        self.last = (key, step)
        return step

    def add(self, view: CacheView, step: Step) -> None:
        """Keep a step that was made from the beginning."""
        self.last = ((view.exact, view.hidden, view.length), step)
        self.by_splits[exact_splits(view)] = step


_kinds: dict[Any, Kind] = {}


def kind(lasting: tuple[Any, ...]) -> Kind | None:
    """The kind of all that steps depend on but the exact tokens."""
    return _kinds.get(lasting)


def keep(lasting: tuple[Any, ...], view: CacheView, step: Step) -> Kind:
    """Keep a step."""
    found = _kinds.get(lasting)
    if found is None:
        if len(_kinds) >= MOST_KINDS:
            _kinds.clear()
        found = _kinds[lasting] = Kind(((), step), {})
    found.add(view, step)
    return found


@attrs.define(eq=False)
class Ready:
    """One cache's next step, until tokens are packed: what a call must be like, and what the pass reads."""

    kind: Kind
    tier: str
    scale: float
    mask: str | None
    shape: tuple[int, ...]
    dtype: mx.Dtype
    fresh: int
    stored: Sequence[mx.array]

    def step(
        self, view: CacheView, queries: Any, scale: Any, mask: Any, sinks: Any, tier: str, fresh: int
    ) -> Step | None:
        """The step, if the call is like the last one."""
        if (
            sinks is not None
            or mask is not self.mask
            or tier != self.tier
            or fresh != self.fresh
            or not isinstance(scale, float)
            or scale != self.scale
            or not isinstance(queries, mx.array)
            or queries.shape != self.shape
            or queries.dtype != self.dtype
            or self.shape[2] > view.length  # of which a causal mask is refused
        ):
            return None
        return self.kind.step(view)
