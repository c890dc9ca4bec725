"""Compilers, the cache, and what a body is told when it does not compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vq_core import KernelError, VQError
from vq_core.kernels.simulator import Program, SimulatorError, build, compiler, library, run

from .probe import FIRST_LINE, X, probe, result

ZIG = f"{sys.executable} -m ziglang c++"
GRID = {"threadgroups": (1, 1, 1), "threads": (32, 1, 1)}

# lines, header -> (line that is named, what the message holds)
MISTAKES = {
    "a name that is none": ("a += 1.0f;\nz[0] = a;", "", 1, ("'z'",)),
    "a write to an input": ("x[0] = a;", "", 0, ("inputs are read-only: write to an output",)),
    "a write to a half that was read": (
        "VQ_GLOBAL(half) h = vq_view<half>(x);\nh[0] = half(a);",
        "",
        1,
        ("inputs are read-only: write to an output",),
    ),
    "a helper that uses a grid name": (
        "a += mine();",
        "VQ_FN float mine() {\n  return float(thread_index_in_simdgroup);\n}",
        2,
        ("header line 2", "pass the value to the helper"),
    ),
    "threadgroup memory in a helper": (
        "a += mine();",
        "VQ_FN float mine() {\n  VQ_SHARED(float, s, 4);\n  return 0.0f;\n}",
        2,
        ("header line 2", "threadgroup memory is declared in the body: pass it to the helper as VQ_SHARED_PTR(T)"),
    ),
    "a double literal": ("a = a * 0.5;", "", 0, ("a literal without f is a double here: write 0.5f",)),
    "auto for a threadgroup element": (
        "VQ_SHARED(float, s, 64);\ns[t] = a;\nauto b = s[t];\na += b;",
        "",
        3,
        ("name the type when reading an element", "const float a = buffer[i];"),
    ),
    "a pointer read by a star": ("a += *x;", "", 0, ("write p[0], never *p",)),
    "an index that is a float": ("a += x[a];", "", 0, ("an index is an int or a uint: uint(x)",)),
    "a half made silently": ("half h = a;", "", 0, ("narrow explicitly: half(x), bfloat(x), T(x)",)),
    "Metal's word for threadgroup memory": ("threadgroup float s[64];", "", 0, ("VQ_SHARED(T, name, n)",)),
    "two types for min": ("a = min(a, 1);", "", 0, ("give both arguments one type",)),
    "a shuffle of an element": (
        "VQ_SHARED(float, s, 64);\ns[t] = a;\na = simd_shuffle_xor(s[t], 1u);",
        "",
        2,
        ("name the type in a variable first",),
    ),
    "a shuffle of a vector": (
        "float2 v = vq_float2(a, a);\nv = simd_shuffle_xor(v, 1u);",
        "",
        1,
        ("send a vector by its members",),
    ),
    "a narrowing view of an output": (
        "vq_view<half>(y)[0] = half(a);",
        "",
        0,
        ("vq_view of an output widens",),
    ),
    "a private array too large for any register file": (
        "float big[8192];\nfor (uint k = 0; k < 8192u; ++k) big[k] = a * float(k);\na = big[uint(fabs(a))];",
        "",
        None,
        ("private arrays live in registers on a GPU: make them small",),
    ),
}  # fmt: skip


def refused(lines: str, header: str, line: int | None, parts: tuple[str, ...]) -> None:
    with pytest.raises(SimulatorError) as caught:
        result(lines, header)
    message = str(caught.value)
    assert caught.value.kind == "compile", message
    assert message.startswith("'probe' does not compile.\n")
    for part in parts:
        assert part in message, message
    if line is not None:
        assert caught.value.line == (line if header else FIRST_LINE + line), message
        assert f"line {caught.value.line}: " in message


@pytest.mark.parametrize("what", MISTAKES)
def test_a_body_that_does_not_compile_names_its_own_line(what: str) -> None:
    refused(*MISTAKES[what])


def test_zig_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VQ_CXX", ZIG)
    for what in ("a write to an input", "a helper that uses a grid name", "auto for a threadgroup element"):
        refused(*MISTAKES[what])
    # Its front end sees what g++ optimises away.
    refused("float b;\nif (lane > 3u) b = 1.0f;\na += b;", "", 1, ("give the variable a value where it is declared",))


FOREIGN = {
    "a += float(x_strides[0]);": "x_shape: inputs are row-contiguous",
    "a += float(y_shape[0]);": "the shape of an input, or a compile-time parameter",
    "a = metal::min(a, a);": "min, not metal::min",
    "double d = 1.0;": "Metal has no double",
    "uint w = thread_execution_width;": "threads_per_simdgroup",
}


@pytest.mark.parametrize("lines", FOREIGN)
def test_what_only_one_language_has_is_refused_with_its_line(lines: str) -> None:
    with pytest.raises(SimulatorError, match="is not in the dialect") as caught:
        result(f"// {lines}\n{lines}")
    assert FOREIGN[lines] in str(caught.value)
    assert f"line {FIRST_LINE + 1}: " in str(caught.value)
    assert caught.value.line == FIRST_LINE + 1


@pytest.mark.parametrize("line", ["#include <math.h>", "VQ_FN float f(float a) { return metal::exp(a); }"])
def test_headers_too(line: str) -> None:
    with pytest.raises(SimulatorError, match=r"kernel 'probe': header line 2: .* is not in the dialect"):
        result("", f"// {line}\n{line}")


def test_headers_of_two_programs_in_one_unit_stay_apart() -> None:
    body = "y[thread_position_in_grid.x] = helper() + MACRO;"
    programs = [
        Program(
            f"part_{n}",
            body,
            {},
            {"y": "float32"},
            {},
            f"#define MACRO {n}.5f\nVQ_FN float helper() {{ return {n}.0f; }}",
        )
        for n in (1, 2)
    ]
    build({program: [()] for program in programs})
    for n, program in enumerate(programs, 1):
        assert (run(program, {}, {}, {"y": ((32,), "float32")}, **GRID)["y"] == 2 * n + 0.5).all()


def test_an_error_in_one_of_many_programs_names_it() -> None:
    good, bad = probe("a += 1.0f;"), Program("bad", "y[0] = ;", {}, {"y": "float32"})
    with pytest.raises(SimulatorError, match="kernel 'bad', line 1: ") as caught:
        build({good: [()], bad: [()]})
    assert caught.value.kernel == "bad"


@pytest.mark.parametrize("contract", ["off", "fast"])
def test_zig_runs_kernels_and_fuses(contract: library.Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that the test extra brings: same values, same checks, and the switch has its effect there too."""
    monkeypatch.setenv("VQ_CXX", ZIG)
    plain = np.float32(X * X) - X
    fused = (X.astype(np.float64) * X - X).astype(np.float32)
    assert not np.array_equal(plain, fused)
    # LLVM fuses a product with one use only, within a basic block, which a checked access ends.
    assert np.array_equal(result("a = a * a - a;", contract=contract), fused if contract == "fast" else plain)
    assert np.array_equal(result("a = vq_sub(vq_mul(a, a), a);", contract=contract), plain)
    with pytest.raises(SimulatorError, match="in divergent flow"):
        result("if (lane < 4u) a = simd_max(a);", contract=contract)


