"""The harness, on arms and clocks whose times are known."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import attrs
import mlx.core as mx
import pytest

from vq_core.bench import clock
from vq_core.bench.busy import Machine
from vq_core.bench.clock import MOST_NOISE, POOL, Comparison, Timing, amdahl, compare, orders, queue_length
from vq_core.errors import SettingsError

IDLE = Machine(cores=8, load=0.2)


@attrs.define
class Known:
    """Arms that take known times of a clock that nothing else moves, and a log of what happened."""

    now: float = 0.0
    log: list[tuple[Any, ...]] = attrs.field(factory=list)

    def clock(self) -> float:
        self.log.append(("clock",))
        return self.now

    def arm(self, name: str, *seconds: float) -> Callable[[mx.array], mx.array]:
        """An arm that takes these times in turn, counted over all of its calls after the first two."""
        calls = iter(range(10**9))

        def run(x: mx.array) -> mx.array:
            self.log.append(("call", name, int(x[0].item())))
            self.now += seconds[max(0, next(calls) - 2) % len(seconds)]
            return x + 1

        return run


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    made = Known()
    evaluate = mx.eval

    def logged(*trees: Any) -> None:
        made.log.append(("eval",))
        evaluate(*trees)

    monkeypatch.setattr(clock.mx, "eval", logged)
    return made


def pool(count: int = POOL) -> list[mx.array]:
    return [mx.array([i]) for i in range(count)]


def run(known: Known, arms: dict[str, Any], **rest: Any) -> Comparison:
    return compare(arms, rest.pop("inputs", pool()), machine=lambda: IDLE, clock=known.clock, **rest)


def test_figures(known: Known) -> None:
    found = run(known, {"plain": known.arm("plain", 4.0), "fast": known.arm("fast", 1.0)}, rounds=8)
    assert found.arms == {"plain": Timing(4.0, 4.0, 4.0, 16), "fast": Timing(1.0, 1.0, 1.0, 16)}
    assert (found.ratio("fast"), found.floor("fast"), found.inside_noise("fast")) == (0.25, 0.0, False)
    assert found.said("fast") == "4.00 times as fast (noise 0.0%)"
    row = found.as_dict()["arms"]["fast"]
    assert (row["ratio_to_base"], row["noise_floor"], row["refused"]) == (0.25, 0.0, [])


@pytest.mark.parametrize("inner", [1, 3, 20])
def test_evaluation_is_outside_the_inner_loop(known: Known, inner: int) -> None:
    """Between two readings of the clock: all calls of one arm, then one evaluation."""
    run(known, {"a": known.arm("a", 1.0), "b": known.arm("b", 2.0)}, rounds=4, inner=inner)
    events = known.log[known.log.index(("clock",)) :]
    samples = 0
    while events:
        sample, events = events[: inner + 3], events[inner + 3 :]
        assert [event[0] for event in sample] == ["clock", *["call"] * inner, "eval", "clock"]
        assert len({event[1] for event in sample if event[0] == "call"}) == 1
        samples += 1
    assert samples == (2 + 4) * 4  # two to warm up and four rounds, each arm twice


@pytest.mark.parametrize("inner", [1, 4, 10, 20])
def test_every_arm_sees_every_input(known: Known, inner: int) -> None:
    """Also where the pool and the number of arms or calls have a common divisor, and never two arms one in a row."""
    arms = {name: known.arm(name, 1.0) for name in "abcde"}
    run(known, arms, rounds=10, inner=inner)
    calls = [event[1:] for event in known.log[known.log.index(("clock",)) :] if event[0] == "call"]
    seen = {name: Counter(number for arm, number in calls if arm == name) for name in arms}
    assert all(set(counts) == set(range(POOL)) for counts in seen.values())
    if inner == 1:
        assert all(one[1] != other[1] for one, other in pairwise(calls) if one[0] != other[0])


@pytest.mark.parametrize("count", [2, 4, 6, 8, 10])
def test_each_arm_follows_each_other_equally_often(count: int) -> None:
    made = orders(count)
    assert all(sorted(order) == list(range(count)) for order in made)
    assert all(sorted(order[place] for order in made) == list(range(count)) for place in range(count))
    follows = Counter(pair for order in made for pair in pairwise(order))
    assert follows == {(a, b): 1 for a in range(count) for b in range(count) if a != b}


def test_rounds_are_made_up_to_whole_sets_of_orders(known: Known) -> None:
    found = run(known, {"a": known.arm("a", 1.0), "b": known.arm("b", 1.0)}, rounds=5)
    assert found.arms["a"].rounds == 2 * 8


def test_inside_the_noise(known: Known) -> None:
    """The base is a hundredth away from itself, the other arm half a hundredth from the base."""
    arms = {"plain": Timing(1.0, 1.0, 1.0, 9), "other": Timing(0.995, 0.9, 1.1, 9), "fast": Timing(0.5, 0.5, 0.5, 9)}
    found = Comparison(arms, "plain", {"plain": 0.01, "other": 0.0, "fast": 0.02})
    assert found.inside_noise("other") and "inside the noise" in found.said("other")
    assert found.as_dict()["arms"]["other"]["inside_noise"] is True
    assert not found.inside_noise("fast") and found.floor("fast") == 0.02
    assert found.said("fast") == "2.00 times as fast (noise 2.0%)"
    assert found.end_to_end("other", 0.5) == {"share": 0.5, "at_most": None, "if_it_took_no_time": 2.0}
    assert found.end_to_end("fast", 0.5) == {"share": 0.5, "at_most": 1.3333, "if_it_took_no_time": 2.0}


@pytest.mark.parametrize(("one", "other", "refused"), [(1.0, 1.04, False), (1.0, 1.06, True), (1.06, 1.0, True)])
def test_no_ratio_where_an_arm_differs_from_itself(known: Known, one: float, other: float, refused: bool) -> None:
    """The arm's time depends on which of its two names it runs under."""
    names = [i % 2 for turn in [*orders(4)[2:], *orders(4)] for i in turn if i // 2 == 0]
    plain = known.arm("plain", *((one, other)[name] for name in names))
    found = run(known, {"plain": plain, "fast": known.arm("fast", 0.5)}, rounds=4)
    assert found.noises["plain"] == pytest.approx(max(one, other) / min(one, other) - 1)
    assert found.noises["fast"] == 0
    assert (found.ratio("fast") is None) is refused
    assert (found.said("fast") == "no ratio: an arm against itself differs by 6.0%, over 5%") is refused
    assert (found.as_dict()["arms"]["fast"]["ratio_to_base"] is None) is refused
    assert MOST_NOISE == 0.05


def test_noisy_arms_are_measured_again(known: Known) -> None:
    """Until the floor is low; the number of attempts stands in the record."""
    first = 2 + 2 * 2 + 2 * 4  # the check, warming up, four rounds
    times = [1.0 + i for i in range(first - 2)] + [1.0] * 1000
    found = run(known, {"plain": known.arm("plain", *times), "fast": known.arm("fast", 0.5)}, rounds=4, attempts=3)
    assert (found.attempts, found.ratio("fast"), found.as_dict()["attempts"]) == (2, 0.5, 2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("busy", "reason"),
    [
        (Machine(cores=8, load=4.1), "the load average 4.1 is over half of 8 cores"),
        (
            Machine(cores=8, load=5.5, own=1.0),
            "the load average 5.5, 1.0 of it this process's, is over half of 8 cores",
        ),
        (Machine(cores=8, load=0.0, gpu_processes=1), "other processes on the GPU: 1"),
    ],
)
def test_no_ratio_on_a_busy_machine(known: Known, busy: Machine, reason: str, when: str) -> None:
    looks = iter([busy, IDLE] if when == "before" else [IDLE, busy])
    arms = {"plain": known.arm("plain", 1.0), "fast": known.arm("fast", 0.5)}
    found = compare(arms, pool(), rounds=4, machine=lambda: next(looks), clock=known.clock)
    assert found.busy == (reason,) and found.ratio("fast") is None and found.inside_noise("fast") is None
    assert found.said("fast") == f"no ratio: {reason}"
    assert found.end_to_end("fast", 0.5)["at_most"] is None
    assert found.as_dict()["busy"] == [reason] and len(found.as_dict()["machine"]) == 2
    assert found.arms["fast"].median == 0.5  # times are what they are


def test_reasons_known_beforehand(known: Known) -> None:
    arms = {"plain": known.arm("plain", 1.0), "fast": known.arm("fast", 0.5)}
    assert run(known, arms, rounds=4, refuse=("no clock",)).said("fast") == "no ratio: no clock"


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of the arrays that the harness has evaluated."""
    found: set[int] = set()
    evaluate = mx.eval

    def noting(*trees: Any) -> None:
        evaluate(*trees)
        todo: list[Any] = list(trees)
        while todo:
            item = todo.pop()
            if isinstance(item, mx.array):
                found.add(id(item))
            else:
                todo.extend(item.values() if isinstance(item, dict) else item)

    monkeypatch.setattr(clock.mx, "eval", noting)
    return found


@attrs.frozen(eq=False)
class Item:
    x: mx.array
    more: dict[str, mx.array]


def test_lazy_inputs_are_not_timed(forced: set[int]) -> None:
    """The first arm would pay for what both read; also inputs that mx.eval itself passes over."""
    lazy = [Item(mx.array([float(i)]) + 1, {"y": mx.array([i]) * 2}) for i in range(POOL)]
    wanted = {id(a) for item in lazy for a in (item.x, item.more["y"])}
    missing: list[set[int]] = []

    def read() -> float:
        missing.append(wanted - forced)
        return 0.0

    compare({"a": lambda item: item.x + item.more["y"]}, lazy, rounds=2, machine=lambda: IDLE, clock=read)
    assert missing and not any(missing)


def test_results_of_lazy_arms_are_forced(forced: set[int]) -> None:
    """Everything that an arm returns is evaluated before the clock is read again, nested or not."""
    kept: list[mx.array] = []
    unforced: list[bool] = []

    def arm(x: mx.array) -> dict[str, Any]:
        made = {"a": x + 1, "b": [x * 2, (x - 1,)]}
        kept.extend([made["a"], made["b"][0], made["b"][1][0]])
        return made

    def read() -> float:
        unforced.extend(id(a) not in forced for a in kept)
        return 0.0

    compare({"a": arm}, pool(), rounds=2, inner=3, machine=lambda: IDLE, clock=read)
    assert unforced and not any(unforced)


def test_results_die_outside_the_clock(known: Known) -> None:
    """Freeing what one sample has made is no part of the next."""
    alive: list[int] = []
    made: list[weakref.ref[mx.array]] = []

    def arm(x: mx.array) -> mx.array:
        found = x + 1
        made.append(weakref.ref(found))
        return found

    def read() -> float:
        alive.append(sum(ref() is not None for ref in made))
        return 0.0

    compare({"a": arm}, pool(), rounds=2, inner=3, machine=lambda: IDLE, clock=read)
    assert alive == [0, 3] * 8  # two samples to warm up and two rounds, under two names


def _shared(made: list[mx.array]) -> Callable[[mx.array], mx.array]:
    return lambda x: made[0]


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        (lambda x: attrs.make_class("Codes", ["codes"])(x + 1), "returns Codes, which mx.eval passes over"),
        (lambda x: [], "returns no array"),
        (lambda x: None, "returns NoneType"),
        (_shared([mx.array([1])]), "gives one array for two inputs"),
    ],
)
def test_arms_that_would_measure_nothing(arm: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        compare({"honest": lambda x: x + 1, "other": arm}, pool(), machine=lambda: IDLE)


@pytest.mark.parametrize("inputs", [pool(9), pool(3) * 4], ids=["few", "repeated"])
def test_pools_are_large(inputs: Sequence[mx.array]) -> None:
    with pytest.raises(SettingsError, match="at least 10 different objects"):
        compare({"a": lambda x: x + 1}, inputs, machine=lambda: IDLE)


@pytest.mark.parametrize("given", [{"rounds": 0}, {"inner": 0}, {"attempts": 0}])
def test_counts(given: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match="1 or more of each"):
        compare({"a": lambda x: x + 1}, pool(), machine=lambda: IDLE, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fastest", "least", "most", "calls"),
    [(1e-3, 20, 100, 20), (2e-5, 20, 100, 50), (1e-9, 20, 100, 100), (1e-3, 20, 4, 4), (0.0, 20, 100, 100)],
)
def test_queues_are_long_enough(known: Known, fastest: float, least: int, most: int, calls: int) -> None:
    """At least 20 calls and a millisecond of the fastest arm; fewer only where the results would not fit."""
    arms = {"slow": known.arm("slow", 0.1), "fast": known.arm("fast", fastest)}
    made = queue_length(arms, pool(), seconds=1e-3, least=least, most=most, clock=known.clock)
    assert made == pytest.approx(calls, abs=1)


@pytest.mark.parametrize(
    ("share", "ratio", "gain"),
    [(0.5, 0.5, 4 / 3), (0.1, 0.0, 1 / 0.9), (1.0, 0.25, 4.0), (0.0, 0.5, 1.0), (0.5, 2.0, 2 / 3)],
)
def test_amdahl(share: float, ratio: float, gain: float) -> None:
    assert amdahl(share, ratio) == pytest.approx(gain)


@pytest.mark.parametrize(("share", "ratio"), [(-0.1, 0.5), (1.1, 0.5), (0.5, -1.0), (1.0, 0.0), (float("nan"), 0.5)])
def test_amdahl_of_nonsense(share: float, ratio: float) -> None:
    with pytest.raises(SettingsError, match="share"):
        amdahl(share, ratio)


@pytest.mark.parametrize("built", [False, True])
def test_what_building_takes_is_left_out_where_asked(built: bool) -> None:
    """What the calls cost before they are forced; the arms are otherwise measured alike."""
    now = [0.0]

    def slow_to_build(x: mx.array) -> mx.array:
        now[0] += 3.0
        return x + 1

    inputs = [mx.array([float(i)]) for i in range(10)]
    found = clock.compare({"a": slow_to_build}, inputs, rounds=4, inner=3, built=built, clock=lambda: now[0])
    assert found.arms["a"].median == (0.0 if built else 3.0)
