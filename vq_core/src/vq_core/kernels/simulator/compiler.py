"""Finding a C++ compiler, and the flags that give a kernel the arithmetic it is promised."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

from vq_core.kernels.simulator.errors import SimulatorError
from vq_core.kernels.simulator.program import Contract

_COMMON = """
    -std=c++17 -x c++ -shared -fPIC -fvisibility=hidden -ffreestanding -fno-exceptions -fno-rtti -fno-math-errno
    -fno-trapping-math -fno-stack-protector -fno-sanitize=undefined -fno-threadsafe-statics
"""
# Mistakes that compile silently and differ on a GPU: a double literal that widens an expression, a private variable
# that is read unwritten, a frame that does not fit a lane's stack.
_ERRORS = """
    -Wdouble-promotion -Werror=double-promotion -Wuninitialized -Werror=uninitialized -Werror=return-type
"""
_GCC_ERRORS = "-Wmaybe-uninitialized -Werror=maybe-uninitialized -Werror=frame-larger-than=16384"
_CLANG_ERRORS = """
    -Wsometimes-uninitialized -Werror=sometimes-uninitialized -Wframe-larger-than=16384 -Werror=frame-larger-than
"""


@attrs.frozen
class Compiler:
    """A C++ compiler: the command, what it says it is, and its family."""

    command: tuple[str, ...]
    version: str
    family: str  # "gcc", "clang" or "zig"

    def flags(self, contract: Contract) -> tuple[str, ...]:
        """All flags of a unit. Contraction shows from ``-O2`` with a fused multiply-add instruction on only."""
        optimise = ("-O2", "-ffp-contract=fast") if contract == "fast" else ("-O1", "-ffp-contract=off")
        machine: tuple[str, ...] = ()
        if platform.machine().lower() in ("x86_64", "amd64"):
            # Zig would compile for this very processor; libraries may be shared by machines through a home folder.
            machine = ("-mcpu=x86_64_v3",) if self.family == "zig" else ("-mfma", "-msse4.1")
        link: tuple[str, ...] = () if sys.platform == "darwin" else ("-nostdlib",)
        text = f"{_COMMON} {_ERRORS} {_GCC_ERRORS if self.family == 'gcc' else _CLANG_ERRORS}"
        return (*text.split(), *optimise, *machine, *link)


def find_compiler() -> Compiler:
    """The compiler to use: ``VQ_CXX``, ``CXX``, clang++ or g++ on PATH, or zig from the package ``ziglang``.

    Raises:
        SimulatorError: None of them is there, or the named one does not run, or the processor is too old.
    """
    _check_processor()
    return _find(os.environ.get("VQ_CXX"), os.environ.get("CXX"), os.environ.get("PATH"))


@functools.cache
def _find(vq_cxx: str | None, cxx: str | None, path: str | None) -> Compiler:
    for variable, value in (("VQ_CXX", vq_cxx), ("CXX", cxx)):
        if value:
            command = tuple(shlex.split(value))
            return _identify(command, f"named by {variable}")
    for name in ("clang++", "g++", "c++"):
        if found := shutil.which(name, path=path):
            return _identify((found,), "found on PATH")
    if importlib.util.find_spec("ziglang") is not None:
        return _identify((sys.executable, "-m", "ziglang", "c++"), "from the package ziglang")
    raise SimulatorError(
        "the simulator needs a C++ compiler and found none. Ways out: install clang++ or g++ so that it is on PATH; "
        "or name one in VQ_CXX or CXX; or install the package ziglang (pip install 'vq-core[test]' brings it)",
        kind="no_compiler",
    )


def _identify(command: tuple[str, ...], origin: str) -> Compiler:
    ask = (*command[:-1], "version") if command[-1] == "c++" and "ziglang" in command else (*command, "--version")
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unusable(command, origin, str(error)) from None
    if done.returncode:
        raise _unusable(command, origin, done.stderr.strip()[:300])
    version = done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
    if "ziglang" in command or Path(command[0]).name.startswith("zig"):
        return Compiler(command, f"zig {version}", "zig")
    return Compiler(command, version, "clang" if "clang" in done.stdout.lower() else "gcc")


def _unusable(command: tuple[str, ...], origin: str, reason: str) -> SimulatorError:
    return SimulatorError(
        f"the C++ compiler {shlex.join(command)!r} ({origin}) does not run: {reason}. Ways out: set VQ_CXX to a C++ "
        f"compiler that works, put clang++ or g++ on PATH, or install the package ziglang",
        kind="no_compiler",
    )


@functools.cache
def _check_processor() -> None:
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64", "aarch64", "arm64") or sys.platform == "win32":
        raise SimulatorError(
            f"the simulator runs on x86-64 and aarch64 under Linux and macOS; this is {machine} under {sys.platform}",
            kind="no_compiler",
        )
    if machine in ("x86_64", "amd64") and sys.platform == "linux":
        flags = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else " fma "
        if " fma " not in flags.replace("\n", " "):
            raise SimulatorError(
                "this processor has no fused multiply-add instruction (x86-64-v3), which the simulator needs; "
                "run the kernel tests on a processor made since 2013",
                kind="no_compiler",
            )