def test_the_first_compiler_that_is_named_or_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fake(name: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho {name} 1.0\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VQ_CXX", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert compiler.find_compiler().family == "zig"  # from the package
    gcc, clang, mine = fake("g++"), fake("clang++"), fake("mine")
    compiler._find.cache_clear()
    assert compiler.find_compiler().command == (clang,)
    assert compiler.find_compiler().family == "clang"
    Path(clang).unlink()
    compiler._find.cache_clear()
    assert compiler.find_compiler().command == (gcc,)
    monkeypatch.setenv("CXX", mine)
    assert compiler.find_compiler().command == (mine,)
    monkeypatch.setenv("VQ_CXX", f"{gcc} -pipe")
    assert compiler.find_compiler().command == (gcc, "-pipe")
    compiler._find.cache_clear()


def test_no_compiler_is_one_error_that_names_the_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VQ_CXX", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    compiler._find.cache_clear()
    with pytest.raises(KernelError) as caught:
        result("a += 4.0f;")
    for way in ("clang++ or g++", "VQ_CXX or CXX", "ziglang", "vq-core[test]"):
        assert way in str(caught.value)
    monkeypatch.setenv("VQ_CXX", str(tmp_path / "absent"))
    with pytest.raises(VQError, match=r"named by VQ_CXX.* does not run"):
        result("a += 4.0f;")
    compiler._find.cache_clear()


def test_libraries_are_kept_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VQ_CACHE", str(tmp_path))
    program = probe("a += 5.0f;")
    build({program: [()]})
    (kept,) = (tmp_path / "simulator").iterdir()
    first = kept.stat()
    library._loaded.clear()
    build({program: [()]})
    assert list((tmp_path / "simulator").iterdir()) == [kept]
    assert kept.stat().st_mtime_ns == first.st_mtime_ns
    build({program: [()]}, contract="fast")
    assert len(list((tmp_path / "simulator").iterdir())) == 2
    for path in (tmp_path / "simulator").iterdir():
        path.unlink()
    assert np.array_equal(result("a += 5.0f;"), X + np.float32(5))  # a cache that was emptied is filled again


def test_two_processes_may_compile_the_same(tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        "from vq_core.kernels.simulator import Program, run\n"
        "p = Program('both', 'y[thread_position_in_grid.x] = 3.0f;', {}, {'y': 'float32'})\n"
        "y = run(p, {}, {}, {'y': ((32,), 'float32')}, threadgroups=(1, 1, 1), threads=(32, 1, 1))['y']\n"
        "assert (y == 3).all()\n"
    )
    environment = {**os.environ, "VQ_CACHE": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(list((tmp_path / "simulator").iterdir())) == 1


def test_a_cache_that_cannot_be_written_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VQ_CACHE", str(tmp_path / "file"))
    with pytest.raises(SimulatorError, match="Set VQ_CACHE"):
        result("a += 6.0f;")
