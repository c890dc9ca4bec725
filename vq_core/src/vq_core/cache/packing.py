"""Which tokens an update packs, from counts alone: the layers of a model ask the same one after another."""

from __future__ import annotations

from functools import lru_cache

import attrs


def frontier(tokens: int, sinks: int, residual: int, block: int) -> int:
    """f(T): how many tokens of a sequence of T that was only appended to are packed."""
    return max(0, tokens - sinks - residual) // block * block


@attrs.frozen
class Group:
    """Rows that are packed together: they start alike and are filled alike.

    Attributes:
        rows: Their numbers.
        end: Where their first token lies in the window with the new tokens, counted from its right end.
        tokens: How many are packed, sink tokens apart.
        first: Whether these are the first of their sequences.
        before: Tokens of each sequence that were packed before.
    """

    rows: tuple[int, ...]
    end: int
    tokens: int
    first: bool
    before: int


@attrs.frozen
class Packing:
    """What an update packs.

    Attributes:
        groups: Nothing where it only appends.
        tokens: Newly packed tokens of each row.
        left: Exact tokens of each row after it.
        seen: Packed tokens of each row that attention of the new ones reads as packed: those before them.
        exact: Exact tokens of each row in that reading, the new ones among them.
        changed: Whether that reading is another than that of all tokens as they are stored then.
    """

    groups: tuple[Group, ...]
    tokens: tuple[int, ...]
    left: tuple[int, ...]
    seen: tuple[int, ...]
    exact: tuple[int, ...]
    changed: bool


@lru_cache(maxsize=256)
def packing(
    new: int, window: tuple[int, ...], held: tuple[int, ...], packed: tuple[int, ...], dropped: tuple[int, ...],
    sinks: int, residual: int, block: int, pages: tuple[int, ...],
) -> Packing:  # fmt: skip
    """What an update packs.

    Args:
        new: L.
        window: Exact tokens of each row before it, without ``held``.
        held: Sink tokens of each row that are set apart.
        packed, dropped: Tokens of each row.
        sinks: The first tokens that stay exact.
        residual: R.
        block: Tokens that are packed together.
        pages: Tokens of a page, of each side.
    """
    before = [d + s + n + w for d, s, n, w in zip(dropped, held, packed, window, strict=True)]
    counts = [n + new for n in window]
    goal = [
        max(n, frontier(t + new, sinks, residual, block) - d)
        for n, t, d in zip(packed, before, dropped, strict=True)
    ]  # fmt: skip
    seen = [
        max(n, min(g, max(0, t - sinks) // block * block - d))
        for n, g, t, d in zip(packed, goal, before, dropped, strict=True)
    ]
    found: dict[tuple[int, ...], list[int]] = {}
    left, apart = list(counts), list(held)
    for row, (count, have, want) in enumerate(zip(counts, packed, goal, strict=True)):
        if want > have:
            start = dropped[row] + have
            fills = [have % page for page in pages]
            found.setdefault((count, want - have, start, *fills), []).append(row)
            left[row] -= want - have + (0 if start else sinks)
            apart[row] = held[row] if start else sinks
    groups = [Group(tuple(rows), end, n, not start, start) for (end, n, start, *_), rows in found.items()]
    exact = [t + new - d - s - n for t, d, s, n in zip(before, dropped, apart, seen, strict=True)]
    taken = [g - n for g, n in zip(goal, packed, strict=True)]
    changed = seen != goal
    return Packing(tuple(groups), tuple(taken), tuple(left), tuple(seen), tuple(exact), changed)
