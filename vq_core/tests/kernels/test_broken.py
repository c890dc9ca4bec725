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
    outputs_of,
    value_program,
)
from .probe import BARRIER, FIRST_LINE, probe, result

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
    build(
        {
            **{program: [("float32", 256) if program.name == "hadamard" else ("float32",)] for program in programs},
            **{probe(lines): [()] for lines, *_ in PROBES.values()},
            **{probe(lines): [()] for lines in LEGAL.values()},
        }
    )


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


PROBES: dict[str, tuple[str, str, tuple[str, ...], int | None]] = {
    "partner read without a barrier": (
        "VQ_SHARED(float, s, 64);\ns[t] = a;\na += s[t ^ 1u];",
        "(race|shared_unwritten)",
        ("threadgroup memory s[", "barrier"),
        2,
    ),
    "a shuffle taken for a fence": (
        "VQ_SHARED(float, s, 64);\ns[t] = a;\na = simd_shuffle_xor(a, 1u);\na += s[t ^ 1u];",
        "race",
        ("which lane", "has written at line 4", "a shuffle is no fence"),
        3,
    ),
    "written again while others may still read": (
        f"VQ_SHARED(float, s, 64);\ns[t] = a;\n{BARRIER}\na += s[(t + 1u) & 63u];\ns[t] = a;",
        "race",
        ("has read at line 6", FENCE),
        4,
    ),
    "written while one of many readers is not behind a barrier": (
        f"VQ_SHARED(float, s, 64);\ns[t] = a;\n{BARRIER}\nif (lane != 5u) a += s[40];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (lane == 5u) a += s[40];\nif (t == 40u) s[40] = a;",
        "race",
        ("s[40]", "has read at line"),
        6,
    ),
    "all lanes write one cell": ("VQ_SHARED(float, s, 64);\ns[0] = 1.0f;\n" + BARRIER, "race", ("s[0]",), 1),
    "a barrier that not all reach": (
        f"if (t < 32u) {{ {BARRIER} }}",
        "divergence",
        ("barrier in divergent flow: ", "32 lane(s) never arrive", "All threads of the threadgroup must reach each"),
        0,
    ),
    "a barrier in two branches": (
        f"if (t < 32u) {BARRIER}\nelse {BARRIER}",
        "divergence",
        ("barrier in divergent flow: ", "calls threadgroup_barrier while lane", "move it out of the condition"),
        None,
    ),
    "a SIMD group that returns before a barrier": (
        f"if (simdgroup_index_in_threadgroup == 1u) return;\n{BARRIER}",
        "divergence",
        ("barrier in divergent flow: ", "has returned"),
        1,
    ),
    "a shuffle in a condition of a loop": (
        "for (uint k = 0; k < 4u; ++k) {\n  if ((lane ^ k) & 1u) a += simd_shuffle_xor(a, 1u);\n}",
        "divergence",
        ("in another round of a loop", "reach each shuffle in each round"),
        1,
    ),
    "shuffles of different rounds, under VQ_FOR": (
        "VQ_FOR(k, 0, 4) {\n  if ((lane ^ k) & 1u) continue;\n  a += simd_shuffle_xor(a, 1u);\n}",
        "divergence",
        ("in another round of a loop",),
        2,
    ),
    "barriers of different rounds": (
        f"for (uint k = 0; k < 2u; ++k) {{\n  if ((t / 32u ^ k) & 1u) continue;\n  {BARRIER}\n}}",
        "divergence",
        ("barrier in divergent flow: ", "in another round of a loop", "reach each barrier in each round"),
        2,
    ),
    "loops of different length": (
        "for (uint k = 0; k <= (lane & 1u); ++k) a += simd_shuffle_xor(a, 1u);",
        "divergence",
        ("16 lane(s) never arrive",),
        0,
    ),
    "two shuffles on one line": (
        "a = lane < 4u ? simd_shuffle_xor(a, 1u) : simd_shuffle_xor(a, 1u);",
        "divergence",
        ("calls simd_shuffle_xor while lane",),
        0,
    ),
    "a mask that differs": (
        "a = simd_shuffle_xor(a, lane < 16u ? 1u : 2u);",
        "not_uniform",
        ("is the same for all lanes", "use simd_shuffle"),
        0,
    ),
    "a lane that is none": ("a = simd_shuffle(a, lane + 1u);", "no_such_lane", ("for lane, mask or delta 32",), 0),
    "an index below zero": (
        "a = x[i - 1u];",
        "read_outside",
        ("x[4294967295], which has 128 elements", "an unsigned index that went below zero?"),
        0,
    ),
    "a misaligned view of threadgroup memory": (
        f"VQ_SHARED(float, s, 68);\ns[t] = a;\n{BARRIER}\nconst float4 f = vq_view<float4>(s + 1u)[0];\na += f.x;",
        "misaligned",
        ("through a vq_view at an index that is not a multiple", "vq_view<float4>(p + 4u * i)[0]"),
        3,
    ),
    "a misaligned view of an input": (
        "const float2 f = vq_view<float2>(x + 1u)[0];\na += f.x;",
        "misaligned",
        ("touches input x through a vq_view",),
        0,
    ),
    "a private array out of bounds": (
        "VQ_LOCAL(float, p, 4);\nfor (uint k = 0; k < 5u; ++k) p[k] = a;",
        "local_outside",
        ("private array or table p[4], which has 4 elements", "correct the index"),
        1,
    ),
    "more dimensions than there are": ("a += float(x_shape[1]);", "shape_outside", ("x_shape[1]", "1 dimension(s)"), 0),
    "another thread's output": (
        "y[i] = a;\nif (t == 63u) a = y[i - 63u];",
        "(read_others|stale_output)",
        ("reads output y[",),
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROBES)
def test_a_mistake_is_caught_on_every_seed(what: str) -> None:
    lines, kind, message, line = PROBES[what]
    for seed in SEEDS:
        with pytest.raises(SimulatorError) as caught:
            result(lines, seed=seed)
        assert re.fullmatch(kind, caught.value.kind), caught.value
        for part in message:
            assert part in str(caught.value)
        if line is not None:
            assert caught.value.line == FIRST_LINE + line


def test_one_helper_called_in_two_branches() -> None:
    header = "VQ_FN float both(float a) {\n  return a + simd_shuffle_xor(a, 1u);\n}"
    for seed in SEEDS:
        with pytest.raises(SimulatorError, match="through another call of a helper") as caught:
            result("if (lane < 4u) a = both(a);\nelse a = both(a);", header, seed=seed)
        assert "kernel 'probe', header line 2: " in str(caught.value)
        assert result("a = both(both(a)) + both(a);\nfor (uint k = 0; k < 2u; ++k) a = both(a);", header).size


def test_rounds_count_where_the_condition_calls_a_helper() -> None:
    header = "VQ_FN uint most(uint n) { return simd_max(n); }"
    loop = "for (uint k = 0; k < most(4u); ++k) {{ if ({}) a += simd_shuffle_xor(a, 1u); }}"
    for seed in SEEDS:
        with pytest.raises(SimulatorError, match="in divergent flow"):
            result(loop.format("(lane ^ k) & 1u"), header, seed=seed)
        assert result(loop.format("k & 1u"), header, seed=seed).size


def test_a_table_of_constants() -> None:
    header = "VQ_CONSTANT(float, LEVELS, 4) = {-1.5f, -0.5f, 0.5f, 1.5f};"
    want = np.take(np.array([-1.5, -0.5, 0.5, 1.5], np.float32), np.arange(128) % 4)
    assert np.array_equal(result("a = LEVELS[lane & 3u];", header), want)
    for seed in SEEDS:
        with pytest.raises(SimulatorError, match=r"table LEVELS\[\d+\], which has 4 elements"):
            result("a = LEVELS[lane & 7u];", header, seed=seed)


LEGAL = {
    "whole SIMD groups return, no barrier after": (
        "if (simdgroup_index_in_threadgroup == 1u) { y[i] = a; return; }\na += simd_shuffle_xor(a, 1u);"
    ),
    "a barrier of the SIMD group": (
        "VQ_SHARED(float, s, 64);\ns[t] = a;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\na += s[t ^ 1u];"
    ),
    "loops in loops, left by all together": (
        "VQ_FOR(k, 0, 4) {\n  for (uint j = 0; ; ++j) { if (j == 2u) break; a += simd_shuffle_xor(a, 1u); }\n"
        "  uint n = 0;\n  do { ++n; a = simd_max(a); } while (n < k);\n  while (n) { --n; a = simd_min(a); }\n}"
    ),
    "a view that is aligned": (
        f"VQ_SHARED(float, s, 64);\ns[t] = a;\n{BARRIER}\n"
        "const float4 f = vq_view<float4>(s + 4u * (t / 4u))[0];\na += f.x;"
    ),
    "a cell that its readers have left": (
        f"VQ_SHARED(float, s, 64);\ns[t] = a;\n{BARRIER}\na += s[(t + 1u) & 63u];\n{BARRIER}\ns[t] = a;\na = s[t];"
    ),
    "an output read by its writer": "y[i] = a;\na = y[i] + 1.0f;\ny[i] *= 2.0f;",
    "different starts, as many rounds": f"for (uint k = t / 32u; k < t / 32u + 3u; ++k) {BARRIER}",
}  # fmt: skip


@pytest.mark.parametrize("what", LEGAL)
def test_what_is_allowed_runs_alike_in_every_order(what: str) -> None:
    assert len({result(LEGAL[what], seed=seed).tobytes() for seed in SEEDS}) == 1


@pytest.mark.parametrize(
    ("threadgroups", "threads", "message"),
    [
        ((1, 1, 1), (64, 1, 1), "grid counts threads, not threadgroups or groups of elements"),
        ((0, 1, 1), (64, 1, 1), r"output y\[0\] never written, nor 127 more of its 128 elements"),
        ((128, 1, 1), (1, 1, 1), "needs a multiple of 32, at most 1024: .* grid counts threads"),
        ((1, 1, 1), (2048, 1, 1), "has 2048 threads; it needs a multiple of 32, at most 1024"),
    ],
)
def test_a_grid_in_the_wrong_unit(
    threadgroups: tuple[int, int, int], threads: tuple[int, int, int], message: str
) -> None:
    for seed in SEEDS:
        with pytest.raises(SimulatorError, match=message):
            result("", threadgroups=threadgroups, threads=threads, seed=seed)


def test_one_thread_a_group_where_a_simd_group_is_needed() -> None:
    """The value kernel launched with as many threads as there are groups."""
    from .demonstration import launch

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
