"""A clock for comparing ways to do the same thing, and what may be said of what it shows.

Arms take turns in one process, in orders in which each follows each other equally often.  Inputs rotate through a
pool, and the work of an inner loop of calls is forced by one ``mx.eval`` after it.  Every arm runs twice under two
names: the ratio of these two is the noise floor, and it stands beside every result.  There is no ratio where the
machine is busy or the floor is high.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.bench.busy import Machine, look
from vq_core.bench.environment import environment
from vq_core.errors import SettingsError
from vq_core.plugins.binding import state_arrays

__all__ = [
    "MOST_NOISE", "POOL", "Comparison", "Timing", "amdahl", "compare", "environment", "noise", "orders", "queue_length",
]  # fmt: skip

POOL = 10
"""Inputs that an arm rotates through, at least."""
MOST_NOISE = 0.05
"""With a higher floor there is no ratio."""

Arm = Callable[[Any], Any]


@attrs.frozen
class Timing:
    """Seconds a call of one arm.

    Attributes:
        median, low, high: Over the samples.
        rounds: Number of samples.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """From one figure a sample."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@attrs.frozen
class Comparison:
    """Arms measured together.

    Attributes:
        arms: By name.
        base: Name of the arm that ratios refer to.
        noises: Each arm against itself: larger median over smaller, minus 1.
        busy: Why there is no ratio at all; empty where there may be one.
        inner: Calls in a row that were forced together.
        attempts: How often all was measured; what stands here is the last time.
        machine: How busy it was, before and after.
    """

    arms: Mapping[str, Timing]
    base: str
    noises: Mapping[str, float]
    busy: tuple[str, ...] = ()
    inner: int = 1
    attempts: int = 1
    machine: tuple[Machine, ...] = ()

    @property
    def noise(self) -> float:
        """The highest floor."""
        return max(self.noises.values())

    def floor(self, name: str, base: str | None = None) -> float:
        """The noise floor of one ratio: the higher of its two arms'."""
        return max(self.noises[name], self.noises[base or self.base])

    def refused(self, name: str, base: str | None = None) -> tuple[str, ...]:
        """Why there is no ratio of an arm to the base; empty where there is one."""
        floor = self.floor(name, base)
        noisy = (f"an arm against itself differs by {floor:.1%}, over {MOST_NOISE:.0%}",) if floor > MOST_NOISE else ()
        return self.busy + noisy

    def ratio(self, name: str, base: str | None = None) -> float | None:
        """Time of an arm over the base's time, medians; ``None`` where it is refused."""
        if self.refused(name, base):
            return None
        return self.arms[name].median / self.arms[base or self.base].median

    def inside_noise(self, name: str, base: str | None = None) -> bool | None:
        """Whether the difference to the base is no larger than the noise floor; ``None`` where it is refused."""
        ratio = self.ratio(name, base)
        return None if ratio is None else max(ratio, 1 / ratio) - 1 <= self.floor(name, base)

    def said(self, name: str, base: str | None = None) -> str:
        """The result in words, with the noise floor."""
        ratio = self.ratio(name, base)
        if ratio is None:
            return f"no ratio: {'; '.join(self.refused(name, base))}"
        floor = f"noise {self.floor(name, base):.1%}"
        if self.inside_noise(name, base):
            return f"{1 / ratio:.2f} times as fast, inside the noise ({floor})"
        return f"{1 / ratio:.2f} times as fast ({floor})"

    def end_to_end(self, name: str, share: float) -> dict[str, float | None]:
        """What a whole step gains at most, if the operation's base arm is ``share`` of its time: :func:`amdahl`."""
        ratio = None if self.inside_noise(name) else self.ratio(name)
        at_most = None if ratio is None else amdahl(share, ratio)
        if_free = None if share == 1 else amdahl(share, 0.0)
        return {"share": share, "at_most": _rounded(at_most), "if_it_took_no_time": _rounded(if_free)}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "base": self.base,
            "calls_per_evaluation": self.inner,
            "attempts": self.attempts,
            "noise_floor": round(self.noise, 4),
            "busy": list(self.busy),
            "machine": [attrs.asdict(machine) for machine in self.machine],
            "arms": {
                name: attrs.asdict(timing)
                | {
                    "noise_floor": round(self.floor(name), 4),
                    "ratio_to_base": _rounded(self.ratio(name)),
                    "inside_noise": self.inside_noise(name),
                    "refused": list(self.refused(name)),
                    "said": self.said(name) if name != self.base else "the base",
                }
                for name, timing in self.arms.items()
            },
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def amdahl(share: float, ratio: float) -> float:
    """How many times as fast a whole step becomes at most when a part of it takes another time.

    Args:
        share: The part's share of the step's time before, 0 to 1.
        ratio: The part's time after over its time before.

    Raises:
        SettingsError: a share outside of 0 to 1, a negative ratio, or nothing left of the step.
    """
    if not 0 <= share <= 1 or not ratio >= 0:
        raise SettingsError(f"share {share!r} and ratio {ratio!r}: accepted are 0 <= share <= 1 and ratio >= 0")
    left = 1 - share + share * ratio
    if left <= 0:
        raise SettingsError("share 1 and ratio 0 leave no step at all: give a smaller share")
    return 1 / left


def orders(count: int) -> list[list[int]]:
    """Orders of an even number of arms in which each stands once at each place and follows each other once.

    Turning one order round would not do: there each arm follows the same one but at the ends.
    """
    first = [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]
    return [[(arm + turn) % count for arm in first] for turn in range(count)]


