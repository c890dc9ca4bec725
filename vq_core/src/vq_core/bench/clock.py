"""A clock for comparing ways to do the same thing.

Arms take turns in one process, inputs rotate through a pool, and the work of an inner loop of calls is forced by
one ``mx.eval`` after it.  The first arm runs twice under two names: the ratio of these two is the noise floor, and
it stands beside every result.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import attrs
import mlx.core as mx

POOL = 10
"""Inputs that an arm rotates through."""


@attrs.frozen
class Timing:
    """Seconds a call of one arm.

    Attributes:
        median, low, high: Over the rounds.
        rounds: Number of rounds.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """From one figure a round."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@attrs.frozen
class Comparison:
    """Arms measured together.

    Attributes:
        arms: By name.
        base: Name of the arm that ratios refer to.
        noise: The base arm against itself: median over median, minus 1, absolute.
    """

    arms: dict[str, Timing]
    base: str
    noise: float

    def ratio(self, name: str) -> float:
        """Time of an arm over the base's time, medians."""
        return self.arms[name].median / self.arms[self.base].median

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "base": self.base,
            "noise_floor": round(self.noise, 4),
            "arms": {
                name: attrs.asdict(t)
                | {"ratio_to_base": round(self.ratio(name), 4), "inside_noise": abs(self.ratio(name) - 1) <= self.noise}
                for name, t in self.arms.items()
            },
        }


def compare(
    arms: dict[str, Callable[[Any], Any]], inputs: Sequence[Any], *, rounds: int = 15, inner: int = 1, warm: int = 2
) -> Comparison:
    """Measure arms in turn; the first one is the base.

    Args:
        arms: Each takes one input and returns arrays, unevaluated.
        inputs: The pool.
        rounds: Turns.
        inner: Calls in a row of one arm, forced together.
        warm: Rounds before the clock starts.
    """
    base = next(iter(arms))
    again = f"{base} again"
    runs: dict[str, Callable[[Any], Any]] = {**arms, again: arms[base]}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    turn = 0
    for number in range(warm + rounds):
        # The order rotates, so that no arm always follows the same one.
        names = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
        for name in names:
            turn += 1
            picked = [inputs[(turn * inner + i) % len(inputs)] for i in range(inner)]
            begin = time.perf_counter()
            done = [runs[name](item) for item in picked]
            mx.eval(done)
            took = (time.perf_counter() - begin) / inner
            if number >= warm:
                seconds[name].append(took)
    timings = {name: Timing.of(values) for name, values in seconds.items()}
    noise = abs(timings.pop(again).median / timings[base].median - 1)
    return Comparison(timings, base, noise)


def environment() -> dict[str, Any]:
    """Device, versions, load and command, for the record of a measurement."""
    names = ("vq-core", "vq-kivi", "mlx", "mlx-lm", "numpy")
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join([os.path.basename(sys.executable), *sys.orig_argv[1:]]),
    }
