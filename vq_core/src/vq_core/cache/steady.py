"""What stays as it is from one update to the next, which most decode steps find: nothing is packed or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.attention.pages import Pages
from vq_core.attention.view import CacheView
from vq_core.cache.window import Window


@attrs.define(eq=False)
class Steady:
    """Facts of a history that hold until tokens are packed or dropped; not to be changed.

    All rows grow by the same number, so what differs between rows is told relative to the first row's exact tokens.

    Attributes:
        keys_shape, values_shape, dtype: Of the last update, which was accepted: (B, H, L, D).
        length: L.
        most: Exact tokens that the first row may grow to before an update has more to do than append.
        longest: Tokens of the longest sequence, without the first row's exact ones.
        columns: The same of what is held: T.
        even: Whether all rows hold the same numbers of tokens.
        sinks, packed, dropped: Tokens of each row.
        keys, values: The packed pages.
        ready: What attention keeps for the next step.
    """

    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    dtype: mx.Dtype
    length: int
    most: int
    longest: int
    columns: int
    even: bool
    sinks: tuple[int, ...]
    packed: tuple[int, ...]
    dropped: tuple[int, ...]
    keys: Pages
    values: Pages
    ready: Any = None


@attrs.define(eq=False)
class Coming:
    """The reading after a step, made where more is asked of it than attention like that of the step before.

    Attributes:
        make: Of it.
        steady, window: What it is made of.
        length: L.
        all: Whether all tokens held are attended to.
    """

    make: Callable[[Steady, int], CacheView]
    steady: Steady
    window: Window
    length: int
    all: bool

    @property
    def view(self) -> CacheView:
        """All of it."""
        return self.make(self.steady, self.length)

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: Any, tier: str) -> mx.array | None:
        """Attention like that of the step before; ``None`` where the call is not."""
        ready, window = self.steady.ready, self.window
        if ready is None or not self.all or not self.steady.even:
            return None
        counts = window.counts
        found: mx.array | None = ready.joining(
            self, tuple(counts), self.steady.columns + counts[0], queries, scale, mask, sinks, tier
        )
        return found


def room(
    lengths: Sequence[int], packed: Sequence[int], dropped: Sequence[int], before: int, block: int,
    sliding: int | None, unit: int,
) -> int:  # fmt: skip
    """How many tokens may still join every row before one of them packs a block or drops a page.

    Args:
        lengths, packed, dropped: Tokens of each row.
        before: Sink tokens and the residual window.
        block: Tokens that are packed together.
        sliding: The sliding window, ``None`` for none.
        unit: Tokens that are dropped together.
    """
    found = []
    for t, n, d in zip(lengths, packed, dropped, strict=True):
        found.append(before + ((d + n) // block + 1) * block - 1 - t)
        gone = (d // unit + 1) * unit
        if sliding is not None and d + n >= gone:
            found.append(sliding + gone - 1 - t)
    return min(found)
