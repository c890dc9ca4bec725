"""What attention keeps from one decode step to the next: steps made ready need no check.

Layers of one kind share a step, for all that it depends on is the same; what is a layer's own stays with its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx

from vq_core.attention.fused import Step, exact_splits
from vq_core.attention.view import CacheView

MOST_KINDS = 256


class Reading(Protocol):
    """A reading that is not made yet."""

    window: Any

    @property
    def view(self) -> CacheView:
        """It, made now."""


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
        key, (last, found) = (view.exact, view.hidden, view.length), self.last
        if last == key:
            return found
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
    hidden: tuple[int, ...]

    def like(self, queries: Any, scale: Any, mask: Any, sinks: Any, tier: str, fresh: int, length: int) -> bool:
        """Whether a call is like the last one, but for the exact tokens."""
        return (
            sinks is None
            and mask is self.mask
            and tier == self.tier
            and fresh == self.fresh
            and isinstance(scale, float)
            and scale == self.scale
            and isinstance(queries, mx.array)
            and queries.shape == self.shape
            and queries.dtype == self.dtype
            and self.shape[2] <= length  # of more a causal mask is refused
        )

    def joining(
        self, reading: Reading, exact: tuple[int, ...], length: int, queries: Any, scale: Any, mask: Any, sinks: Any,
        tier: str,
    ) -> mx.array | None:  # fmt: skip
        """Attention that joins new tokens to the window; ``None`` where the call is not like the last one.

        Args:
            reading: Of rows of one length, none of whose tokens are hidden.
            exact: Exact tokens of each row.
            length: T.
        """
        window = reading.window
        parts = window.parts()
        if parts is None or not self.like(queries, scale, mask, sinks, tier, parts[1].shape[2], length):
            return None
        step: Step | None
        key, step = self.kind.last
        if key != (exact, self.hidden, length):
            step = self.kind.step(reading.view)
        return None if step is None or not step.joins else step.joining(window, parts, queries, self.stored)
