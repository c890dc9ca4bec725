"""Single mistakes in a small kernel, each caught on every seed with the line and the way out, and what is allowed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from vq_core.kernels.simulator import SimulatorError, build

from .probe import BARRIER, FIRST_LINE, probe, result

SEEDS = range(4)
FENCE = "threadgroup_barrier(mem_flags::mem_threadgroup) between them"

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


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    """One unit for all: faster than one each."""
    build({probe(lines): [()] for lines in (*(lines for lines, *_ in PROBES.values()), *LEGAL.values())})


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
