"""The C++ text of a unit: several programs, each with several instances."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence

from vq_core.kernels.simulator.abi import Buffer, Launch
from vq_core.kernels.simulator.instrument import helpers_with_collectives, instrument, without_comments
from vq_core.kernels.simulator.program import DTYPES, GRID_NAMES, Program, declaration_error

_TEMPLATE = {"dtype": "typename", "int": "int", "bool": "bool"}
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)

# Words of Metal that stand in a body but not in the dialect -> what to write.
_FOREIGN = {
    r"\bthread_execution_width\b": "threads_per_simdgroup",
    r"\b(quadgroup|thread_index_in_quadgroup)\w*\b": "simdgroup functions; quad groups have no counterpart on CUDA",
    r"\bdispatch_\w+\b": "threads_per_threadgroup or threads_per_grid",
    r"\bgrid_(origin|size)\b": "thread_position_in_grid, which starts at zero, and threads_per_grid",
    r"\bthread(group)?s?_\w*_in_(grid|threadgroup|simdgroup)_\w+": "the grid names of docs/kernels/dialect.md",
    r"\bmetal::": "the plain name: min, not metal::min",
    r"\batomic_\w+": "a second kernel, or one thread for each output: atomics have no common form",
    r"\bdouble\b": "float: Metal has no double",
}


def check_text(program: Program) -> None:
    """Refuses, with the line, what would compile here and not elsewhere."""
    body, header = without_comments(program.body), without_comments(program.header)
    for name in program.inputs:
        instead = f"{name}_shape: inputs are row-contiguous, so their strides follow from it"
        _refuse(program, body, "line", {rf"\b{name}_strides\b": instead})
    for name in program.outputs:
        instead = "the shape of an input, or a compile-time parameter"
        _refuse(program, body, "line", {rf"\b{name}_(shape|strides|ndim)\b": instead})
    _refuse(program, body, "line", _FOREIGN)
    _refuse(program, header, "header line", {**_FOREIGN, r"#[ \t]*include": "nothing: a header stands alone"})


def _refuse(program: Program, text: str, where: str, foreign: Mapping[str, str]) -> None:
    for pattern, instead in foreign.items():
        if found := re.search(pattern, text):
            line = text.count("\n", 0, found.start()) + 1
            word = found.group()
            message = f"{where} {line}: {word!r} is not in the dialect. Use {instead}"
            raise declaration_error(program.name, message, line)


def unit_text(
    programs: Mapping[Program, Sequence[tuple[object, ...]]],
) -> tuple[str, dict[tuple[Program, tuple[object, ...]], str]]:
    """The text of one unit, and the entry symbol of each of its instances."""
    sizes = f"sizeof(vq_launch) == {ctypes.sizeof(Launch)} && sizeof(vq_buffer) == {ctypes.sizeof(Buffer)}"
    parts = ['#include "simulator.h"', f'static_assert({sizes}, "abi.py and types.h differ");']
    entries: dict[tuple[Program, tuple[object, ...]], str] = {}
    for number, (program, instances) in enumerate(programs.items()):
        check_text(program)
        space = f"vq_program_{number}"
        parts += [f"namespace {space} {{", _body(program), "}", '#line 1 "entry"']
        parts += [f"#undef {macro}" for macro in dict.fromkeys(_MACRO.findall(program.header + "\n" + program.body))]
        for key in instances:
            if (program, key) in entries:
                continue
            symbol = f"vq_entry_{len(entries)}"
            entries[program, key] = symbol
            parts += _entry(program, space, key, symbol)
    return "\n".join(parts) + "\n", entries


def _body(program: Program) -> str:
    def declared(dtype: str) -> str:
        return DTYPES[dtype][0] if dtype in DTYPES else dtype

    arguments = [
        f"const vq_in<{declared(dtype)}> {name}, const vq_shape {name}_shape, const int {name}_ndim"
        for name, dtype in program.inputs.items()
    ]
    arguments += [f"const vq_out<{declared(dtype)}> {name}" for name, dtype in program.outputs.items()]
    template = ", ".join(f"{_TEMPLATE[kind]} {name}" for name, kind in program.parameters.items())
    body = without_comments(program.body)
    helpers = helpers_with_collectives(program.header)
    # MLX too looks for these names in the body.
    grid = " ".join(f"const {text.format(name)};" for name, text in GRID_NAMES.items() if name in body)
    return "\n".join(
        [
            f'#line 1 "{program.name} header"',
            instrument(program.header, helpers, header=True),
            '#line 1 "entry"',
            f"template <{template}>" if template else "",
            f"static void body({', '.join(arguments)}) {{",
            f"const int vq_kernel_body = 0; (void)vq_kernel_body; {_dynamic(program)}{grid}",
            f'#line 1 "{program.name}"',
            instrument(program.body, helpers, header=False),
            '#line 1 "entry"',
            "}",
        ]
    )


def _dynamic(program: Program) -> str:
    return f"enum {{ vq_dynamic_bytes = {program.dynamic_bytes} }}; " if program.dynamic_bytes else ""


def _entry(program: Program, space: str, key: tuple[object, ...], symbol: str) -> list[str]:
    values = [
        DTYPES[str(value)][0] if kind == "dtype" else str(value).lower()
        for kind, value in zip(program.parameters.values(), key, strict=True)
    ]
    call = f"{space}::body" + (f"<{', '.join(values)}>" if values else "")
    arguments = [
        f"{{vq_buffers + {2 * i}, 0}}, {{vq_buffers + {2 * i + 1}}}, int(vq_buffers[{2 * i + 1}].bytes / 4)"
        for i in range(len(program.inputs))
    ]
    arguments += [f"{{vq_buffers + {2 * len(program.inputs) + i}, 0}}" for i in range(len(program.outputs))]
    return [
        f"static void {symbol}_lane() {{ {call}({', '.join(arguments)}); }}",
        f"VQ_ENTRY int {symbol}(char* segment, char* stacks) {{ return vq_run(segment, stacks, {symbol}_lane); }}",
    ]
