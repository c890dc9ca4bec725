"""What packed caches are given while they serve, and whether they hold what plain rows hold that are given it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from vq_core import PackedKVCache
from vq_core.testing.observe import assert_same, stored, window

from ..sequences.plain import Row, Rules

Call = tuple[Any, ...]


class Recorder:
    """Updates and trims of every cache, which a copy inherits.

    Args:
        monkeypatch: Undoes the recording.
    """

    def __init__(self, monkeypatch: Any):
        self._calls: dict[int, list[Call]] = {}
        self._alive: list[PackedKVCache] = []  # so that no id is used twice
        update, trim, deepcopy = (getattr(PackedKVCache, n) for n in ("update_and_fetch", "trim", "__deepcopy__"))

        def updating(cache: PackedKVCache, keys: mx.array, values: mx.array) -> Any:
            self.of(cache).append(("update", keys, values))
            return update(cache, keys, values)

        def trimming(cache: PackedKVCache, n: int) -> int:
            dropped: int = trim(cache, n)
            if dropped:
                self.of(cache).append(("trim", dropped))
            return dropped

        def copying(cache: PackedKVCache, memo: Any) -> PackedKVCache:
            made: PackedKVCache = deepcopy(cache, memo)
            self.of(made).extend(self.of(cache))
            return made

        for name, call in (("update_and_fetch", updating), ("trim", trimming), ("__deepcopy__", copying)):
            monkeypatch.setattr(PackedKVCache, name, call)

    def of(self, cache: PackedKVCache) -> list[Call]:
        """``("update", keys, values)`` and ``("trim", n)``."""
        if id(cache) not in self._calls:
            self._calls[id(cache)] = []
            self._alive.append(cache)
        return self._calls[id(cache)]

    def row(self, cache: PackedKVCache) -> Row:
        """The plain row that was given the same and cut alike."""
        history = cache._history
        assert history is not None
        bound = (history.bound["keys"], history.bound["values"])
        row = Row(Rules(bound, history.residual, history.sinks, history.block))
        for what, *given in self.of(cache):
            getattr(row, what)(*given)
        return row


def assert_as_given(cache: PackedKVCache, row: Row) -> None:
    """A cache holds what the row holds, and, as far as nothing was cut, what a fresh cache of these tokens holds."""
    report = cache.report()
    assert row.true is not None and row.held is not None and row.slack is not None
    assert (cache.offset, report.packed, report.approximate) == (row.tokens, row.packed, row.approximate)
    for got, held, true, slack in zip(cache.decode(), row.held, row.true, row.slack, strict=True):
        assert mx.array_equal(got, held)
        # Half a quantization step for each time a token was coded: one step after one cut.
        assert (mx.abs(got - true) <= slack * (1 + 1e-4) + 1e-5).all()
    fresh = PackedKVCache(**cache.policy.text)
    fresh.update_and_fetch(*row.true)
    if row.clean is None and row.packed == fresh.report().packed:
        assert_same(stored(cache), stored(fresh), "codes")
        assert_same(window(cache), window(fresh), "window")
        return
    assert report.packed >= fresh.report().packed
    same = min(fresh.report().packed, row.packed if row.clean is None else row.clean)
    if same:
        codes, wanted = stored(cache)[0], stored(fresh)[0]
        for number, side in enumerate(("keys", "values")):
            layout = row.rules.bound[number].layout
            for field in layout.paged:
                axis, units = (field.axis or 0) + 1, range(layout.units(field, same))
                a, b = (x[f"{side}.{field.name}"].take(units, axis=axis) for x in (codes, wanted))
                assert np.array_equal(a, b), f"{side}.{field.name}: the first {same} tokens"