def compare(
    arms: Mapping[str, Arm], inputs: Sequence[Any], *, rounds: int = 15, inner: int = 1, warm: int = 2,
    built: bool = False, attempts: int = 1, refuse: Sequence[str] = (), machine: Callable[[], Machine] = look,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:  # fmt: skip
    """Measure arms in turn; the first one is the base.

    Args:
        arms: Each takes one input and returns arrays, in lists, tuples and dictionaries if wanted, unevaluated.
        inputs: The pool, at least 10 different objects; evaluated before the clock starts.
        rounds: Turns; made up to whole sets of orders.
        inner: Calls in a row of one arm, forced together.
        built: Start the clock when all calls of a sample are built: it then sees MLX and the device, and not what
            Python costs, which is other on each host and was seen to double within one run.
        warm: Samples of each arm before the clock starts.
        attempts: Measure all again, so many times at most, while an arm against itself differs by over 5%. The
            ratios have no say in it.
        refuse: Reasons known beforehand why there must be no ratio.
        machine, clock: For tests.

    Raises:
        SettingsError: too small a pool, or an arm that does not return arrays of its own for each input.
    """
    if not arms or rounds < 1 or inner < 1 or attempts < 1:
        raise SettingsError(f"{len(arms)} arms, rounds={rounds}, inner={inner}, attempts={attempts}: 1 or more of each")
    if len({id(item) for item in inputs}) < POOL:
        raise SettingsError(f"a pool of {len(inputs)} inputs: at least {POOL} different objects are needed")
    mx.eval(state_arrays(list(inputs)))
    for name, arm in arms.items():
        _check(name, arm, inputs)
    seen = [machine()]
    found: Comparison | None = None
    for attempt in range(attempts):
        halves = _measure(list(arms.values()), inputs, rounds, inner, warm, clock, built)
        seen = [seen[0], machine()]
        busy = (*refuse, *dict.fromkeys(reason for look in seen for reason in look.reasons))
        noises = {name: noise(*pair) for name, pair in zip(arms, halves, strict=True)}
        timings = {name: Timing.of(pair[0] + pair[1]) for name, pair in zip(arms, halves, strict=True)}
        found = Comparison(timings, next(iter(arms)), noises, busy, inner, attempt + 1, tuple(seen))
        if found.noise <= MOST_NOISE:
            break
    assert found is not None
    return found


def queue_length(
    arms: Mapping[str, Arm], inputs: Sequence[Any], *, seconds: float = 2e-3, least: int = 20, most: int = 100,
    clock: Callable[[], float] = time.perf_counter,
) -> int:  # fmt: skip
    """Calls to queue before one evaluation so that the fastest arm's sample takes ``seconds``: least to most."""
    fastest = math.inf
    calls = min(least, most)
    for arm in arms.values():
        _sample(arm, _picked(inputs, 0, 1), clock)  # compiles
        _sample(arm, _picked(inputs, 1, calls), clock)
        fastest = min(fastest, _sample(arm, _picked(inputs, 2, calls), clock))
    wanted = math.ceil(seconds / fastest) if fastest > 0 else most
    return max(1, min(max(wanted, least), most))


def _measure(
    arms: Sequence[Arm],
    inputs: Sequence[Any],
    rounds: int,
    inner: int,
    warm: int,
    clock: Callable[[], float],
    built: bool,
) -> list[tuple[list[float], list[float]]]:
    """Seconds a call of each arm, under its two names."""
    count = 2 * len(arms)
    # Arms start at places of their own in the pool: none finds what the one before it left in a cache.
    cursors = [i * len(inputs) // count for i in range(count)]
    seconds: list[list[float]] = [[] for _ in range(count)]
    sets = orders(count)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(-warm, math.ceil(rounds / count) * count):
            for i in sets[number % count]:
                took = _sample(arms[i // 2], _picked(inputs, cursors[i], inner), clock, built)
                cursors[i] += inner
                if number >= 0:
                    seconds[i].append(took)
    finally:
        if collecting:
            gc.enable()
    return [(seconds[2 * i], seconds[2 * i + 1]) for i in range(len(arms))]


def _sample(arm: Arm, picked: Sequence[Any], clock: Callable[[], float], built: bool = False) -> float:
    """Seconds a call.  The results die when the function returns, after the clock."""
    mx.synchronize()
    begin = clock()
    done = [arm(item) for item in picked]
    if built:
        begin = clock()
    mx.eval(done)
    return (clock() - begin) / len(picked)


def _picked(inputs: Sequence[Any], start: int, count: int) -> list[Any]:
    return [inputs[(start + i) % len(inputs)] for i in range(count)]


def noise(one: Sequence[float], other: Sequence[float]) -> float:
    """One arm under two names: the larger median over the smaller, minus 1."""
    a, b = statistics.median(one), statistics.median(other)
    if a == b:
        return 0.0
    return max(a, b) / min(a, b) - 1 if min(a, b) > 0 else math.inf


def _check(name: str, arm: Arm, inputs: Sequence[Any]) -> None:
    """Refuse an arm whose work ``mx.eval`` would not force, or would not do for each call."""
    first, second = (_arrays(name, arm(item)) for item in inputs[:2])
    if {id(a) for a in first} & {id(a) for a in second}:
        raise SettingsError(f"arm {name!r} gives one array for two inputs: it must do its work at each call")
    mx.eval(first, second)


def _arrays(name: str, result: Any) -> list[mx.array]:
    found: list[mx.array] = []
    todo = [result]
    while todo:
        item = todo.pop()
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, list | tuple):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        else:
            raise SettingsError(
                f"arm {name!r} returns {type(item).__name__}, which mx.eval passes over: return its arrays, "
                "in lists, tuples or dictionaries"
            )
    if not found:
        raise SettingsError(f"arm {name!r} returns no array, so that nothing of its work would be forced")
    return found
