"""The race detector against a model: random scripts of accesses and barriers, on every order the same verdict."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from vq_core.kernels.simulator import Program, SimulatorError, run

WIDTH, STEPS, CELLS = 96, 10, 4
NOTHING, READ, WRITE, SIMD_BARRIER, GROUP_BARRIER, EXECUTION_BARRIER = range(6)

# steps [STEPS]: what all do; acts [STEPS, WIDTH]: 0, or 1 + 2 * cell + (1 if it writes).
BODY = """\
VQ_SHARED(uint, s, CELLS);
const uint t = thread_index_in_threadgroup;
if (t < uint(CELLS)) s[t] = t;
threadgroup_barrier(mem_flags::mem_threadgroup);
uint seen = 0;
for (uint k = 0; k < uint(steps_shape[0]); ++k) {
  if (steps[k] == 3u) simdgroup_barrier(mem_flags::mem_threadgroup);
  if (steps[k] == 4u) threadgroup_barrier(mem_flags::mem_threadgroup);
  if (steps[k] == 5u) threadgroup_barrier(mem_flags::mem_none);
  const uint act = acts[k * 96u + t];
  if (act & 1u) seen += s[act / 2u];
  else if (act) s[act / 2u - 1u] = t;
}
y[t] = seen;
"""
PROGRAM = Program("script", BODY, {"steps": "uint32", "acts": "uint32"}, {"y": "uint32"}, {"CELLS": "int"})


def script(rng: np.random.Generator) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    chance = rng.dirichlet([2, 1, 2, 0.5])
    steps = rng.choice([NOTHING, SIMD_BARRIER, GROUP_BARRIER, EXECUTION_BARRIER], STEPS, p=chance).astype(np.uint32)
    acts = np.zeros((STEPS, WIDTH), np.uint32)
    for _ in range(rng.integers(1, 7)):
        cell, writes = rng.integers(CELLS), rng.random() < 0.4
        lanes = rng.integers(0, WIDTH, 1 if writes else rng.integers(1, 6))
        acts[rng.integers(STEPS), lanes] = 2 * cell + (2 if writes else 1)
    return steps, acts


def races(steps: np.ndarray[Any, Any], acts: np.ndarray[Any, Any]) -> bool:
    """Two accesses to one cell by two threads, one of them a write, with no barrier between that orders them."""
    events = [(k, t, (int(acts[k, t]) - 1) // 2, acts[k, t] % 2 == 0) for k, t in np.argwhere(acts)]
    for (k, t, cell, writes), (m, u, other, overwrites) in combinations(sorted(events), 2):
        if cell != other or t == u or not (writes or overwrites):
            continue
        between = steps[k + 1 : m + 1]  # a step's barrier comes before its access
        if not (GROUP_BARRIER in between or (t // 32 == u // 32 and SIMD_BARRIER in between)):
            return True
    return False


def test_the_verdict_is_the_model_s_on_every_order() -> None:
    rng = np.random.default_rng(9)
    verdicts = []
    for _ in range(300):
        steps, acts = script(rng)
        expected = races(steps, acts)
        verdicts.append(expected)
        for seed in range(3):
            kind = ""
            try:
                inputs, outputs = {"steps": steps, "acts": acts}, {"y": ((WIDTH,), "uint32")}
                how: dict[str, Any] = {"threadgroups": (1, 1, 1), "threads": (WIDTH, 1, 1), "seed": seed}
                run(PROGRAM, {"CELLS": CELLS}, inputs, outputs, **how)
            except SimulatorError as error:
                kind = error.kind
            assert kind == ("race" if expected else ""), (steps, np.argwhere(acts).tolist(), seed)
    assert 60 < sum(verdicts) < 240  # the scripts hold both
