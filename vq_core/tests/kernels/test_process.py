"""A kernel that crashes or never ends: an error, and the next kernel runs as ever."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vq_core.kernels.simulator import SimulatorError, process

from .probe import X, probe, result

DEADLY = {
    "a private pointer gone wild": (
        "volatile float p[4];\nfor (uint k = 0; k < 400000000u; ++k) p[k * 997u] = a;",
        "SIG(SEGV|BUS)",
        "VQ_LOCAL",
    ),
    "endless recursion": ("a = deeper(a);", "SIG(SEGV|BUS)", "recurs"),
}


@pytest.fixture(autouse=True)
def _the_next_one_runs() -> object:
    yield
    assert np.array_equal(result("a += 1.0f;"), X + np.float32(1))


@pytest.mark.parametrize("what", DEADLY)
def test_a_crash_is_an_error(what: str) -> None:
    lines, reason, advice = DEADLY[what]
    header = (
        "VQ_FN float deeper(float a) {\n  volatile float b = a;\n  return b > -1e30f ? deeper(b + 1.0f) + b : 0.0f;\n}"
    )
    with pytest.raises(SimulatorError, match=rf"kernel 'probe': crashed \((?:{reason})\) in ") as caught:
        result(lines, header)
    assert caught.value.kind == "crash"
    assert advice in str(caught.value)


def test_a_stack_that_is_used_up_is_an_error() -> None:
    header = """\
VQ_FN float deeper(float a, uint n) {
  volatile float here[8];
  here[n & 7u] = a;
  return n ? deeper(a + 1.0f, n - 1u) + here[n & 7u] : a;
}"""
    for seed in range(3):
        with pytest.raises(
            SimulatorError, match=r"lane 40 of threadgroup .* has used up its stack of 32 KiB"
        ) as caught:
            result("if (t == 40u) a = deeper(a, 900u);", header, seed=seed)
        assert caught.value.kind == "stack_full"


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "AMD64"), reason="only x86 traps a division by zero")
def test_a_division_by_zero_is_an_error() -> None:
    place = r"in lane 0 of threadgroup \(0, 0, 0\), after the access or collective at line 2"
    with pytest.raises(
        SimulatorError, match=rf"crashed \(SIGFPE\) {place}\. Most likely an integer is divided by zero"
    ):
        result("volatile uint zero = 0;\na += float(t / zero);")


@pytest.mark.parametrize("lines", ["while (a == a) a = -a;", "for (uint k = 3; k >= 0u; --k) a = simd_max(a);"])
def test_a_kernel_that_never_ends_is_stopped(lines: str) -> None:
    with pytest.raises(
        SimulatorError, match=r"did not end within 1 s and was stopped, in lane \d+ of threadgroup"
    ) as caught:
        result(lines, time_limit=1)
    assert caught.value.kind == "endless"
    assert "a loop whose condition never becomes false" in str(caught.value)


def test_a_child_that_is_gone_is_replaced() -> None:
    result("a += 1.0f;")
    child = process.worker()._process
    assert child is not None
    child.kill()
    child.wait()
    assert np.array_equal(result("a += 1.0f;"), X + np.float32(1))


def test_a_library_that_is_damaged_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VQ_CACHE", str(tmp_path))
    from vq_core.kernels.simulator import build, library

    program = probe("a += 77.0f;")
    build({program: [()]})
    kept, _ = library.entry(program, (), "off")
    kept.write_bytes(b"not a library")
    with pytest.raises(SimulatorError, match=r"cannot be loaded: .* Remove .*\.so and try again"):
        result("a += 77.0f;")


def test_threads_take_turns() -> None:
    def one(n: int) -> bool:
        x = np.full(128, n, np.float32)
        return bool((result("a += 1.0f;", x=x, seed=n) == n + 1).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(64)))


def test_a_forked_child_has_a_worker_of_its_own() -> None:
    result("a += 1.0f;")
    parent = process.worker()
    owner = parent._owner
    try:
        parent._owner = -1  # what a forked process sees: another process's worker
        assert process.worker() is not parent
    finally:
        parent._owner = owner
        parent.close()


def test_arrays_that_do_not_fit_are_an_error_and_nothing_else() -> None:
    with pytest.raises(SimulatorError, match=r"do not fit into the folder for temporary files: .* set TMPDIR"):
        process.worker().reserve(1 << 62)


def test_large_arrays_grow_the_segment() -> None:
    x = np.arange(64 * 1024 * 8, dtype=np.float32)
    from vq_core.kernels.simulator import run

    how = {"threadgroups": (len(x) // 64, 1, 1), "threads": (64, 1, 1)}
    got = run(probe("a += 1.0f;"), {}, {"x": x}, {"y": ((len(x),), "float32")}, **how)["y"]
    assert np.array_equal(got, x + 1)
