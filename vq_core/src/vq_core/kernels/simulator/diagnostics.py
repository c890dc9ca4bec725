"""What a compiler says, in the kernel's own lines, with what to do about it."""

from __future__ import annotations

import re

from vq_core.kernels.simulator.errors import SimulatorError
from vq_core.kernels.simulator.program import GRID_NAMES, Program

_ERROR = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$", re.MULTILINE)
_NOTE = re.compile(r"^(?:In file included from )?([^\n:]+):(\d+):", re.MULTILINE)
_KEEP = 3  # errors shown; the rest follow from the first ones

# Found in an error's text -> the way out. The first that fits is taken.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        rf"'(?:{'|'.join(GRID_NAMES)})'",
        "grid names are locals of the body, as they are parameters in Metal: pass the value to the helper",
    ),
    ("vq_kernel_body", "threadgroup memory is declared in the body: pass it to the helper as VQ_SHARED_PTR(T)"),
    (
        r"lvalue required as|expression is not assignable|passing 'const |no viable overloaded '[-+*/|&^]?='"
        r"|cannot assign to",
        "inputs are read-only: write to an output, or copy the value to a variable first",
    ),
    (
        r"deleted (?:member )?function|explicitly deleted|discards qualifiers",
        "name the type when reading an element of an output or of threadgroup memory, never auto: "
        "const float a = buffer[i];",
    ),
    ("double-promotion|increases floating-point precision", "a literal without f is a double here: write 0.5f"),
    ("uninitiali[sz]ed", "give the variable a value where it is declared"),
    ("frame-larger-than|frame size", "private arrays live in registers on a GPU: make them small, or use VQ_SHARED"),
    (
        r"'(?:device|constant|threadgroup|thread|kernel)'",
        "address-space words differ between the languages: VQ_GLOBAL(T), VQ_GLOBAL_OUT(T), VQ_SHARED(T, name, n), "
        "VQ_SHARED_PTR(T), VQ_LOCAL(T, name, n)",
    ),
    (r"no match for 'operator\*' \(operand type is|indirection requires pointer operand", "write p[0], never *p"),
    ("vq_index", "an index is an int or a uint: uint(x)"),
    (
        r"call of overloaded|call to '\w+' is ambiguous|no matching function for call|deduced conflicting types",
        "give both arguments one type: float(x), uint(n), or a named variable instead of an element",
    ),
    (
        r"no viable conversion from '(?:const )?(?:float|double|int)' to '(?:half|bfloat)"
        r"|conversion from '(?:float|double|int)' to non-scalar type",
        "narrow explicitly: half(x), bfloat(x), T(x)",
    ),
)


def compile_error(output: str, programs: tuple[Program, ...]) -> SimulatorError:
    """The error for a unit that does not compile. ``output`` is what the compiler wrote."""
    output = re.sub("[\u2018\u2019]", "'", output)  # g++ quotes by the locale
    names = {program.name: program for program in programs}
    lines: list[str] = []
    first: tuple[str, int | None] | None = None
    errors = list(_ERROR.finditer(output))
    # What goes wrong inside the runtime's templates follows from the kernel's own mistakes, where it has some.
    own = [found for found in errors if found["file"].removesuffix(" header") in names]
    previous = 0
    for found in own or errors:
        file, line, text = found["file"], int(found["line"]), found["text"].strip()
        kernel = file.removesuffix(" header")
        if kernel not in names:
            # A template of the runtime that the body uses wrongly. The place in the body stands in the notes: g++ has
            # them before the error, clang after it.
            notes = _places(output[previous : found.start()], names)[-1:] or _places(output[found.end() :], names)[:1]
            file, kernel, line = notes[0] if notes else (file, kernel, line)
        previous = found.end()
        first = first or (kernel, line)
        where = f"header line {line}" if file.endswith(" header") else f"line {line}"
        where = f"kernel {kernel!r}, {where}" if kernel in names else f"{file}:{line}"
        code = _code(names.get(kernel), file.endswith(" header"), line)
        lines.append(f"{where}: {text}{code}{_advice(text)}")
        if len(lines) == _KEEP:
            break
    names_text = ", ".join(repr(name) for name in names)
    message = "\n".join(lines) if lines else f"the compiler failed:\n{output[-2000:]}"
    kernel_name, at = first or (None, None)
    return SimulatorError(
        f"{names_text} does not compile.\n{message}",
        kind="compile",
        kernel=kernel_name if kernel_name in names else None,
        line=at,
    )


def _places(text: str, names: dict[str, Program]) -> list[tuple[str, str, int]]:
    found = ((line[1], line[1].removesuffix(" header"), int(line[2])) for line in _NOTE.finditer(text))
    return [place for place in found if place[1] in names]


def _code(program: Program | None, header: bool, line: int) -> str:
    if program is None:
        return ""
    text = (program.header if header else program.body).split("\n")
    return f"\n    {text[line - 1].strip()}" if 0 < line <= len(text) else ""


def _advice(text: str) -> str:
    for pattern, advice in _ADVICE:
        if re.search(pattern, text):
            return f"\n    What to do: {advice}."
    return ""
