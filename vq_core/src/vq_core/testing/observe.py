"""Looking at what a cache holds, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.cache.shell import PackedKVCache

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

Stored = list[dict[str, "np.ndarray[Any, Any]"]]


def raw(a: mx.array) -> np.ndarray[Any, Any]:
    """The bits of an array as unsigned integers: NaN equals itself, and -0 differs from 0."""
    return np.array(a if a.dtype == mx.bool_ else mx.contiguous(a).view(_UNSIGNED[a.dtype.size]))


def floats(a: mx.array) -> np.ndarray[Any, Any]:
    """As float64."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


def gaussian(shape: Sequence[int], dtype: str = "float16", seed: int = 0) -> mx.array:
    """N(0, 1) from numpy's generator."""
    x = np.random.default_rng(seed).standard_normal(tuple(shape), np.float32)
    return mx.array(x).astype(getattr(mx, dtype))


def stored(cache: PackedKVCache) -> Stored:
    """For each row the bits of every field, all its tokens and nothing of the spare capacity."""
    history = cache._history
    if history is None:
        return []
    rows: Stored = [{} for _ in range(history.rows)]
    for side, store in history.stores.items():
        for number, row in enumerate(rows):
            n, layout = store.tokens[number], store.layout
            for field in layout.sequence:
                if n:
                    row[f"{side}.{field.name}"] = raw(store.sequence[field.name][number])
            for field in layout.paged:
                if not n:
                    continue
                pages = raw(mx.take(store.paged[field.name], mx.array(store.owned[number], mx.int32), axis=0))
                axis = (field.axis or 0) + 1
                joined = np.concatenate(list(pages), axis=axis)
                row[f"{side}.{field.name}"] = joined.take(range(layout.units(field, n)), axis=axis)
    return rows


def window(cache: PackedKVCache) -> Stored:
    """For each row the bits of its exact tokens, sink tokens first."""
    history = cache._history
    if history is None or history.window.keys is None:
        return []
    rows: Stored = []
    for row, (sinks, count) in enumerate(zip(history.window.sinks, history.window.counts, strict=True)):
        rows.append({})
        for side in ("keys", "values"):
            exact, first = getattr(history.window, side), getattr(history.window, f"sink_{side}")
            width = exact.shape[2]
            rows[-1][f"window.{side}"] = raw(exact[row, :, width - count :])
            if sinks:
                rows[-1][f"sinks.{side}"] = raw(first[row, :, :sinks])
    return rows


def snapshot(cache: PackedKVCache) -> dict[str, Any]:
    """Everything that must not change when a call is refused."""
    history = cache._history
    counts = None if history is None else [history.lengths, history.packed, list(history.window.approximate)]
    return {"offset": cache.offset, "counts": counts, "stored": stored(cache), "window": window(cache)}


def packed_tokens(cache: PackedKVCache) -> list[int]:
    """Packed tokens of each row."""
    return [] if cache._history is None else list(cache._history.packed)


def assert_same(got: Any, want: Any, what: str) -> None:
    """Compare nested dictionaries and lists of arrays bit for bit; the message names the place."""
    if isinstance(want, Mapping):
        assert set(got) == set(want), f"{what}: {sorted(got)} instead of {sorted(want)}"
        for key in want:
            assert_same(got[key], want[key], f"{what}, {key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), f"{what}: {len(got)} instead of {len(want)}"
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{what}, {i}")
    elif isinstance(want, mx.array):
        assert got.dtype == want.dtype, f"{what}: {got.dtype} instead of {want.dtype}"
        assert_same(raw(got), raw(want), what)
    elif isinstance(want, np.ndarray):
        assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
        different = np.argwhere(got != want)
        assert not len(different), f"{what}: {len(different)} of {want.size} differ, the first at {different[0]}"
    else:
        assert got == want, f"{what}: {got} instead of {want}"
