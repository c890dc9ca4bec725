"""Few queries in one launch and one merge: the portable and the matrix skeleton on a cache's reading."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import attrs
import mlx.core as mx

from vq_core.attention.choice import name_of
from vq_core.attention.masks import LOWEST, Mask
from vq_core.attention.view import CacheView, Parts, SideView
from vq_core.kernels import backends
from vq_core.kernels.kernel import Kernel, Prepared, number_array
from vq_core.kernels.rules import TINY
from vq_core.kernels.skeleton.combine import MOST_SPLITS
from vq_core.kernels.skeleton.kernels import FACTS, MERGE_APART, Pair
from vq_core.kernels.skeleton.matrix_exact import UNIT as MATRIX_UNIT
from vq_core.kernels.skeleton.matrix_kernels import COLUMNS, MatrixPair
from vq_core.kernels.skeleton.portable import EXACT_UNIT, Side
from vq_core.kernels.skeleton.summing import GROUPS
from vq_core.kernels.standard.hadamard import MOST as LONGEST
from vq_core.kernels.standard.hadamard import SIGN_HADAMARD

THREADGROUPS = 384
"""How many a pass is split into where there is work for them: as many as an H200 runs at once, about three for each of
its multiprocessors, so that none waits for another."""
MOST_EXACT_SPLITS = 32
FOLDED = 18
"""Steps of packed tokens that a threadgroup of the matrix skeleton does while exact tokens come first: they wait in one
line with all other loads."""


@attrs.define(eq=False)
class Step:
    """Attention of queries of one shape on caches of one state: two launches, checked and laid out.

    Attributes:
        run, merge: The launches.
        facts: What the kernels know of each row.
        masked: Whether the pass takes a mask.
        fields: For each side what the pass reads of it: a field's name, or a constant.
        joins: Whether the pass can join new tokens to the window.
        fresh: How many it joins.
        queries: Into what the pass takes; ``None``: as they are.
        prepare: The snippet's.
        finish: The snippet's.
        turn: In the place of ``prepare``, a launch that rotates queries, and its signs.
        back: In the place of ``finish``, signs that the merge takes.
    """

    run: Prepared
    merge: Prepared
    facts: mx.array
    masked: bool
    fields: tuple[list[str | mx.array], list[str | mx.array]]
    joins: bool = False
    fresh: int = 0
    queries: mx.Dtype | None = None
    prepare: Callable[[mx.array], mx.array] | None = None
    finish: Callable[[mx.array], mx.array] | None = None
    turn: tuple[Prepared, mx.array] | None = None
    back: mx.array | None = None

    def __call__(
        self, view: CacheView, queries: mx.array, sinks: mx.array | None, mask: mx.array | None = None,
        stored: Sequence[mx.array] | None = None,
    ) -> mx.array:  # fmt: skip
        """(B, H_q, L, D_v) in the queries' dtype.

        Args:
            view: The reading.
            queries: (B, H_q, L, D).
            sinks: The model's logits, (H_q,).
            mask: To be added, (B or 1, H_q or 1, L or 1, T) float32.
            stored: What :meth:`stored` has given for these pages.
        """
        found = self.run.at_once(self.inputs(view, queries, mask, stored))
        if self.fresh:
            assert view.keys.window is not None
            view.keys.window.settle(found[2], found[3])
        return self._merged(found, queries, sinks)

    def joining(self, window: Any, parts: Parts, queries: mx.array, stored: Sequence[mx.array]) -> mx.array:
        """The same where new tokens join the window, which becomes the joined one: with its parts at hand."""
        old_k, new_k, old_v, new_v = parts
        first_k = old_k if window.sink_keys is None else window.sink_keys
        first_v = old_v if window.sink_values is None else window.sink_values
        given = self._asked(queries)
        given += (self.facts, old_k, old_v, first_k, first_v)
        given += stored
        given += (new_k, new_v)
        found = self.run.at_once(given)
        window.settle(found[2], found[3])
        return self._merged(found, queries, None)

    def _merged(self, found: Sequence[mx.array], queries: mx.array, sinks: mx.array | None) -> mx.array:
        logits = NO_LOGITS if sinks is None else sinks if sinks.dtype == mx.float32 else sinks.astype(mx.float32)
        signs = [] if self.back is None else [self.back]
        outs = self.merge.at_once([found[0], found[1], logits, *signs])
        if self.finish is None:
            return outs[0]
        return (outs[0] + self.finish(outs[1])).astype(queries.dtype)

    def grown(self, view: CacheView) -> Step:
        """The step of a reading with other exact tokens, in as many splits."""
        launch, numbers = self.run.launch, self.run.launch.call.numbers
        if self.fresh:
            window = [(*shape[:2], view.exact[0], shape[3]) for shape in launch.shapes[2:]]
            launch = attrs.evolve(launch, shapes=[*launch.shapes[:2], *window])
        array = number_array(tuple((numbers | {"length": view.length}).values()))  # type: ignore[operator]
        return attrs.evolve(self, run=attrs.evolve(self.run, numbers=[array], launch=launch), facts=facts_of(view))

    def inputs(
        self, view: CacheView, queries: mx.array, mask: mx.array | None, stored: Sequence[mx.array] | None = None
    ) -> list[mx.array]:
        """Of the pass."""
        keys, values = view.keys, view.values
        parts = keys.window.parts() if self.fresh and keys.window is not None else None
        exact_k, new_k, exact_v, new_v = (None,) * 4 if parts is None else parts
        exact_k, exact_v = _window(keys, exact_k), _window(values, exact_v)
        if self.fresh and parts is None:
            # Joined since the step was chosen, by another thread: it is apart once more for a step that joins.
            cut = exact_k.shape[2] - self.fresh
            new_k, new_v = exact_k[:, :, cut:], exact_v[:, :, cut:]
            exact_k, exact_v = exact_k[:, :, :cut], exact_v[:, :, :cut]
        given = self._asked(queries)
        given.append(self.facts)
        if self.masked:
            given.append(NOTHING if mask is None else mask)
        given += (exact_k, exact_v, _first(keys, exact_k), _first(values, exact_v))
        given += self.stored(view) if stored is None else stored
        if self.joins:
            given += (exact_k if new_k is None else new_k, exact_v if new_v is None else new_v)
        return given

    def _asked(self, queries: mx.array) -> list[mx.array]:
        """Queries as the pass takes them, in each basis that it needs."""
        given = [queries if self.queries is None else queries.astype(self.queries)]
        if self.turn is not None:
            given += self.turn[0].at_once([queries, self.turn[1]])
        elif self.prepare is not None:
            given.append(self.prepare(queries.astype(mx.float32)))
        return given

    def stored(self, view: CacheView) -> list[mx.array]:
        """What the pass reads of the packed pages; the same until they change."""
        regular = is_regular(view)
        given = [table_of(side, view.rows, regular) for side in (view.keys, view.values)]
        for side, names in zip((view.keys, view.values), self.fields, strict=True):
            given += [side.pages.stored(name) if isinstance(name, str) else name for name in names]
        return given


def kernel_step(
    view: CacheView, kernels: Pair, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None, backend: Any
) -> Step:
    """Up to 16 queries (B, H_q, L, D) by the portable skeleton."""
    B, heads, L, _ = queries.shape
    total = heads // view.heads * L
    rows = rows_at_once(kernels, total)
    groups, exact = B * view.heads * -(-total // rows), exact_split(view, EXACT_UNIT)
    # What does not run at once would wait for the others to end: the exact tokens' threadgroups count.
    most = max(THREADGROUPS // groups - exact, THREADGROUPS // groups // 2)
    numbers = {"splits": exact + packed_split(max(view.packed), kernels.unit, most)}
    numbers |= {"exact_splits": exact, "masked": int(mask.array is not None), "M": rows}
    step = Step(
        None, None, facts_of(view), True, (_read(kernels.keys), _read(kernels.values)),  # type: ignore[arg-type]
        queries=None if queries.dtype in (view.keys.dtype, mx.float32) else mx.float32,
        prepare=kernels.keys.snippet.prepare, finish=kernels.values.snippet.finish,
    )  # fmt: skip
    given = None if mask.array is None else additive(mask.array, view.heads)
    own = {"width": kernels.values.width} if kernels.merge is MERGE_APART else {"T": name_of(queries.dtype)}
    _turned(step, (kernels.keys.snippet.signs, kernels.values.snippet.signs), queries, backend)
    return _ready(step, kernels.run, kernels.merge, view, queries, scale, mask, given, sinks, backend, numbers, own)


def matrix_step(
    view: CacheView, kernels: MatrixPair, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None,
    backend: Any,
) -> Step:  # fmt: skip
    """The same on tensor cores, without masks that are arrays."""
    B, heads, L, _ = queries.shape
    groups = B * view.heads * -(-(heads // view.heads * L) // COLUMNS)
    numbers = _shared_out(max(view.packed), kernels, exact_split(view, MATRIX_UNIT), kernels.slots // groups)
    step = Step(
        None, None, facts_of(view), False, (list(kernels.fields[0]), list(kernels.fields[1])),  # type: ignore[arg-type]
        joins=True, fresh=fresh_of(view), prepare=kernels.prepare, finish=kernels.finish,
    )  # fmt: skip
    numbers["fresh"] = step.fresh
    own = {"width": view.values.dim} if kernels.merge is MERGE_APART else {"T": name_of(queries.dtype)}
    _turned(step, kernels.signs, queries, backend)
    return _ready(step, kernels.run, kernels.merge, view, queries, scale, mask, None, sinks, backend, numbers, own)


def _turned(
    step: Step, signs: tuple[mx.array | None, mx.array | None], queries: mx.array, backend: Any
) -> None:  # fmt: skip
    """Rotations by signs as launches, in the place of the snippets' functions."""
    keys, values = signs
    if step.prepare is not None and keys is not None and keys.shape[1] <= LONGEST:
        given = {"undo": False, "rows": math.prod(queries.shape[:-1])}
        step.turn = SIGN_HADAMARD.prepared(backends.choose(backend), [queries, keys], given), keys
    if step.finish is not None and values is not None:
        step.back, step.finish = values, None


