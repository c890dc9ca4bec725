"""A small kernel to put a few lines into: ``a`` starts as the thread's element of x, and is written to y at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from vq_core.kernels.simulator import Program, run

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FIRST_LINE = 3  # of the lines put in
_HEAD = """\
const uint lane = thread_index_in_simdgroup, t = thread_index_in_threadgroup, i = thread_position_in_grid.x;
float a = x[i];
"""
_TAIL = "\ny[i] = a;"

X = np.random.default_rng(0).standard_normal(128).astype(np.float32)


def probe(lines: str, header: str = "") -> Program:
    return Program("probe", _HEAD + lines + _TAIL, {"x": "float32"}, {"y": "float32"}, {}, header)


def result(lines: str, header: str = "", x: Any = X, **options: Any) -> np.ndarray[Any, Any]:
    """y, of two threadgroups of 64 threads."""
    grid = {"threadgroups": (2, 1, 1), "threads": (64, 1, 1)}
    return run(probe(lines, header), {}, {"x": x}, {"y": ((128,), "float32")}, **{**grid, **options})["y"]
