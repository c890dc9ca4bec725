"""Shuffles, votes, reductions, grid names and shapes do what Metal and CUDA do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vq_core.kernels.simulator import Program, build, run

from .probe import X, probe, result

GROUPS = X.reshape(-1, 32)


def by_lane(index: Any) -> Any:
    return np.take_along_axis(GROUPS, np.broadcast_to(index, GROUPS.shape), axis=1).reshape(-1)


L = np.arange(32)
EXCHANGES = {
    "a = simd_shuffle(a, (lane * 7u) & 31u);": by_lane(L * 7 & 31),
    "a = simd_shuffle_xor(a, 5u);": by_lane(L ^ 5),
    "a = simd_shuffle_up(a, 3u);": by_lane(np.where(L < 3, L, L - 3)),
    "a = simd_shuffle_down(a, 3u);": by_lane(np.where(L > 28, L, L + 3)),
    "a = simd_broadcast(a, 9u);": by_lane(np.full(32, 9)),
    "a = simd_max(a);": np.repeat(GROUPS.max(1), 32),
    "a = simd_min(a);": np.repeat(GROUPS.min(1), 32),
    "a = float(simd_sum(lane));": np.full(128, 496),
    "a = float(simd_sum(int(lane) - 31));": np.full(128, -496),
    "a = float(simd_prefix_inclusive_sum(lane));": np.cumsum(GROUPS * 0 + L, 1).reshape(-1),
    "a = float(simd_prefix_exclusive_sum(lane));": (np.cumsum(GROUPS * 0 + L, 1) - L).reshape(-1),
    "a = float(simd_ballot(lane % 3u == 0u) >> 8);": np.full(128, sum(1 << n for n in range(0, 32, 3)) >> 8),
    "a = simd_any(lane == 31u) ? 1.0f : 0.0f;": np.full(128, 1),
    "a = simd_any(lane == 32u) ? 1.0f : 0.0f;": np.full(128, 0),
    "a = simd_all(lane < 32u) ? 1.0f : 0.0f;": np.full(128, 1),
    "a = simd_all(lane < 31u) ? 1.0f : 0.0f;": np.full(128, 0),
    "a = float(simd_shuffle_xor(half(a), 1u));": by_lane(L ^ 1).astype(np.float16),
    "a = float(simd_sum(half(1.0f)));": np.full(128, 32),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    build({probe(lines): [()] for lines in EXCHANGES})


@pytest.mark.parametrize("lines", EXCHANGES)
def test_exchange(lines: str) -> None:
    for seed in range(3):
        assert np.array_equal(result(lines, seed=seed), EXCHANGES[lines].astype(np.float32))


def test_a_sum_of_floats_promises_no_order() -> None:
    assert len({result("a = simd_sum(a);", seed=seed).tobytes() for seed in range(8)}) > 1


GRID_BODY = """\
const uint3 p = thread_position_in_grid, q = threads_per_grid;
const uint i = p.x + q.x * (p.y + q.y * p.z);
const uint3 t = thread_position_in_threadgroup, n = threads_per_threadgroup, g = threadgroup_position_in_grid;
const uint3 m = threadgroups_per_grid;
y[i] = thread_index_in_threadgroup;
const bool right = p.x == g.x * n.x + t.x && p.y == g.y * n.y + t.y && p.z == g.z * n.z + t.z
  && thread_index_in_threadgroup == t.x + n.x * (t.y + n.y * t.z)
  && thread_index_in_simdgroup == thread_index_in_threadgroup % threads_per_simdgroup
  && simdgroup_index_in_threadgroup == thread_index_in_threadgroup / 32u
  && simdgroups_per_threadgroup == 3u && q.x == m.x * n.x && q.y == m.y * n.y && q.z == m.z * n.z;
ok[i] = right;
"""


def test_grid_names() -> None:
    program = Program("grid", GRID_BODY, {}, {"y": "uint32", "ok": "bool"})
    size = 2 * 3 * 4 * 96
    outputs = {"y": ((size,), "uint32"), "ok": ((size,), "bool")}
    for seed in range(3):
        got = run(program, {}, {}, outputs, threadgroups=(2, 3, 4), threads=(8, 4, 3), seed=seed)
        assert got["ok"].all()
        assert np.bincount(got["y"]).tolist() == [24] * 96


def test_shapes_of_inputs_small_empty_and_gapped() -> None:
    body = """\
const uint i = thread_position_in_grid.x;
if (i < uint(x_shape[0])) y[i] = float(x[i * uint(x_shape[1])]) + float(e_ndim * 10 + e_shape[1]);
"""
    program = Program("shapes", body, {"x": "float32", "e": "int8"}, {"y": "float32"})
    for x in (np.ones((1, 1), np.float32), np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]):
        got = run(
            program,
            {},
            {"x": x, "e": np.zeros((0, 3), np.int8)},
            {"y": ((len(x),), "float32")},
            threadgroups=(1, 1, 1),
            threads=(32, 1, 1),
        )
        assert got["y"].tolist() == [row[0] + 23 for row in x.tolist()]
    empty = run(
        program,
        {},
        {"x": np.zeros((0, 6), np.float32), "e": np.zeros((0, 3), np.int8)},
        {"y": ((0,), "float32")},
        threadgroups=(0, 1, 1),
        threads=(32, 1, 1),
    )
    assert empty["y"].shape == (0,)


def test_compile_time_parameters() -> None:
    body = "const uint i = thread_position_in_grid.x;\ny[i] = DOUBLE ? T(2 * N) : T(N);"
    program = Program("constants", body, {}, {"y": "T"}, {"T": "dtype", "N": "int", "DOUBLE": "bool"})
    grid = {"threadgroups": (1, 1, 1), "threads": (32, 1, 1)}
    for dtype, n, double, want in (("float32", -3, True, -6), ("uint8", 7, False, 7)):
        arguments = {"T": dtype, "N": n, "DOUBLE": double}
        got = run(program, arguments, {}, {"y": ((32,), dtype)}, **grid)["y"]
        assert got.dtype == dtype
        assert (got == want).all()


def test_threadgroups_run_in_an_order_of_the_seed() -> None:
    """Every threadgroup runs once in each order, and shared memory is its own."""
    body = """\
VQ_SHARED(uint, s, 32);
const uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
s[t] = g;
threadgroup_barrier(mem_flags::mem_threadgroup);
y[g * 32u + t] = s[31u - t];
"""
    program = Program("order", body, {}, {"y": "uint32"})
    for groups in (1, 2, 7, 12, 64):
        for seed in range(4):
            outputs = {"y": ((groups * 32,), "uint32")}
            got = run(program, {}, {}, outputs, threadgroups=(groups, 1, 1), threads=(32, 1, 1), seed=seed)
            assert np.array_equal(got["y"], np.repeat(np.arange(groups), 32))
