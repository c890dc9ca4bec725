"""Frontier, flush, sink tokens, trim and rows, against a list of exact tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.cache.history import History
from vq_core.cache.packing import frontier
from vq_core.errors import PluginError

Make = Callable[..., PackedKVCache]


def history(cache: PackedKVCache) -> History:
    assert cache._history is not None
    return cache._history


def feed(cache: PackedKVCache, x: mx.array, sizes: list[int]) -> None:
    begin = 0
    for n in sizes:
        cache.update_and_fetch(x[:, :, begin : begin + n], -x[:, :, begin : begin + n])
        begin += n
    assert begin == x.shape[2]


def same(cache: PackedKVCache, x: mx.array) -> None:
    """Decoding gives ``x`` on the keys' side and ``-x`` on the values'."""
    keys, values = cache.decode()
    np.testing.assert_array_equal(np.array(keys), np.array(x))
    np.testing.assert_array_equal(np.array(values), -np.array(x))


def stored(cache: PackedKVCache) -> list[Any]:
    """What each row of each side stores, without spare capacity."""
    found: list[Any] = []
    for side, store in history(cache).stores.items():
        for row, owned in enumerate(store.owned):
            found.append((side, row, store.tokens[row]))
            found += [np.array(a)[owned].tobytes() for a in store.paged.values() if owned]
            found += [np.array(a[row]).tobytes() for a in store.sequence.values()]
    return found


@pytest.mark.parametrize("residual", (0, 1, 16, 100))
@pytest.mark.parametrize("sinks", (0, 3))
@pytest.mark.parametrize("block", (1, 8, 32))
def test_frontier(residual: int, sinks: int, block: int) -> None:
    """Case 18: the newest R to R + block - 1 tokens are exact, and the first ``sinks``."""
    for tokens in range(200):
        packed = frontier(tokens, sinks, residual, block)
        rest = tokens - sinks - packed
        assert packed % block == 0
        assert packed == 0 if tokens < sinks + residual + block else residual <= rest < residual + block


@pytest.mark.parametrize("sinks", (0, 4))
@pytest.mark.parametrize("residual", (0, 16, 50))
@pytest.mark.parametrize(
    "sizes", [[777], [256, 256, 256, 9], [1] * 777, [300, 1, 476], [31, 1, 32, 33, 680]], ids=lambda s: str(s[:4])
)
def test_chunking_changes_nothing(echo: Make, sizes: list[int], residual: int, sinks: int) -> None:
    """Case 20, on stored bytes; the last tokens are bit-equal to the input."""
    x = mx.array(np.random.default_rng(1).standard_normal((1, 2, 777, 4), np.float32))
    whole = echo(residual=residual, sink_tokens=sinks)
    whole.update_and_fetch(x, -x)
    parts = echo(residual=residual, sink_tokens=sinks)
    feed(parts, x, sizes)
    assert stored(parts) == stored(whole)
    assert history(parts).packed == [frontier(777, sinks, residual, 8)]
    assert (parts.offset, history(parts).window.counts) == (777, history(whole).window.counts)
    same(parts, x)


@pytest.mark.parametrize("sizes", [[1] * 37, [31, 1, 32, 33], [257], [1], [7, 1, 1]], ids=lambda s: str(s[:4]))
def test_odd_counts(echo: Make, normal: Any, sizes: list[int]) -> None:
    """Case 7: after each call the offset is the sum and what is returned has that length."""
    cache, seen = echo(residual=5), 0
    for n in sizes:
        keys, values = cache.update_and_fetch(normal(2, 1, n, 4), normal(2, 1, n, 4))
        seen += n
        assert cache.offset == cache.size() == seen
        assert keys.shape == values.shape == (2, 1, seen, 4)


def test_stored_codes_never_change(echo: Make, normal: Any) -> None:
    cache, seen = echo(), None
    for _ in range(120):
        x = normal(1, 2, 3, 4)
        cache.update_and_fetch(x, x)
        store = history(cache).stores["keys"]
        now = np.concatenate([np.array(store.paged["x"][p]) for p in store.owned[0]], axis=1) if store.used else None
        if seen is not None and now is not None:
            used = seen[1]
            np.testing.assert_array_equal(now[:, :used], seen[0][:, :used])
        seen = None if now is None else (now, store.tokens[0])


def test_the_current_chunk_is_attended_exactly(install: Any, hooks: Any, normal: Any) -> None:
    """Even the tokens that the same update packs: a method that loses everything shows it."""
    install("zero", hooks() | {"vq_decode": lambda packed: 0 * packed["x"]})
    cache = PackedKVCache(method="zero:block=8,page=32", residual=0)
    x, y = normal(1, 1, 20, 4), normal(1, 1, 30, 4)
    cache.update_and_fetch(x, x)
    keys, _ = cache.update_and_fetch(y, y)
    got = np.array(mx.array(keys))
    np.testing.assert_array_equal(got[:, :, 20:], np.array(y))
    np.testing.assert_array_equal(got[:, :, :16], 0)
    np.testing.assert_array_equal(got[:, :, 16:20], np.array(x)[:, :, 16:])
    np.testing.assert_array_equal(np.array(cache.decode()[0])[:, :, :48], 0)


@pytest.mark.parametrize("sinks", (0, 3))
@pytest.mark.parametrize("first", (10, 40, 100, 101))
def test_trim_to_every_length(echo: Make, normal: Any, first: int, sinks: int) -> None:
    """Case 27: whatever is cut, the rest reads as before, and what is added packs where a fresh cache packs it."""
    x, more = normal(1, 2, first, 4), normal(1, 2, 60, 4)
    for n in range(first + 1):
        cache = echo(residual=6, sink_tokens=sinks)
        cache.update_and_fetch(x, -x)
        packed = history(cache).packed[0]
        assert cache.trim(n) == n
        left = first - n
        assert cache.offset == left
        # F stays unless the cut is behind it, and then is a whole block.
        assert history(cache).packed == [packed if left - sinks >= packed else max(0, left - sinks) // 8 * 8]
        if left:
            same(cache, x[:, :, :left])
        cache.update_and_fetch(more, -more)
        same(cache, mx.concatenate([x[:, :, :left], more], axis=2))
        assert history(cache).packed == [max(packed if left - sinks >= packed else 0, frontier(left + 60, sinks, 6, 8))]


def test_survivors_of_a_cut_block_are_called_approximate(echo: Make, normal: Any) -> None:
    cache, x = echo(residual=0), normal(1, 1, 40, 4)
    cache.update_and_fetch(x, x)
    assert cache.trim(3) == 3
    report = cache.report()
    assert (report.packed, report.exact, report.approximate) == (32, 0, 5)
    cache.update_and_fetch(x[:, :, :2], x[:, :, :2])
    report = cache.report()
    assert (report.packed, report.exact, report.approximate) == (32, 2, 5)
    cache.trim(4)
    assert cache.report().approximate == 3
    cache.update_and_fetch(x[:, :, :8], x[:, :, :8])
    report = cache.report()
    assert (report.packed, report.exact, report.approximate) == (40, 3, 0)


def test_rewinds_inside_the_window_are_exact(echo: Make, normal: Any, snapshot: Any) -> None:
    x = normal(1, 2, 64, 4)
    cache, plain = echo(residual=16), echo(residual=16)
    plain.update_and_fetch(x, x)
    cache.update_and_fetch(x, x)
    for n in (1, 5, 16):
        y = normal(1, 2, n, 4)
        cache.update_and_fetch(y, y)
        if history(cache).packed == history(plain).packed:
            cache.trim(n)
            assert snapshot(cache) == snapshot(plain)
        else:
            assert cache.trim(n) == n
            same_keys = np.array(cache.decode()[0])
            np.testing.assert_array_equal(same_keys, np.array(x))
    assert cache.report().approximate == 0


def test_sink_tokens_stay_exact(install: Any, hooks: Any, normal: Any) -> None:
    install("zero", hooks() | {"vq_decode": lambda packed: 0 * packed["x"]})
    cache = PackedKVCache(method="zero:block=8,page=32", residual=8, sink_tokens=5)
    x = normal(1, 2, 61, 4)
    feed(cache, x, [3, 30, 28])
    keys = np.array(cache.decode()[0])
    np.testing.assert_array_equal(keys[:, :, :5], np.array(x)[:, :, :5])
    np.testing.assert_array_equal(keys[:, :, 5:53], 0)
    np.testing.assert_array_equal(keys[:, :, 53:], np.array(x)[:, :, 53:])
    assert cache.report().packed == 48


def test_fields_of_the_sequence_come_from_exactly_the_first_block(install: Any, hooks: Any, normal: Any) -> None:
    seen: list[tuple[int, ...]] = []

    def start(x: mx.array, positions: mx.array) -> dict[str, mx.array]:
        seen.append((*x.shape, int(positions[0, 0].item()), int(positions[0, -1].item())))
        return {"first": x.mean(axis=2).astype(mx.float32)}

    install("mean", hooks() | {"vq_start": start})
    cache = PackedKVCache(method="mean:block=8,page=32", residual=4, sink_tokens=2)
    x = normal(1, 2, 100, 4)
    feed(cache, x, [9, 50, 41])
    seen.clear()
    other = PackedKVCache(method="mean:block=8,page=32", residual=4, sink_tokens=2)
    other.update_and_fetch(x, -x)
    assert seen == [(1, 2, 8, 4, 2, 9)] * 2
    np.testing.assert_allclose(
        np.array(history(cache).stores["keys"].sequence["first"]), np.array(x)[:, :, 2:10].mean(axis=2), rtol=1e-5
    )
    assert stored(cache) == stored(other)


def test_a_failing_method_leaves_the_cache_as_it_was(install: Any, hooks: Any, normal: Any, snapshot: Any) -> None:
    """Interrupting a generation leaves the cache usable: the keys are packed before the values fail."""
    fail: list[type[BaseException]] = []

    def encode(state: Any, x: mx.array, positions: mx.array) -> Any:
        if fail and state.dim == 6:
            raise fail[0]
        return x, positions

    install("faulty", hooks() | {"vq_encode": encode})
    cache = PackedKVCache(method="faulty:block=8,page=32", residual=8, sink_tokens=2)
    x, y = normal(1, 2, 60, 4), normal(1, 2, 60, 6)
    cache.update_and_fetch(x[:, :, :12], y[:, :, :12])
    for begin, end in ((12, 29), (29, 60)):
        before = snapshot(cache)
        for error, seen in ((KeyboardInterrupt, KeyboardInterrupt), (ValueError, PluginError)):
            fail[:] = [error]
            with pytest.raises(seen):
                cache.update_and_fetch(x[:, :, begin:end], y[:, :, begin:end])
            assert snapshot(cache) == before
        fail.clear()
        cache.update_and_fetch(x[:, :, begin:end], y[:, :, begin:end])
    keys, values = cache.decode()
    assert mx.array_equal(keys, x) and mx.array_equal(values, y)


@pytest.mark.parametrize("trim", (0, 300, 511))
def test_what_is_packed_keeps_no_parent_alive(install: Any, hooks: Any, trim: int) -> None:
    """Case 36 on the packed side: a method whose rows are slices of its input, B = H = 1, no spare capacity."""
    install("slices", hooks() | {"vq_start": lambda x: {"first": x[:, :, 0]}})
    cache = PackedKVCache(method="slices:block=128,page=256", residual=0)
    mx.synchronize()
    before = mx.get_active_memory()
    x, y = mx.random.normal((1, 1, 1100, 512)), mx.random.normal((1, 1, 1100, 512))
    cache.update_and_fetch(x[:, :, :1024], y[:, :, :1024])
    del x, y
    mx.eval(cache.state)
    cache.trim(trim)
    mx.eval(cache.state)
    mx.synchronize()
    assert mx.get_active_memory() - before <= 1.03 * cache.nbytes + 8192


@pytest.mark.parametrize("block", (1, 8))
def test_random_operations_on_rows(echo: Make, normal: Any, block: int) -> None:
    """Update, trim, select, join and copy against plain arrays, one a row."""
    rng = np.random.default_rng(block)
    cache = echo(block=block, residual=5, sink_tokens=2)
    x = normal(2, 1, 9, 3)
    cache.update_and_fetch(x, -x)
    rows = [np.array(x[i]) for i in range(2)]
    for _ in range(150):
        kind = rng.choice(["update", "update", "update", "trim", "select", "join", "copy"])
        if kind == "update":
            x = normal(len(rows), 1, int(rng.choice([1, 1, 2, 17, 40])), 3)
            cache.update_and_fetch(x, -x)
            rows = [np.concatenate([r, np.array(x[i])], axis=1) for i, r in enumerate(rows)]
        elif kind == "trim":
            n = int(rng.integers(0, min(r.shape[1] for r in rows)))
            assert cache.trim(n) == n
            rows = [r[:, : r.shape[1] - n] for r in rows]
        elif kind == "select":
            pick = rng.integers(0, len(rows), int(rng.integers(1, 4))).tolist()
            cache, rows = cache.select(pick), [rows[p] for p in pick]
        elif kind == "join" and len(rows) < 5:
            new = normal(1, 1, int(rng.integers(1, 50)), 3)
            other = echo(block=block, residual=5, sink_tokens=2)
            other.update_and_fetch(new, -new)
            cache, rows = PackedKVCache.join([cache, other]), [*rows, np.array(new[0])]
        else:
            cache = cache.__deepcopy__({})
        assert history(cache).lengths == [r.shape[1] for r in rows]
        assert cache.offset == max(history(cache).lengths)
        keys = np.array(cache.decode()[0])
        for got, want in zip(keys, rows, strict=True):
            np.testing.assert_array_equal(got[:, got.shape[1] - want.shape[1] :], want)
            assert not got[:, : got.shape[1] - want.shape[1]].any()


@pytest.mark.parametrize("call", ("flush", "one", "step", "short trim", "deep trim"))
def test_interrupted_at_any_line(echo: Any, normal: Any, snapshot: Any, call: str) -> None:
    """A KeyboardInterrupt can come at any line: either nothing has happened, or all of it."""
    x = normal(1, 2, 80, 4)

    def made() -> PackedKVCache:
        cache: PackedKVCache = echo(block=8, page=32, residual=8, sink_tokens=2)
        cache.update_and_fetch(x[:, :, :50], x[:, :, :50])
        if call == "step":  # one like the last, which only appends
            cache.update_and_fetch(x[:, :, 50:51], x[:, :, 50:51])
        return cache

    def act(cache: PackedKVCache) -> None:
        if call.endswith("trim"):
            cache.trim(3 if call == "short trim" else 30)
        else:
            end = 80 if call == "flush" else 51
            cache.update_and_fetch(x[:, :, 50:end], x[:, :, 50:end])

    before, done = made(), made()
    act(done)
    accepted = (snapshot(before), snapshot(done))
    seen = set()
    for point in range(0, 2000, 1 if call == "step" else 7):
        cache, left = made(), [point]

        def tracer(frame: Any, event: str, arg: Any, left: list[int] = left) -> Any:
            if "vq_core" in frame.f_code.co_filename and event == "line":
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return tracer

        sys.settrace(tracer)
        try:
            act(cache)
            finished = True
        except KeyboardInterrupt:
            finished = False
        finally:
            sys.settrace(None)
        assert snapshot(cache) in accepted, point
        assert cache.offset == max(cache._history.lengths)  # type: ignore[union-attr]
        seen.add(finished)
        if finished:
            break
    assert seen == {True, False}
