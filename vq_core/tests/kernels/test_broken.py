"""Kernels with one deliberate mistake each: every one is caught on every seed, and told what to do."""

from __future__ import annotations

import re
from typing import Any

import attrs
import numpy as np
import pytest

from vq_core.kernels.simulator import Program, SimulatorError, build, run

from .demonstration import (
    HADAMARD,
    KEY,
    RAW_MULTIPLY_ADD,
    VALUE,
    Array,
    data,
    differences,
    hadamard_program,
    key_program,
    launch,
    outputs_of,
    value_program,
)
from .probe import BARRIER

SEEDS = range(4)
FENCE = "threadgroup_barrier(mem_flags::mem_threadgroup) between them"
KEYS = data(1, (2, 64, 80), "float32", "ties")
ROWS = data(2, (4, 256), "float32", "normal")
RAGGED = data(3, (1, 33, 33), "float32", "normal")


def edited(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


@attrs.frozen
class Broken:
    """A mistake in one of the demonstration kernels: kind and line of its error, and what the message holds."""

    what: str
    program: Program
    x: Array
    kind: str
    part: str  # of the line that the error names
    message: tuple[str, ...]

    def __str__(self) -> str:
        return self.what


BROKEN = [
    Broken(
        "no barrier after the load",
        hadamard_program(edited(HADAMARD, BARRIER, "")),
        ROWS,
        "(race|shared_unwritten)",
        "const float a = buf[i]|buf\\[i",
        ("threadgroup memory buf[",),
    ),
    Broken(
        "no barrier between the stages",
        hadamard_program(edited(HADAMARD, "  " + BARRIER, "")),
        ROWS,
        "race",
        "buf\\[",
        ("races: touches threadgroup memory buf[", "No barrier lies between", FENCE),
    ),
    Broken(
        "a barrier that fences no memory",
        hadamard_program(edited(HADAMARD, BARRIER, "threadgroup_barrier(mem_flags::mem_none);")),
        ROWS,
        "race",
        "buf\\[",
        ("lacks mem_threadgroup", FENCE),
    ),
    Broken(
        "a barrier of the SIMD group where the threadgroup's is needed",
        hadamard_program(edited(HADAMARD, "  " + BARRIER, "  simdgroup_barrier(mem_flags::mem_threadgroup);")),
        ROWS,
        "race",
        "buf\\[",
        ("races: ", FENCE),
    ),
    Broken(
        "a barrier in a condition",
        hadamard_program(edited(HADAMARD, "  " + BARRIER, "  if (t < N / 4) " + BARRIER)),
        ROWS,
        "(race|divergence)",
        "buf\\[|threadgroup_barrier",
        ("in a condition|barrier in divergent flow",),
    ),
    Broken(
        "half of the threadgroup memory never written",
        hadamard_program(edited(HADAMARD, "buf[t + N / 2] = float(x[row * N + t + N / 2]);", "")),
        ROWS,
        "shared_unwritten",
        "buf\\[i",
        ("reads threadgroup memory buf[", "which no thread of this threadgroup has written", "starts undefined"),
    ),
    Broken(
        "an index beyond the threadgroup memory",
        hadamard_program(edited(HADAMARD, "const uint i = t / h", "const uint i = 2u + t / h")),
        ROWS,
        "(shared_outside|race)",
        "buf\\[i",
        ("buf[",),
    ),
    Broken(
        "too much threadgroup memory",
        hadamard_program("VQ_SHARED(float, big, 8192);\n" + HADAMARD),
        ROWS,
        "shared_size",
        "VQ_SHARED\\(float, buf",
        ("declares 33792 bytes of threadgroup memory", "32768 bytes are what every device has: declare less"),
    ),
    Broken(
        "lone lanes return before a shuffle",
        value_program(edited(VALUE, "const float v =", "if (u % NG * 32u + lane >= D) return;\nconst float v =")),
        KEYS,
        "divergence",
        "simd_shuffle_xor",
        (
            "in divergent flow",
            "waits at simd_shuffle_xor for ever, because 16 lane(s) never arrive",
            "has returned",
            "clamp indices instead of returning (min(i, total - 1u))",
        ),
    ),
    Broken(
        "one shuffle in two branches",
        value_program(
            edited(
                VALUE,
                "  lo = min(lo, simd_shuffle_xor(lo, o));",
                "  if (lane & 1u) lo = min(lo, simd_shuffle_xor(lo, o));\n"
                "  else lo = min(lo, simd_shuffle_xor(lo, o));",
            )
        ),
        KEYS,
        "divergence",
        "simd_shuffle_xor",
        ("in divergent flow", "calls simd_shuffle_xor while lane", "All 32 lanes of a SIMD group must reach"),
    ),
    Broken(
        "a write out of bounds",
        key_program(edited(KEY, "scale[i] = s;", "scale[i + 1u] = s;")),
        KEYS,
        "(write_outside|written_twice)",
        "scale\\[i \\+ 1u\\]",
        ("output scale[",),
    ),
    Broken(
        "no guard for the spare threads",
        key_program(edited(KEY, "if (i < total) {", "{")),
        RAGGED,
        "(write_outside|read_outside)",
        "words\\[|x\\[",
        ("Missing bound check", "if (i < total)"),
    ),
    Broken(
        "a read out of bounds",
        key_program(edited(KEY, "min(g * 32u + t, S - 1u)", "g * 32u + t")),
        RAGGED,
        "read_outside",
        "g \\* 32u \\+ t\\)",
        ("reads input x[", "which has 1089 elements", "Missing bound check: clamp the index"),
    ),
    Broken(
        "an output that is never written",
        key_program(edited(KEY, "zero[i] = lo;", "")),
        KEYS,
        "unwritten_output",
        "",
        ("output zero[0] never written, nor 319 more of its 320 elements", "Write every element, in every branch"),
    ),
    Broken(
        "an output taken for zeros",
        key_program(edited(KEY, "err[i] = worst;", "err[i] += worst;")),
        KEYS,
        "stale_output",
        "err\\[i\\] \\+= worst",
        ("reads output err[", "before this thread has written it", "not with zeros"),
    ),
    Broken(
        "two threads write one element",
        value_program(edited(VALUE, "if (lane == 0u)", "if (lane < 2u)")),
        KEYS,
        "written_twice",
        "scale\\[u\\] = s",
        ("writes output scale[", "of threadgroup", "has written", "guard the write (if (lane == 0u))"),
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    """One unit for all that compile with contraction off: faster than one each."""
    programs = [case.program for case in BROKEN]
    programs += [program for program, _, contract, _ in NUMERIC.values() if contract == "off"]
    build({program: [("float32", 256) if program.name == "hadamard" else ("float32",)] for program in programs})


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_kernel_is_caught_on_every_seed(case: Broken) -> None:
    dtype = "float32"
    for seed in SEEDS:
        with pytest.raises(SimulatorError) as caught:
            outputs_of(case.program, case.x, dtype, seed=seed)
        error = caught.value
        message = str(error)
        assert re.fullmatch(case.kind, error.kind), message
        assert error.kernel == case.program.name
        assert message.startswith(f"kernel {case.program.name!r}")
        assert f"seed {seed}" in message
        for part in case.message:
            assert any(choice in message for choice in part.split("|")), message
        if case.part:
            assert error.line is not None
            assert f"line {error.line}: " in message
            assert re.search(case.part, case.program.body.split("\n")[error.line - 1]), message


SHIFTED_KEYS = data(5, (1, 33, 64), "float32", "normal") + np.float32(7)
SHIFTED_VALUES = data(5, (1, 3, 80), "float32", "normal") + np.float32(7)
ZERO_PADDED_KEY = KEY.replace(
    "float(x[(h * S + min(g * 32u + t, S - 1u)) * D + c])",
    "(g * 32u + t < S ? float(x[(h * S + g * 32u + t) * D + c]) : 0.0f)",
)
ZERO_PADDED_VALUE = edited(
    VALUE, "float(x[u / NG * D + c])", "u % NG * 32u + lane < D ? float(x[u / NG * D + c]) : 0.0f"
)
SUMMED_VALUE = edited(
    edited(VALUE, "scale[u] = s;", "scale[u] = sum;"),
    "if (n < total) {",
    "const float sum = simd_sum(v);\nif (n < total) {",
)
# program, data, contraction, the output that differs
NUMERIC = {
    "round for rint": (key_program(edited(KEY, "rint(", "round(")), KEYS, "off", "words"),
    "zero padding in keys": (key_program(ZERO_PADDED_KEY), SHIFTED_KEYS, "off", "scale"),
    "zero padding in values": (value_program(ZERO_PADDED_VALUE), SHIFTED_VALUES, "off", "zero"),
    "a raw q * scale + zero": (
        key_program(KEY, RAW_MULTIPLY_ADD),
        data(1, (2, 64, 80), "float32", "normal"),
        "fast",
        "err",
    ),
    "another scale than the range": (value_program(SUMMED_VALUE), KEYS, "off", "scale"),
}  # fmt: skip


@pytest.mark.parametrize("what", NUMERIC)
def test_other_numbers_are_told_from_the_reference(what: str) -> None:
    program, x, contract, output = NUMERIC[what]
    for seed in SEEDS:
        found = differences(program, x, "float32", seed=seed, contract=contract)
        assert re.search(
            rf"{program.name}: {output} differs from the reference in \d+ of \d+ elements, first at", found
        )


def test_one_thread_a_group_where_a_simd_group_is_needed() -> None:
    """The value kernel launched with as many threads as there are groups."""
    how = launch(value_program(), KEYS, "float32")
    groups = 2 * 64 * 3
    for seed in SEEDS:
        with pytest.raises(SimulatorError, match=r"never written, nor .* grid counts threads") as caught:
            outputs: dict[str, Any] = how.outputs
            few = (groups // 128, 1, 1)
            run(
                value_program(),
                {"T": "float32"},
                {"x": KEYS},
                outputs,
                threadgroups=few,
                threads=(128, 1, 1),
                seed=seed,
            )
        assert caught.value.kind == "unwritten_output"
