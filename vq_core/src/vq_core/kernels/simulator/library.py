"""Compiled units: one shared library for many instances, kept in a cache folder and named by all that went into it."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vq_core.kernels.simulator.compiler import Compiler, find_compiler
from vq_core.kernels.simulator.diagnostics import compile_error
from vq_core.kernels.simulator.errors import SimulatorError
from vq_core.kernels.simulator.program import Contract, Program
from vq_core.kernels.simulator.source import unit_text

RUNTIME = Path(__file__).parent / "runtime"
# A unit that takes longer to compile than this is a mistake; zig's first compile on a slow machine is half a minute.
_COMPILE_LIMIT = 600

# (program, instance, contraction) -> (library, symbol). Keyed by compile-time parameters only.
_loaded: dict[tuple[Program, tuple[object, ...], Contract], tuple[Path, str]] = {}


def build(programs: Mapping[Program, Sequence[tuple[object, ...]]], *, contract: Contract = "off") -> None:
    """Compiles the named instances in one unit; :func:`run` then finds them.

    Args:
        programs: Program -> instances, each the values of its parameters in their order, such as ``("float16", 128)``.
        contract: ``"off"``: no multiply and add are fused. ``"fast"``: fused wherever the compiler can.

    Raises:
        SimulatorError: No compiler, a program that does not compile, or values that do not fit.
    """
    if contract not in ("off", "fast"):
        raise SimulatorError(f"contract is {contract!r}; it is 'off' or 'fast'", kind="declaration")
    wanted = {
        program: [program.checked(tuple(values)) for values in instances] for program, instances in programs.items()
    }
    text, entries = unit_text(wanted)
    library = compiled(text, contract, tuple(wanted))
    for (program, key), symbol in entries.items():
        _loaded[program, key, contract] = library, symbol


def entry(program: Program, key: tuple[object, ...], contract: Contract) -> tuple[Path, str]:
    """Library and symbol of one instance, compiled alone where :func:`build` has not made it."""
    found = _loaded.get((program, key, contract))
    if found is None or not found[0].exists():
        build({program: [key]}, contract=contract)
        found = _loaded[program, key, contract]
    return found


def cache_folder() -> Path:
    """``VQ_CACHE``, or the platform's folder for caches; made if it is missing."""
    if chosen := os.environ.get("VQ_CACHE"):
        base = Path(chosen)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches" / "vq"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vq"
    folder = base / "simulator"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SimulatorError(
            f"the simulator keeps compiled kernels in {folder}, which cannot be made: {error}. "
            f"Set VQ_CACHE to a folder that can be written",
            kind="cache",
        ) from None
    return folder


@functools.cache
def _runtime_text() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(RUNTIME.glob("*.h")))


def compiled(text: str, contract: Contract, programs: tuple[Program, ...]) -> Path:
    """The library of ``text``, from the cache or compiled now. Safe for several processes at once: a library appears
    under its name complete or not at all."""
    compiler = find_compiler()
    flags = compiler.flags(contract)
    everything = repr((text, _runtime_text(), compiler.command, compiler.version, flags))
    folder = cache_folder()
    library = folder / f"{hashlib.sha256(everything.encode()).hexdigest()[:32]}.so"
    if not library.exists():
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as work:
                made = _compile(compiler, flags, text, Path(work), programs)
                made.replace(library)
        except OSError as error:
            raise SimulatorError(
                f"a compiled kernel cannot be written to {folder}: {error}. Set VQ_CACHE to another folder",
                kind="cache",
            ) from None
    return library


def _compile(compiler: Compiler, flags: tuple[str, ...], text: str, work: Path, programs: tuple[Program, ...]) -> Path:
    source, made = work / "unit.cpp", work / "unit.so"
    source.write_text(text, encoding="utf-8")
    command = [*compiler.command, *flags, f"-I{RUNTIME}", str(source), "-o", str(made)]
    names = ", ".join(repr(program.name) for program in programs)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_LIMIT)
    except subprocess.TimeoutExpired:
        raise SimulatorError(
            f"compiling {names} took more than {_COMPILE_LIMIT} s and was stopped; build fewer instances at once",
            kind="compile",
        ) from None
    if done.returncode:
        raise compile_error(done.stderr, programs)
    return made
