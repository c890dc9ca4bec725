"""Steps that only append: the short way gives what the long way gives, and looks at nothing that grows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.attention.view import CacheView
from vq_core.cache.history import History
from vq_core.cache.steady import room
from vq_core.cache.tagged import reading_of
from vq_core.errors import CacheStateError, UnsupportedShapeError

Make = Callable[..., PackedKVCache]


class LongWay(History):
    """A history that never takes the short way."""

    def step(self, keys: mx.array, values: mx.array) -> None:
        """Not here."""


def steps_of(cache: PackedKVCache, data: list[mx.array]) -> list[CacheView]:
    """Feed single tokens; the readings."""
    found = []
    for x in data:
        reading = reading_of(*cache.update_and_fetch(x, -x))
        assert reading is not None
        found.append(reading.view)
    return found


def told(view: CacheView) -> list[Any]:
    """A reading as plain numbers, arrays as their bytes."""
    found: list[Any] = [view.sinks, view.packed, view.exact, view.dropped, view.hidden, view.lengths, view.length]
    found += [view.even, view.plain, view.rows, view.heads]
    for side in (view.keys, view.values):
        pages = side.pages
        found += [side.bound, pages.count, pages.depth]
        arrays = {"exact": side.exact, "sinks": side.sinks, **pages.tile}
        arrays |= {name: getattr(pages, name) for name in ("row", "table", "held", "place")}
        found.append({name: None if a is None else (a.dtype, np.array(a).tobytes()) for name, a in arrays.items()})
    return found


def fetched(cache: PackedKVCache) -> Any:
    """What a model that shares the layer's cache reads, or the refusal."""
    try:
        reading = reading_of(*cache.keys_and_values())
    except CacheStateError as error:
        return str(error)
    assert reading is not None
    return told(reading.view)


