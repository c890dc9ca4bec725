"""What a packed cache has to be, written the plain way: whole arrays, one row at a time, every count spelt out.

A row holds the tokens that it was given (``true``) and what the cache must decode them to (``held``).  They differ
only where tokens have been packed: packing replaces held tokens by what the method's own functions make of them.
A trim drops tokens from the end and nothing else; what it brings back from codes is what is held there already.
"""

from __future__ import annotations

import attrs
import mlx.core as mx

from vq_core.plugins.binding import BoundSide

Pair = tuple[mx.array, mx.array]


@attrs.frozen(eq=False)
class Rules:
    """What all rows of one kind of cache share.

    Attributes:
        bound: The methods of the keys and of the values.
        residual, sinks: As for the cache.
        block: Tokens that are packed together.
    """

    bound: tuple[BoundSide, BoundSide]
    residual: int
    sinks: int
    block: int

    def frontier(self, tokens: int) -> int:
        """Tokens that are packed of a sequence that was only appended to."""
        return max(0, tokens - self.sinks - self.residual) // self.block * self.block


@attrs.define(eq=False)
class Row:
    """One sequence.

    Attributes:
        true, held: (1, H, T, D) keys and values, ``None`` before the first update.
        slack: How far held values may be from true ones: half a quantization step for each time they were packed.
        packed: Tokens packed, after the sink tokens.
        approximate: Exact tokens that came back from codes.
        clean: Packed tokens that were never cut; their codes are those of a fresh cache.
        start: Fields of the sequence, made from the first block.
    """

    rules: Rules
    true: Pair | None = None
    held: Pair | None = None
    slack: Pair | None = None
    packed: int = 0
    approximate: int = 0
    clean: int | None = None
    start: tuple[dict[str, mx.array], dict[str, mx.array]] = attrs.field(factory=lambda: ({}, {}))

    @property
    def tokens(self) -> int:
        """T."""
        return 0 if self.true is None else self.true[0].shape[2]

    @property
    def sinks(self) -> int:
        """First tokens that are set apart: none before the first block is packed."""
        return self.rules.sinks if self.packed else 0

    @property
    def exact(self) -> int:
        """Tokens in the window."""
        return self.tokens - self.sinks - self.packed

    def copy(self) -> Row:
        """The same row, to go on by itself."""
        return attrs.evolve(self)

    def update(self, keys: mx.array, values: mx.array) -> Pair:
        """Append tokens (1, H, L, D); returns what attention of these tokens reads: they themselves are exact."""
        before, length = self.tokens, keys.shape[2]
        new = (keys, values)
        zero = tuple(mx.zeros(x.shape) for x in new)
        self.true = new if self.true is None else _joined(self.true, new)
        self.held = new if self.held is None else _joined(self.held, new)
        self.slack = zero if self.slack is None else _joined(self.slack, zero)  # type: ignore[arg-type,assignment]
        exact = self.held
        goal = max(self.packed, self.rules.frontier(before + length))
        # Of the tokens before this chunk, those that are packed by now are read from their codes.
        seen = max(self.packed, min(goal, max(0, before - self.rules.sinks) // self.rules.block * self.rules.block))
        self.approximate = max(0, self.approximate - (goal - self.packed))
        self._pack(goal)
        cut = self.rules.sinks + seen if seen else 0
        return tuple(
            mx.concatenate([h[:, :, :cut], e[:, :, cut:]], axis=2) for h, e in zip(self.held, exact, strict=True)
        )  # type: ignore[return-value]

    def trim(self, n: int) -> None:
        """Drop the newest n tokens."""
        left, sinks = self.tokens - n, self.sinks
        if left < sinks + self.packed:
            self.packed = max(0, left - sinks) // self.rules.block * self.rules.block
            self.approximate = max(0, left - sinks - self.packed)
            self.clean = self.packed if self.clean is None else min(self.clean, self.packed)
        else:
            first = self.rules.sinks if not self.packed else sinks
            self.approximate = min(self.approximate, max(0, left - first - self.packed))
        for name in ("true", "held", "slack"):
            pair = getattr(self, name)
            setattr(self, name, None if pair is None else tuple(x[:, :, :left] for x in pair))

    def _pack(self, goal: int) -> None:
        if goal == self.packed:
            return
        begin, end = self.rules.sinks + self.packed, self.rules.sinks + goal
        positions = mx.arange(begin, end, dtype=mx.int32)[None]
        assert self.held is not None and self.slack is not None
        held, slack, start = [], [], []
        for bound, x, far, first in zip(self.rules.bound, self.held, self.slack, self.start, strict=True):
            piece = x[:, :, begin:end]
            if not self.packed:
                block = bound.layout.block
                first = bound.start(piece[:, :, :block], positions[:, :block])
            packed = {**bound.pack(piece, positions, first), **first}
            decoded = bound.decode(packed, positions).astype(x.dtype)
            held.append(mx.concatenate([x[:, :, :begin], decoded, x[:, :, end:]], axis=2))
            more = far[:, :, begin:end] + self._half_step(bound, piece)
            slack.append(mx.concatenate([far[:, :, :begin], more, far[:, :, end:]], axis=2))
            start.append(first)
        self.held, self.slack, self.start, self.packed = tuple(held), tuple(slack), tuple(start), goal  # type: ignore[assignment]

    def _half_step(self, bound: BoundSide, x: mx.array) -> mx.array:
        """Half the width of a step of each number's group, KIVI's groups made anew from its description."""
        facts, settings = bound.record.facts, bound.choice.settings
        assert facts is not None
        if facts.name != "kivi":
            return mx.full(x.shape, 0.0 if facts.capabilities.exact else mx.inf)
        _, heads, n, dim = x.shape
        x = x.astype(mx.float32)
        size = settings.group_size
        if bound.ctx.side == "keys":  # groups of tokens, channel by channel
            groups, axis = x.reshape(1, heads, n // size, size, dim), 3
        else:
            groups, axis = x.reshape(1, heads, n, dim // size, size), 4
        wide = groups.max(axis=axis, keepdims=True) - groups.min(axis=axis, keepdims=True)
        return mx.broadcast_to(wide / (2 * (2**settings.bits - 1)), groups.shape).reshape(x.shape)


def _joined(a: Pair, b: Pair) -> Pair:
    return mx.concatenate([a[0], b[0]], axis=2), mx.concatenate([a[1], b[1]], axis=2)


def dense(rows: list[Pair]) -> tuple[mx.array, mx.array, list[list[bool]]]:
    """Rows side by side, aligned at the right over zeros: keys and values (B, H, T, D), and where a token is."""
    length = max(keys.shape[2] for keys, _ in rows)
    sides = [
        mx.concatenate([mx.pad(x, [(0, 0), (0, 0), (length - x.shape[2], 0), (0, 0)]) for x in side])
        for side in zip(*rows, strict=True)
    ]
    return sides[0], sides[1], [[i >= length - keys.shape[2] for i in range(length)] for keys, _ in rows]


def attention(
    rows: list[Pair], q: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    """Dense float32 attention (B, H_q, L, D) of q over the rows."""
    keys, values, held = dense(rows)
    batch, heads, count, dim = q.shape
    length = keys.shape[2]
    q = (q.astype(mx.float32) * scale).reshape(batch, keys.shape[1], -1, count, dim)
    scores = q @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    seen = mx.array(held)[:, None, None, None, :]
    if isinstance(mask, str):
        newest = mx.arange(length - count, length)[:, None]
        seen = seen & (mx.arange(length)[None] <= newest)
    elif mask is not None:
        mask = mx.broadcast_to(mask, (batch, heads, count, length))
        seen = seen & mask.reshape(batch, q.shape[1], -1, count, length)
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        extra = mx.broadcast_to(sinks.reshape(1, *q.shape[1:3], 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, extra], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :length]
    return (weights @ values.astype(mx.float32)[:, :, None]).reshape(batch, heads, count, -1)
