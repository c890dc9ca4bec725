"""The host's cost by part, on a clock that only known things move."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from vq_core import PackedKVCache
from vq_core.bench.host import PARTS, Shape, host_parts
from vq_core.cache import tagged
from vq_core.errors import SettingsError

Make = Callable[..., PackedKVCache]
SMALL = Shape(heads=4, kv_heads=2, dim=8)


class Known:
    """A clock, a plain cache, a hook and an attention function that move it by so many microseconds."""

    def __init__(self) -> None:
        self.now, self.users, self.calls = 0.0, 0, 0
        self.before: Any = None

    def clock(self) -> float:
        return self.now

    def spend(self, micros: float) -> None:
        self.now += 1e-6 * micros

    def install(self) -> None:
        self.users, self.before = self.users + 1, mx.fast.scaled_dot_product_attention
        mx.fast.scaled_dot_product_attention = self.read

    def uninstall(self) -> None:
        self.users, mx.fast.scaled_dot_product_attention = self.users - 1, self.before

    def read(self, q: mx.array, keys: Any, values: Any, **rest: Any) -> mx.array:
        self.spend(2)
        reading = tagged.reading_of(keys, values)
        return self.before(q, keys, values, **rest) if reading is None else reading.attend(q, **rest)

    def attend(self, view: Any, queries: mx.array, **rest: Any) -> mx.array:
        self.spend(40)
        self.calls += 1
        return queries * 1.0

    def plain(self) -> Any:
        known = self

        class Plain:
            state: Any = None
            taken = 0

            @property
            def offset(self) -> int:
                known.spend(0.5)
                return self.taken

            def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
                known.spend(7)
                self.taken += keys.shape[2]
                return keys, values

        return Plain()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, echo: Make) -> Known:
    made = Known()
    monkeypatch.setattr(tagged, "attend", made.attend)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    return made


def measured(known: Known, **options: Any) -> Any:
    wanted = {"tokens": 40, "residual": 16, "method": "echo:block=8,page=32", "shape": SMALL, "layers": 3, "steps": 12}
    return host_parts(known.plain, known, clock=known.clock, **(wanted | options))


def test_each_part_is_what_it_took(known: Known) -> None:
    found = measured(known, warm=4)
    assert list(found) == ["plain", "plain again", "vq", "vq, no attention"]
    medians = {name: [parts[part].median for part in (*PARTS, "all")] for name, parts in found.items()}
    assert medians["plain"] == medians["plain again"] == pytest.approx([7, 2, 0, 1, 10])
    assert medians["vq"] == pytest.approx([0, 42, 0, 0, 42])
    assert medians["vq, no attention"] == pytest.approx([0, 2, 0, 0, 2])
    assert known.calls == (12 + 4) * 3, "attention was left out where it should not be, or not where it should"
    assert not known.users and gc.isenabled()


def test_a_failure_leaves_nothing_behind(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, stock = tagged.attend, mx.fast.scaled_dot_product_attention  # type: ignore[attr-defined]

    def broken(*args: Any, **rest: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(known, "read", broken)
    with pytest.raises(ValueError, match="broken"):
        measured(known)
    assert tagged.attend is attend and mx.fast.scaled_dot_product_attention is stock  # type: ignore[attr-defined]
    assert not known.users and gc.isenabled()


@pytest.mark.parametrize("given", ({"steps": 0}, {"layers": 0}, {"tokens": 0}, {"warm": -1}))
def test_nothing_to_measure_is_refused(known: Known, given: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match="1 or more"):
        measured(known, **given)
