"""Acceptance 9, cases B1 and B3: rows of a batch store the bytes that they store alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache

LENGTHS = (5, 200, 700)
HEADS, DIM = 2, 64


def normal(rng: np.random.Generator, tokens: int, dim: int = DIM, rows: int = 1) -> mx.array:
    return mx.array(rng.standard_normal((rows, HEADS, tokens, dim), np.float32)).astype(mx.float16)


def make(**options: Any) -> PackedKVCache:
    return PackedKVCache(**({"keys": "kivi:bits=2", "values": "kivi:bits=3,group_size=64", "residual": 40} | options))


def fed(x: mx.array, **options: Any) -> PackedKVCache:
    cache = make(**options)
    cache.update_and_fetch(x, -x)
    return cache


def content(cache: PackedKVCache, row: int = 0) -> list[Any]:
    """Everything that a row stores: bytes of codes and metadata of its tokens, of its window, its sink tokens."""
    history = cache._history
    assert history is not None
    window, found = history.window, []
    found.append((window.sinks[row], history.packed[row], window.counts[row], window.approximate[row]))
    for name in ("keys", "values"):
        store = history.stores[name]
        for field in store.layout.paged:
            pages = [np.array(store.paged[field.name][p]) for p in store.owned[row]]
            assert field.axis is not None
            used = store.layout.units(field, store.tokens[row])
            if pages:
                whole = np.concatenate(pages, axis=1 + field.axis)
                found.append(whole.take(range(used), axis=1 + field.axis).tobytes())
        exact = np.array(getattr(window, name)[row])
        found.append(exact[:, exact.shape[1] - window.counts[row] :].tobytes())
        if window.sinks[row]:
            found.append(np.array(getattr(window, f"sink_{name}")[row]).tobytes())
    return found


def same(batch: PackedKVCache, singles: list[PackedKVCache]) -> None:
    for row, single in enumerate(singles):
        assert content(batch, row) == content(single), f"row {row}"
    assert batch.offset == max(s.offset for s in singles)


@pytest.mark.parametrize("options", [{}, {"residual": 0}, {"sink_tokens": 4, "residual": 32}], ids=str)
def test_rows_of_5_200_and_700(options: dict[str, int]) -> None:
    """Joined, grown step by step (rows flush at different moments), selected, joined again, split."""
    rng = np.random.default_rng(0)
    singles = [fed(normal(rng, n), **options) for n in LENGTHS]
    batch = PackedKVCache.join(singles)
    same(batch, singles)
    moments = set()
    for _ in range(90):
        x = normal(rng, 1, rows=3)
        before = list(batch._history.packed)  # type: ignore[union-attr]
        batch.update_and_fetch(x, -x)
        for b, single in enumerate(singles):
            single.update_and_fetch(x[b : b + 1], -x[b : b + 1])
        after = batch._history.packed  # type: ignore[union-attr]
        moments.add(tuple(a != b for a, b in zip(before, after, strict=True)))
        if any(a != b for a, b in zip(before, after, strict=True)):
            same(batch, singles)
    assert len(moments) >= 3, "the rows flush at different moments"
    picked = batch.select([2, 0])
    same(picked, [singles[2], singles[0]])
    late = fed(normal(rng, 333), **options)
    again = PackedKVCache.join([picked, late, batch.select([1])])
    singles = [singles[2], singles[0], late, singles[1]]
    same(again, singles)
    x = normal(rng, 70, rows=4)
    again.update_and_fetch(x, -x)
    for b, single in enumerate(singles):
        single.update_and_fetch(x[b : b + 1], -x[b : b + 1])
    same(again, singles)
    for part, single in zip(again.split(), singles, strict=True):
        assert content(part) == content(single)
        assert part.offset == single.offset
        assert part.nbytes - part.report().bytes.spare == single.nbytes - single.report().bytes.spare
        for a, b in zip(part.decode(), single.decode(), strict=True):
            assert mx.array_equal(a, b)


def test_rows_attend_like_their_own_runs() -> None:
    """Case B1: rows of 5, 17 and 64 tokens, and of 700; a step and a chunk."""
    rng = np.random.default_rng(1)
    singles = [fed(normal(rng, n).astype(mx.float32), residual=16) for n in (5, 17, 64, 700)]
    batch = PackedKVCache.join(singles)
    for length in (1, 20):
        x, q = (mx.array(rng.standard_normal((4, h, length, DIM), np.float32)) for h in (HEADS, 6))
        keys, _ = batch.update_and_fetch(x, -x)
        for b, single in enumerate(singles):
            single.update_and_fetch(x[b : b + 1], -x[b : b + 1])
        # Columns are physical: those of the longest row.
        assert keys.shape[2] == batch.offset
        out = batch.attend(q, scale=0.125, mask="causal")
        for b, single in enumerate(singles):
            want = single.attend(q[b : b + 1], scale=0.125, mask="causal")
            np.testing.assert_allclose(np.array(out[b]), np.array(want[0]), atol=1e-5)


def test_a_sequence_alone_and_in_company() -> None:
    """Case B3: alone, four times over, beside 100 zero tokens and beside noise: byte-identical."""
    rng = np.random.default_rng(2)
    x = normal(rng, 300)
    alone = content(fed(x))
    four = fed(mx.concatenate([x] * 4))
    assert all(content(four, b) == alone for b in range(4))
    for other in (mx.zeros((1, HEADS, 100, DIM), mx.float16), 1000 * normal(rng, 900)):
        batch = PackedKVCache.join([fed(other), fed(x)])
        assert content(batch, 1) == alone


def test_a_row_that_needs_float32_metadata_leaves_the_others_values_alone() -> None:
    rng = np.random.default_rng(3)
    x, y = (normal(rng, 300).astype(mx.bfloat16) for _ in range(2))
    y[:, :, 100] = -80000
    batch = PackedKVCache.join([fed(x), fed(y)])
    for part, single in zip(batch.split(), (fed(x), fed(y)), strict=True):
        for a, b in zip(part.decode(), single.decode(), strict=True):
            assert mx.array_equal(a, b)
            assert mx.isfinite(a).all()


def test_trim_of_unequal_rows_trims_each() -> None:
    rng = np.random.default_rng(4)
    singles = [fed(normal(rng, n)) for n in LENGTHS]
    batch = PackedKVCache.join(singles)
    assert batch.trim(1000) == 5
    assert [s.trim(5) for s in singles] == [5, 5, 5]
    assert batch._history.lengths == [0, 195, 695]  # type: ignore[union-attr]
    same(batch, singles)


@pytest.mark.parametrize("seed", range(40))
def test_random_operations(seed: int) -> None:
    """A batch against a list of caches of one row each, through 25 random operations."""
    rng = np.random.default_rng(100 + seed)
    options = {"residual": int(rng.choice([0, 8, 40])), "sink_tokens": int(rng.choice([0, 0, 3]))}
    singles = [fed(normal(rng, int(n)), **options) for n in rng.integers(1, 150, 2)]
    batch = PackedKVCache.join(singles)
    for _ in range(25):
        kind = rng.choice(["grow", "grow", "grow", "trim", "select", "join"])
        if kind == "grow":
            x = normal(rng, int(rng.choice([1, 2, 33, 70])), rows=len(singles))
            batch.update_and_fetch(x, -x)
            for b, single in enumerate(singles):
                single.update_and_fetch(x[b : b + 1], -x[b : b + 1])
        elif kind == "trim":
            n = int(rng.integers(0, min(s.offset for s in singles)))
            assert {batch.trim(n), *(s.trim(n) for s in singles)} == {n}
        elif kind == "select":
            pick = rng.permutation(len(singles))[: int(rng.integers(1, len(singles) + 1))].tolist()
            batch, singles = batch.select(pick), [singles[p] for p in pick]
        elif len(singles) < 5:
            late = fed(normal(rng, int(rng.integers(1, 200))), **options)
            batch, singles = PackedKVCache.join([batch, late]), [*singles, late]
    same(batch, singles)
    for part, single in zip(batch.split(), singles, strict=True):
        assert content(part) == content(single)
