"""One kernel body with its declarations, and the names of dtypes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import numpy as np

from vq_core.kernels.simulator.errors import SimulatorError

Contract = Literal["off", "fast"]

# dtype name -> (type in the body, numpy dtype that carries it)
DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float32": ("float", np.dtype(np.float32)),
    "float16": ("half", np.dtype(np.float16)),
    "bfloat16": ("bfloat", np.dtype(np.uint16)),
    "uint32": ("uint", np.dtype(np.uint32)),
    "int32": ("int", np.dtype(np.int32)),
    "uint16": ("ushort", np.dtype(np.uint16)),
    "uint8": ("uchar", np.dtype(np.uint8)),
    "int8": ("int8_t", np.dtype(np.int8)),
    "bool": ("bool", np.dtype(np.bool_)),
}

# Grid names: each a local of the body, as they are parameters in Metal, so that a helper cannot see them.
GRID_NAMES = {
    "thread_index_in_simdgroup": "uint {} = vq_me->lane",
    "simdgroup_index_in_threadgroup": "uint {} = vq_me->simd",
    "thread_index_in_threadgroup": "uint {} = vq_me->tid",
    "thread_position_in_threadgroup": "uint3 {} = vq_me->in_group",
    "thread_position_in_grid": "uint3 {} = vq_me->in_grid",
    "threadgroup_position_in_grid": "uint3 {} = vq_group_at",
    "threadgroups_per_grid": "uint3 {} = vq_group_count",
    "threads_per_threadgroup": "uint3 {} = vq_group_size",
    "threads_per_grid": "uint3 {} = vq_grid_size",
    "simdgroups_per_threadgroup": "uint {} = vq_width / 32u",
    "threads_per_simdgroup": "uint {} = 32u",
}

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")


def declaration_error(kernel: str, message: str, line: int | None = None) -> SimulatorError:
    """A declaration, a text or a call that does not fit, as opposed to a kernel that misbehaves."""
    return SimulatorError(f"kernel {kernel!r}: {message}", kind="declaration", kernel=kernel, line=line)


@attrs.frozen
class Program:
    """One kernel body in the dialect.

    Args:
        name: A C identifier; it stands in messages.
        body: The text between the braces of the kernel.
        inputs: Name -> dtype name ("float32", "float16", "bfloat16", "uint32", "int32", "uint16", "uint8", "int8",
            "bool"), or the name of a parameter that is a "dtype".
        outputs: The same for outputs.
        parameters: Compile-time parameters: name -> "dtype", "int" or "bool".
        header: Helper functions, types and macros; they see no grid names and no inputs.
        dynamic_bytes: Of threadgroup memory that ``VQ_DYNAMIC`` names.

    Raises:
        SimulatorError: A name that is no identifier or used twice, or a dtype that is not known.
    """

    name: str
    body: str
    inputs: Mapping[str, str] = attrs.field(converter=dict, hash=False)
    outputs: Mapping[str, str] = attrs.field(converter=dict, hash=False)
    parameters: Mapping[str, Literal["dtype", "int", "bool"]] = attrs.field(converter=dict, factory=dict, hash=False)
    header: str = ""
    dynamic_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        names = [*self.inputs, *self.outputs, *self.parameters]
        for name in (self.name, *names):
            if not _IDENTIFIER.match(name):
                raise declaration_error(self.name, f"{name!r} is not a C identifier; rename it")
            if name.startswith("vq_") and name != self.name:
                raise declaration_error(self.name, f"names that begin with vq_ belong to the dialect; rename {name!r}")
        for name in names:
            if names.count(name) > 1 or name in GRID_NAMES:
                raise declaration_error(
                    self.name,
                    f"{name!r} is used twice (or is a grid name); every input, output and parameter has its own",
                )
        for name, kind in self.parameters.items():
            if kind not in ("dtype", "int", "bool"):
                raise declaration_error(self.name, f"parameter {name!r} is {kind!r}; a parameter is dtype, int or bool")
        for name, dtype in (*self.inputs.items(), *self.outputs.items()):
            if dtype not in DTYPES and self.parameters.get(dtype) != "dtype":
                raise declaration_error(
                    self.name,
                    f"{name!r} has dtype {dtype!r}; accepted are {', '.join(DTYPES)}, or the name of a parameter "
                    f"declared as 'dtype'",
                )
        if not self.outputs:
            raise declaration_error(self.name, "it declares no output, so nobody could see what it does; declare one")

    def key(self, arguments: Mapping[str, object]) -> tuple[object, ...]:
        """The instance that ``arguments`` name: their checked values in the order of the parameters."""
        if set(arguments) != set(self.parameters):
            raise declaration_error(
                self.name, f"arguments {sorted(arguments)} were given; its parameters are {sorted(self.parameters)}"
            )
        return self.checked(tuple(arguments[name] for name in self.parameters))

    def checked(self, values: tuple[object, ...]) -> tuple[object, ...]:
        """``values`` of the parameters in their order, or an error that names the first that does not fit."""
        if len(values) != len(self.parameters):
            raise declaration_error(
                self.name, f"{len(values)} values were given for its {len(self.parameters)} parameters"
            )
        for (name, kind), value in zip(self.parameters.items(), values, strict=True):
            fits = {
                "dtype": isinstance(value, str) and value in DTYPES,
                "int": isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31,
                "bool": isinstance(value, bool),
            }[kind]
            if not fits:
                accepted = f"one of {', '.join(DTYPES)}" if kind == "dtype" else f"a Python {kind}"
                raise declaration_error(self.name, f"parameter {name} is {value!r}; it takes {accepted}")
        return values

    def dtype(self, declared: str, key: tuple[object, ...]) -> str:
        """The dtype name behind a declared one, in the instance ``key``."""
        return declared if declared in DTYPES else str(dict(zip(self.parameters, key, strict=True))[declared])
