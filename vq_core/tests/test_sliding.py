"""Sliding windows: what left the window is gone, what is in it is where it was, and the geometry is mlx-lm's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from vq_core import PackedKVCache
from vq_core.attention.packed import stock_attention
from vq_core.errors import CacheStateError, FormatError, SettingsError
from vq_core.testing.observe import packed_tokens

Make = Callable[..., PackedKVCache]


def through_state(cache: PackedKVCache) -> PackedKVCache:
    return PackedKVCache.from_state(cache.state)


@pytest.mark.parametrize(("sliding", "residual"), [(64, 16), (100, 0), (40, 64), (33, 8), (200, 24)])
@pytest.mark.parametrize("seed", range(4))
def test_any_calls_give_what_the_window_holds(echo: Make, normal: Any, sliding: int, residual: int, seed: int) -> None:
    """Against plain arrays that are cut to the window; the method moves numbers whose place is mistaken."""
    draw = random.Random(seed)
    cache = echo(residual=residual, sliding=sliding)
    keys = values = mx.zeros((1, 2, 0, 8))
    for _ in range(40):
        n = draw.choice([1, 1, 1, 2, 7, 33, 90])
        k, v = normal(1, 2, n, 8), normal(1, 2, n, 8)
        before = keys.shape[2]
        mask = cache.make_mask(n, window_size=sliding)
        tags = cache.update_and_fetch(k, v)
        keys, values = mx.concatenate([keys, k], axis=2), mx.concatenate([values, v], axis=2)
        width = min(before, sliding - 1) + n
        want = keys[:, :, before + n - width :], values[:, :, before + n - width :]
        assert all(mx.array_equal(t, w) for t, w in zip(tags, want, strict=True))
        q = normal(1, 4, n, 8)
        found = tags[0].vq_reading.attend(q, scale=0.3, mask=mask)
        assert mx.allclose(found, stock_attention(q, *want, scale=0.3, mask=mask), atol=1e-5)

        total = before + n
        shown = min(total, sliding)
        assert (cache.offset, cache.size()) == (total, shown)
        assert all(
            mx.array_equal(a, b[:, :, total - shown :]) for a, b in zip(cache.decode(), (keys, values), strict=True)
        )
        history: Any = cache._history
        gone = history.dropped[0]
        assert gone == max(0, min(gone + history.packed[0], total - sliding) // 32 * 32)
        assert history.packed[0] + gone == max(0, total - residual) // 8 * 8 or cache.report().approximate >= 0
        assert cache.nbytes == sum(a.nbytes for a in history.arrays())

        act = draw.choice(["", "", "", "copy", "state", "trim", "rows"])
        if act == "copy":
            cache = copy.deepcopy(cache)
        elif act == "state":
            cache = through_state(cache)
        elif act == "rows":
            cache = PackedKVCache.join([cache.select([0]), cache]).select([1])
        elif act == "trim":
            most = total + 1 - sliding - gone if gone else total
            cut = draw.randint(0, max(0, most))
            assert cache.trim(cut) == cut
            keys, values = keys[:, :, : total - cut], values[:, :, : total - cut]


def test_bytes_stop_growing_and_do_not_depend_on_the_chunks(echo: Make, normal: Any, snapshot: Any) -> None:
    k, v = normal(1, 2, 1000, 8), normal(1, 2, 1000, 8)
    held = []
    for chunks in ([1000], [250] * 4, [1] * 1000, [3, 500, 1, 1, 495]):
        cache, at = echo(sliding=100), 0
        most = 0
        for n in chunks:
            cache.update_and_fetch(k[:, :, at : at + n], v[:, :, at : at + n])
            at += n
            most = max(most, cache.nbytes) if n == 1 else most
        report = cache.report()
        held.append((cache._history.packed, cache._history.dropped, report.exact, report.bytes.codes))  # type: ignore[union-attr]
        assert cache._history.dropped == [896]  # type: ignore[union-attr]
        # 100 tokens, at most a page of 32 that has not gone yet, a page that is not full, and the spare.
        assert report.tokens <= 100 + 32
        token = 2 * 2 * 8 * 4
        assert max(most, cache.nbytes) <= token * 2 * (100 + 2 * 32 + 128)
    assert all(h == held[0] for h in held)


def test_rows_of_a_batch_slide_together(echo: Make, normal: Any) -> None:
    k, v = normal(3, 2, 300, 8), normal(3, 2, 300, 8)
    cache = echo(sliding=50)
    ones = [echo(sliding=50) for _ in range(3)]
    for begin, end in ((0, 120), (120, 121), (121, 290), (290, 300)):
        tags = cache.update_and_fetch(k[:, :, begin:end], v[:, :, begin:end])
        for b, one in enumerate(ones):
            row = one.update_and_fetch(k[b : b + 1, :, begin:end], v[b : b + 1, :, begin:end])
            assert all(mx.array_equal(t[b : b + 1], r) for t, r in zip(tags, row, strict=True))


def test_rows_of_unequal_length(echo: Make, normal: Any) -> None:
    k, v = normal(2, 2, 300, 8), normal(2, 2, 300, 8)
    long, short = echo(sliding=50), echo(sliding=50)
    long.update_and_fetch(k[:1, :, :170], v[:1, :, :170])
    short.update_and_fetch(k[1:, :, :21], v[1:, :, :21])
    both = PackedKVCache.join([long, short])
    for step in range(170, 300):
        x, y = k[:, :, step : step + 1], v[:, :, step : step + 1]
        tags = both.update_and_fetch(x, y)
        q = normal(2, 4, 1, 8)
        found = tags[0].vq_reading.attend(q, scale=0.3)
        for b, one in enumerate((long, short)):
            row = one.update_and_fetch(x[b : b + 1], y[b : b + 1])
            n = row[0].shape[2]
            assert mx.array_equal(tags[0][b : b + 1, :, -n:], row[0])
            alone = row[0].vq_reading.attend(q[b : b + 1], scale=0.3)
            assert mx.allclose(found[b : b + 1], alone, atol=1e-5)


def test_rewinds_end_where_tokens_are_gone(echo: Make, normal: Any, snapshot: Any) -> None:
    cache = echo(sliding=64)
    x = normal(1, 2, 95, 8)
    cache.update_and_fetch(x, x)
    assert cache.is_trimmable() and not cache._history.dropped[0]  # type: ignore[union-attr]
    x = normal(1, 2, 10, 8)
    cache.update_and_fetch(x, x)
    assert cache._history.dropped == [32] and not cache.is_trimmable()  # type: ignore[union-attr]
    before = snapshot(cache)
    with pytest.raises(CacheStateError, match=r"trim\(11\).*window of 64.*at most 10"):
        cache.trim(11)
    assert snapshot(cache) == before
    assert cache.trim(10) == 10 and cache.offset == 95


def test_refusals(echo: Make, normal: Any) -> None:
    for wrong in (0, -3, True, 2.5, "64"):
        with pytest.raises(SettingsError, match="sliding must be a window"):
            echo(sliding=wrong)
    with pytest.raises(SettingsError, match="sink_tokens has no effect in a sliding window"):
        echo(sliding=64, sink_tokens=4)
    x = normal(1, 2, 10, 8)
    a, b = echo(sliding=64), echo(sliding=32)
    a.update_and_fetch(x, x), b.update_and_fetch(x, x)
    with pytest.raises(SettingsError, match="window"):
        PackedKVCache.join([a, b])


def test_a_state_with_other_counts_of_dropped_tokens_is_refused(echo: Make, normal: Any) -> None:
    cache = echo(sliding=64)
    x = normal(1, 2, 200, 8)
    cache.update_and_fetch(x, x)
    text, *arrays = cache.state
    assert '"dropped": [128]' in text
    for wrong in ("[96, 0]", "[7]", "[-32]", "[]"):
        with pytest.raises(FormatError):
            PackedKVCache.from_state([text.replace('"dropped": [128]', f'"dropped": {wrong}'), *arrays])
    with pytest.raises(FormatError):
        PackedKVCache.from_state([text.replace('"sliding": 64', '"sliding": null'), *arrays])


def test_the_report_says_what_is_gone(echo: Make, normal: Any) -> None:
    cache = echo(sliding=64)
    x = normal(1, 2, 200, 8)
    cache.update_and_fetch(x, x)
    report = cache.report()
    assert report.sliding == 64 and report.tokens == 72 and report.packed == packed_tokens(cache)[0]
    assert any("sliding window of 64 tokens, 128 older ones are gone" in note for note in report.notes)
    assert report.bytes.fp16 == 64 * 2 * 2 * 8 * 2
    assert report.bytes.held == cache.nbytes


def test_what_a_later_layer_fetches_is_what_the_chunk_had(echo: Make, normal: Any) -> None:
    """Models whose layers share a cache fetch it again after the update, under the same mask."""
    cache = echo(sliding=40)
    for n in (30, 20, 1, 7):
        x = normal(1, 2, n, 8)
        tags = cache.update_and_fetch(x, x)
        assert all(mx.array_equal(a, b) for a, b in zip(cache.keys_and_values(), tags, strict=True))
    x = normal(1, 2, 200, 8)
    cache.update_and_fetch(x, x)
    with pytest.raises(CacheStateError, match="window of 40 has dropped tokens"):
        cache.keys_and_values()
    x = normal(1, 2, 1, 8)
    cache.update_and_fetch(x, x)
    assert cache.keys_and_values()[0].shape[2] == 40