def _shared_out(tokens: int, kernels: MatrixPair, exact: int, most: int) -> dict[str, Any]:
    """Splits of the matrix skeleton for one KV head, of which so many run at once: one more would wait for the others.

    Where not all have room, exact tokens get half as many threadgroups, from those of the packed ones; or they come
    first in some of these, where that leaves a warp fewer rounds.
    """
    parts = packed_split(tokens, kernels.step, most)
    if parts + exact <= most:
        return {"splits": exact + parts, "exact_splits": exact, "folded": 0}
    exact, steps = max(min(exact, 1), exact // 2), -(-tokens // kernels.step)
    apart = packed_split(tokens, kernels.step, max(1, most - exact))
    if exact <= parts and _rounds(steps + exact * FOLDED, parts) < _rounds(steps, apart):
        return {"splits": exact + parts, "exact_splits": exact, "folded": FOLDED}
    return {"splits": exact + apart, "exact_splits": exact, "folded": 0}


def _rounds(steps: int, parts: int) -> int:
    """Of a warp, each round a step, for so many steps of all."""
    return math.ceil(math.ceil(steps / parts) / GROUPS)


def _ready(
    step: Step, run: Kernel, merge: Kernel, view: CacheView, queries: mx.array, scale: float, mask: Mask,
    given: mx.array | None, sinks: mx.array | None, backend: Any, numbers: dict[str, Any], own: dict[str, Any],
) -> Step:  # fmt: skip
    """A step with its launches."""
    runner, L = backends.choose(backend), queries.shape[2]
    numbers |= {
        "scale_bits": _bits(scale * math.log2(math.e)), "length": view.length, "causal": int(mask.causal and L > 1),
        "regular": int(is_regular(view)),
    }  # fmt: skip
    step.run = run.prepared(runner, step.inputs(view, queries, given), numbers)
    blank = [mx.zeros(shape) for shape in step.run.launch.shapes[:2]]
    own |= {"D": view.values.dim, "query_length": L, "with_logits": int(sinks is not None)}
    own |= {"exact_splits": numbers["exact_splits"]}
    logits = NO_LOGITS if sinks is None else mx.zeros(sinks.shape)
    signs = [] if step.back is None else [step.back]
    step.merge = merge.prepared(runner, [*blank, logits, *signs], own)
    return step


def _read(side: Side) -> list[str | mx.array]:
    constants = side.snippet.constants
    return [constants.get(p.name, p.name) for p in side.pointers]


def fresh_of(view: CacheView) -> int:
    """Tokens that have not joined the window and that a pass can join to it: those of rows of one length."""
    parts = None if view.keys.window is None or not view.even else view.keys.window.parts()
    return 0 if parts is None else int(parts[1].shape[2])


def exact_split(view: CacheView, unit: int) -> int:
    """Splits for the exact tokens, of which a SIMD group takes so many at once."""
    units = -(-max(view.exact) // unit) + -(-max(view.sinks) // unit)
    return min(-(-units // GROUPS), MOST_EXACT_SPLITS)


def exact_splits(view: CacheView) -> tuple[int, int]:
    """For the portable and the matrix skeleton."""
    return exact_split(view, EXACT_UNIT), exact_split(view, MATRIX_UNIT)


def packed_split(tokens: int, unit: int, most: int) -> int:
    """Splits for so many packed tokens: each SIMD group takes a unit at least."""
    return max(1, min(-(-tokens // (unit * GROUPS)), most, MOST_SPLITS - MOST_EXACT_SPLITS))


def facts_of(view: CacheView) -> mx.array:
    """What the kernels know of each row."""
    return row_facts(view.packed, view.sinks, view.exact, view.lengths, view.hidden, view.length)


def table_of(side: SideView, rows: int, regular: bool) -> mx.array:
    """Where a side's pages lie; one flag tells of both sides, so a side that needs no look-up may have to have one."""
    if regular:
        return NO_TABLE
    table = side.pages.table
    if table is None:
        table = mx.arange(side.pages.depth * rows, dtype=mx.int32).reshape(side.pages.depth, rows).T
    return _eight(table, 1)


def is_regular(view: CacheView) -> bool:
    """Whether no side's pages need a look-up."""
    return view.keys.pages.table is None and view.values.pages.table is None


def _eight(a: mx.array, axis: int, left: bool = False) -> mx.array:
    """An array of so few elements that Metal would keep it elsewhere, with places to spare."""
    if a.size >= TINY:
        return a
    return mx.pad(a, [((TINY, 0) if left else (0, TINY)) if i == axis else (0, 0) for i in range(a.ndim)])


def exact_arrays(side: SideView) -> tuple[mx.array, mx.array]:
    """Window and first tokens as kernels take them: each row's at the right of the one, at the left of the other."""
    exact = _window(side, None)
    return exact, _first(side, exact)


def _window(side: SideView, exact: mx.array | None) -> mx.array:
    return _eight(side.exact if exact is None else exact, 2, left=True)


def _first(side: SideView, exact: mx.array) -> mx.array:
    """Without first tokens the window stands for them: no row has any there."""
    return exact if side.sinks is None else _eight(side.sinks, 2)


def field_arrays(side: SideView, known: Side) -> list[mx.array]:
    """What a snippet's texts see: fields as stored, with more pages perhaps than are read, and constants."""
    constants = known.snippet.constants
    return [constants[p.name] if p.name in constants else side.pages.stored(p.name) for p in known.pointers]


def rows_at_once(kernels: Pair, total: int) -> int:
    """Query rows that a threadgroup takes: as few groups as there must be, of one size."""
    return -(-total // -(-total // kernels.rows))


# From numbers and not from mx.zeros: a lazy array could be evaluated only on the thread that imports this.
NOTHING = mx.array([[[[0.0] * 8]]], mx.float32)
NO_TABLE = mx.array([[0] * 8], mx.int32)
NO_LOGITS = mx.array([0.0] * 8, mx.float32)


@lru_cache(maxsize=64)
def row_facts(
    packed: tuple[int, ...], sinks: tuple[int, ...], exact: tuple[int, ...], lengths: tuple[int, ...],
    hidden: tuple[int, ...], length: int,
) -> mx.array:  # fmt: skip
    """What the pass kernel knows of each row, (B, 8) int32; all layers of a step share one array."""
    rows = [
        [p, s, e, length - n, h, *[0] * (FACTS - 5)]
        for p, s, e, n, h in zip(packed, sinks, exact, lengths, hidden, strict=True)
    ]
    made = mx.array(rows, mx.int32)
    mx.eval(made)
    return made


def additive(mask: mx.array, heads: int) -> mx.array:
    """A mask (B, H, R, L, T), each but T perhaps 1, as (B, H_q, L, T) float32 to be added."""
    mask = _eight(mask, 4) if mask.shape[4] < TINY else mask
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        mask = mask[:, :, 0]
    else:
        shape = (mask.shape[0], heads, mask.shape[2], *mask.shape[3:])
        mask = mx.broadcast_to(mask, shape).flatten(1, 2)
    return mx.where(mask, 0.0, LOWEST) if mask.dtype == mx.bool_ else mask.astype(mx.float32)


@lru_cache(maxsize=64)
def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
