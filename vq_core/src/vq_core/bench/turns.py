"""Arms that take seconds a run: turns in one process without a pool of inputs or a queue of calls.

What :func:`vq_core.bench.clock.compare` does for calls of microseconds, for prefills and whole generations.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from vq_core.bench.busy import Machine, look
from vq_core.bench.clock import Comparison, Timing, noise, orders
from vq_core.errors import SettingsError


def take_turns(
    arms: Mapping[str, Callable[[], Mapping[str, float]]],
    *,
    rounds: int,
    warm: int = 1,
    machine: Callable[[], Machine] = look,
) -> dict[str, Comparison]:
    """Run arms in turn, each under two names in every round, and compare what they report.

    Args:
        arms: Each does its work and returns seconds by the name of what took them, the same names for all.
        rounds: Rounds, each in another order.
        warm: Runs of each arm before the first round.
        machine: For tests.

    Returns:
        A comparison for each thing that the arms report; the first arm is the base.

    Raises:
        SettingsError: no arms or rounds.
    """
    if not arms or rounds < 1 or warm < 0:
        raise SettingsError(f"{len(arms)} arms, rounds={rounds}, warm={warm}: 1 or more arms and rounds are needed")
    names = list(arms)
    for name in names * warm:
        arms[name]()
    seen = [machine()]
    halves: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    sets = orders(2 * len(names))
    for number in range(rounds):
        for place in sets[number % len(sets)]:
            gc.collect()
            for what, seconds in arms[names[place // 2]]().items():
                found = halves.setdefault(what, {name: ([], []) for name in names})
                found[names[place // 2]][place % 2].append(seconds)
    seen.append(machine())
    busy = tuple(dict.fromkeys(reason for one in seen for reason in one.reasons))
    return {
        what: Comparison(
            {name: Timing.of(one + other) for name, (one, other) in found.items()},
            names[0], {name: noise(*pair) for name, pair in found.items()}, busy, machine=tuple(seen),
        )
        for what, found in halves.items()
    }  # fmt: skip


def merged(facts: Mapping[str, Any], found: Comparison) -> dict[str, Any]:
    """A comparison for JSON with further facts of its arms."""
    made = found.as_dict()
    return made | {"arms": {name: arm | facts.get(name, {}) for name, arm in made["arms"].items()}}