KINDS: dict[str, dict[str, int]] = {
    "one row": {},
    "even rows": {},
    "uneven rows": {},
    "sinks": {"sink_tokens": 3},
    "all exact": {"residual": 4096},
    "nothing exact": {"residual": 0},
    "sliding": {"sliding": 45},
    "uneven sliding": {"sliding": 45},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", (1, 3))
def test_the_short_way_is_the_long_way(
    echo: Make, normal: Any, snapshot: Any, monkeypatch: Any, kind: str, length: int
) -> None:
    """Bytes, counts and readings after each of 60 updates, with trims, copies and states in between."""
    rows = 1 if kind in ("one row", "sinks", "sliding") else 3
    uneven = kind.startswith("uneven")
    start = [normal(1 if uneven else rows, 2, n, 4) for n in ((40, 61, 3) if rows == 3 else (50,))]
    data = [normal(rows, 2, length, 4) for _ in range(60)]

    def run() -> tuple[list[Any], list[Any]]:
        caches = []
        for x in start if uneven else start[:1]:
            caches.append(echo(block=8, page=32, **KINDS[kind]))
            caches[-1].update_and_fetch(x, -x)
        cache = PackedKVCache.join(caches) if len(caches) > 1 else caches[0]
        found, kept = [], []
        for number, x in enumerate(data):
            views = steps_of(cache, [x])
            found.append([told(views[0]), fetched(cache), snapshot(cache), cache.nbytes, cache.size()])
            if number % 13 == 5:
                cache.trim(min(2, cache.offset))
            if number % 17 == 7:
                kept.append((cache, snapshot(cache)))  # what is left behind must stay as it is
                cache = copy.deepcopy(cache)
            if number % 23 == 11:
                cache = PackedKVCache.from_state(cache.state)
        return found, kept

    short, kept = run()
    for cache, before in kept:
        assert snapshot(cache) == before
    monkeypatch.setattr(History, "step", LongWay.step)
    long, _ = run()
    for number, (a, b) in enumerate(zip(short, long, strict=True)):
        assert a == b, f"update {number}"


@pytest.mark.parametrize("sliding", (None, 64))
def test_most_steps_take_the_short_way(echo: Make, normal: Any, monkeypatch: Any, sliding: int | None) -> None:
    """An update has more to do once a block, and once more where it also drops a page."""
    cache = echo(block=8, page=32, sliding=sliding)
    cache.update_and_fetch(*[normal(2, 2, 200, 4)] * 2)
    steps_of(cache, [normal(2, 2, 1, 4)])
    whole: list[int] = []
    update = History.update
    monkeypatch.setattr(History, "update", lambda *args: (whole.append(1), update(*args))[1])
    steps_of(cache, [normal(2, 2, 1, 4) for _ in range(320)])
    assert 320 // 8 <= len(whole) <= 320 // 8 + (320 // 32 * 2 if sliding else 0)


def test_room_is_what_an_update_would_find(echo: Make) -> None:
    """Against the rules written out, for counts of any kind."""
    rng = np.random.default_rng(3)
    for _ in range(500):
        block, unit = (int(n) for n in rng.choice([(1, 4), (8, 32), (32, 128)]))
        before, sliding = int(rng.integers(0, 50)), int(rng.integers(1, 300)) if rng.random() < 0.5 else None
        dropped = unit * int(rng.integers(0, 3)) if sliding else 0
        packed = block * int(rng.integers(0, 20))
        lengths = dropped + packed + before + int(rng.integers(0, block))

        def moves(t: int) -> bool:
            """Whether t tokens are more than this row's frontier or window allows."""
            flush = max(0, t - before) // block * block - dropped > packed  # noqa: B023
            gone = max(0, min(dropped + packed, t - sliding) // unit * unit - dropped) if sliding else 0  # noqa: B023
            return flush or gone > 0

        free = room([lengths], [packed], [dropped], before, block, sliding, unit)
        assert moves(lengths + free + 1) and (free < 1 or not moves(lengths + free))


class Untouched(list[Any]):
    """A list that nobody may look at."""

    def _fail(self, *args: Any) -> Any:
        raise AssertionError("a step looked at the pages of a row")

    __getitem__ = __iter__ = __len__ = __contains__ = __eq__ = index = copy = _fail  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("rows", (1, 3))
def test_a_step_does_nothing_that_grows(echo: Make, normal: Any, rows: int) -> None:
    """As many bytecodes and calls at 16,384 packed tokens as at 1,024, and the lists of pages are not looked at."""
    counts = []
    for tokens in (1024, 16384):
        cache = echo(block=32, page=128, residual=128)
        cache.update_and_fetch(*[normal(rows, 1, tokens + 128, 4)] * 2)
        first, second, third = (normal(rows, 1, 1, 4) for _ in range(3))
        steps_of(cache, [first, second])
        history = cache._history
        assert history is not None and history.packed == [tokens] * rows
        for store in history.stores.values():
            store.owned = Untouched()
        seen = dict.fromkeys(("opcode", "call", "c_call"), 0)

        def trace(frame: Any, event: str, arg: Any, seen: dict[str, int] = seen) -> Any:
            frame.f_trace_opcodes = True
            seen["opcode"] += event == "opcode"
            return trace

        def profile(frame: Any, event: str, arg: Any, seen: dict[str, int] = seen) -> None:
            if event in seen:
                seen[event] += 1

        sys.settrace(trace)
        sys.setprofile(profile)
        try:
            steps_of(cache, [third])
            assert cache.offset == tokens + 131
        finally:
            sys.setprofile(None)
            sys.settrace(None)
        counts.append(seen)
    assert counts[0] == counts[1]
    assert counts[0]["opcode"] > 100 and counts[0]["call"] > 5, "nothing was counted"


def nodes(arrays: list[mx.array], path: Path) -> list[str]:
    """The operations that arrays wait for."""
    mx.export_to_dot(str(path), *arrays)  # type: ignore[attr-defined]
    return sorted(line.split('"')[1] for line in path.read_text().splitlines() if "shape=rectangle" in line)


@pytest.mark.parametrize("rows", (1, 3))
def test_a_step_makes_two_nodes(echo: Make, normal: Any, rows: int, tmp_path: Path) -> None:
    """The two windows; of the pages nothing is cut, whatever capacity they have to spare."""
    cache = echo(block=32, page=128, residual=128)
    cache.update_and_fetch(*[normal(rows, 1, 4096 + 128, 4)] * 2)
    steps_of(cache, [normal(rows, 1, 1, 4)])
    history = cache._history
    assert history is not None and history.stores["keys"].capacity > history.stores["keys"].used
    mx.eval(history.arrays())
    view = steps_of(cache, [normal(rows, 1, 1, 4)])[0]
    found = nodes([view.keys.exact, view.values.exact], tmp_path / "window")
    assert found == ["Concatenate", "Concatenate", "Negative"]  # the last one is steps_of's own
    held = [a for side in (view.keys, view.values) for a in (*side.pages.paged.values(), *side.pages.sequence.values())]
    assert held and not nodes(held, tmp_path / "pages")


def test_what_is_not_like_the_last_step_is_checked(echo: Make, normal: Any, snapshot: Any) -> None:
    """Other shapes and dtypes are refused in the middle of a generation as at its start; nothing has changed."""
    cache = echo(block=8, page=32)
    cache.update_and_fetch(*[normal(2, 2, 50, 4)] * 2)
    x = normal(2, 2, 1, 4)
    steps_of(cache, [x, x])
    before = snapshot(cache)
    half = x.astype(mx.float16)
    for keys, values in (
        (np.array(x), x), (x, np.array(x)), (None, x), (x, x.tolist()), (half, x), (x, half), (half, half),
        (x[:1], x[:1]), (x[:, :1], x[:, :1]), (x[..., :2], x), (x, x[..., :2]), (x[:, :, :0], x[:, :, :0]),
        (x[0], x[0]),
    ):  # fmt: skip
        with pytest.raises(UnsupportedShapeError):
            cache.update_and_fetch(keys, values)  # type: ignore[arg-type]
        assert snapshot(cache) == before
    steps_of(cache, [x, normal(2, 2, 3, 4), x])
    assert cache.offset == 57


def test_a_step_that_fails_has_not_happened(echo: Make, normal: Any, snapshot: Any, monkeypatch: Any) -> None:
    """Even where all but the tags is made; what somebody holds of the state before stays as it is anyway."""
    cache = echo(block=8, page=32)
    cache.update_and_fetch(*[normal(2, 2, 50, 4)] * 2)
    x = normal(2, 2, 1, 4)
    steps_of(cache, [x])
    before, history, updates = snapshot(cache), cache._history, cache.reads.updates
    with monkeypatch.context() as patch:
        patch.setattr("vq_core.cache.shell.tag", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.update_and_fetch(x, x)
    assert snapshot(cache) == before and cache._history is history and cache.reads.updates == updates
    steps_of(cache, [x])
    assert history is not None and history.longest == 51 and cache.offset == 52
