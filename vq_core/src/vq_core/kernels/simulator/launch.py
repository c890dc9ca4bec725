"""One launch: arrays into the shared segment, the kernel over them in the worker, outputs or an error back."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from vq_core.kernels.simulator import process
from vq_core.kernels.simulator.abi import MAX_THREADS, Buffer, Launch, Report
from vq_core.kernels.simulator.errors import SimulatorError
from vq_core.kernels.simulator.library import entry
from vq_core.kernels.simulator.messages import place, sentence
from vq_core.kernels.simulator.program import DTYPES, Contract, Program, declaration_error

_ALIGN = 64
_SIGNALS = {
    "SIGSEGV": "a private array or pointer of plain C++ ran out of its bounds (VQ_LOCAL checks them), or it recurses",
    "SIGBUS": "a private array or pointer of plain C++ ran out of its bounds (VQ_LOCAL checks them), or it recurses",
    "SIGFPE": "an integer is divided by zero; a GPU would go on with a meaningless number: guard the divisor",
    "SIGILL": "the library was compiled for another processor: remove the cache folder (VQ_CACHE)",
}


@attrs.frozen
class _Place:
    """Where an array lies in the segment."""

    data: int
    owner: int
    bytes: int
    granule: int


@attrs.frozen
class _Call:
    """A checked launch."""

    program: Program
    key: tuple[object, ...]
    inputs: dict[str, np.ndarray[Any, Any]]
    outputs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    threadgroups: tuple[int, int, int]
    threads: tuple[int, int, int]
    seed: int
    contract: Contract

    @property
    def instance(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in zip(self.program.parameters, self.key, strict=True))
        return f"[{values + '; ' if values else ''}seed {self.seed}, contract {self.contract}]"

    def error(self, kind: str, text: str, file: str = "", line: int = 0) -> SimulatorError:
        """An error of this launch, with the line's text where there is a line."""
        name = self.program.name
        where = f"kernel {name!r}, {place(file, line)}" if line > 0 else f"kernel {name!r}"
        source = (self.program.header if file.endswith(" header") else self.program.body).split("\n")
        code = f"\n    {source[line - 1].strip()}" if 0 < line <= len(source) else ""
        return SimulatorError(f"{where}: {text} {self.instance}{code}", kind=kind, kernel=name, line=line or None)


def run(
    program: Program,
    arguments: Mapping[str, object],
    inputs: Mapping[str, np.ndarray[Any, Any]],
    outputs: Mapping[str, tuple[tuple[int, ...], str]],
    *,
    threadgroups: tuple[int, int, int],
    threads: tuple[int, int, int],
    seed: int = 0,
    contract: Contract = "off",
    time_limit: float = 120.0,
) -> dict[str, np.ndarray[Any, Any]]:
    """Runs one launch of ``program`` on the CPU and returns its outputs.

    Args:
        program: The kernel.
        arguments: A value for each of its parameters: a dtype name, an int or a bool.
        inputs: An array for each input, of the declared dtype; bfloat16 as uint16 bit patterns. Arrays that are not
            row-contiguous are copied. No 0-d arrays; arrays without elements are fine.
        outputs: Shape and dtype name of each output.
        threadgroups: Their number, each axis. (MLX's ``grid`` counts threads: it is threadgroups * threads.)
        threads: Threads of a threadgroup, each axis; a multiple of 32 in all, at most 1024.
        seed: 0 runs lanes and threadgroups in their natural order, each other number in an order of its own.
        contract: ``"fast"`` lets the compiler fuse multiply and add.
        time_limit: Seconds after which the kernel counts as one that never ends.

    Returns:
        Output name -> array of the given shape; bfloat16 as uint16.

    Raises:
        SimulatorError: The kernel breaks a rule, does not compile, crashes or never ends, leaves an output element
            unwritten, or the call does not fit the declarations.
    """
    call = _checked(program, arguments, inputs, outputs, threadgroups, threads, seed, contract)
    if not 0 < time_limit <= 1e6:
        raise declaration_error(
            program.name, f"time_limit is {time_limit}; it is a number of seconds above 0, up to 1e6"
        )
    if not all(threadgroups):
        return _complete(call, {name: np.zeros(shape, dtype) for name, (shape, dtype) in call.outputs.items()}, {})
    library, symbol = entry(program, call.key, contract)
    places, size = _places(call)
    with process.lock:
        worker = process.worker()
        segment = worker.reserve(size)
        launch = _write(call, places, segment)
        try:
            worker.launch(library, symbol, time_limit)
        except process.WorkerDied as died:
            raise _died(call, launch, died.reason) from None
        except process.WorkerTimeout:
            raise _endless(call, launch, time_limit) from None
        except process.WorkerRefused as refused:
            raise call.error(
                "cache", f"its library cannot be loaded: {refused}. Remove {library} and try again."
            ) from None
        if launch.report.kind:
            raise _reported(call, launch.report)
        results, owners = {}, {}
        for name, (shape, dtype) in call.outputs.items():
            at = places[name]
            results[name] = _view(segment, at.data, at.bytes, dtype).reshape(shape).copy()
            owners[name] = _view(segment, at.owner, at.bytes // dtype.itemsize * 4, np.dtype(np.uint32)).copy()
    return _complete(call, results, owners)


def _view(segment: Any, start: int, size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(segment, dtype=dtype, count=size // dtype.itemsize, offset=start)


def _checked(
    program: Program,
    arguments: Mapping[str, object],
    inputs: Mapping[str, np.ndarray[Any, Any]],
    outputs: Mapping[str, tuple[tuple[int, ...], str]],
    threadgroups: tuple[int, int, int],
    threads: tuple[int, int, int],
    seed: int,
    contract: Contract,
) -> _Call:
    key = program.key(arguments)
    for kind, given, declared in (("inputs", inputs, program.inputs), ("outputs", outputs, program.outputs)):
        if set(given) != set(declared):
            raise declaration_error(program.name, f"{kind} {sorted(given)} were given; it declares {sorted(declared)}")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, declared_dtype in program.inputs.items():
        dtype_name = program.dtype(declared_dtype, key)
        carrier = DTYPES[dtype_name][1]
        array = np.asarray(inputs[name])
        if array.dtype != carrier:
            raise declaration_error(
                program.name, f"input {name} has dtype {array.dtype}; it is declared {dtype_name}, carried by {carrier}"
            )
        if array.ndim == 0:
            raise declaration_error(
                program.name,
                f"input {name} has no dimension; such arrays are references in Metal and pointers in CUDA. "
                f"Give it one: reshape(1)",
            )
        arrays[name] = np.ascontiguousarray(array)
    made: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for name, declared_dtype in program.outputs.items():
        shape, given_dtype = outputs[name]
        dtype_name = program.dtype(declared_dtype, key)
        if given_dtype != dtype_name:
            raise declaration_error(
                program.name, f"output {name} is asked for as {given_dtype}; it is declared {dtype_name}"
            )
        if any(not isinstance(n, int | np.integer) or n < 0 for n in shape):
            raise declaration_error(program.name, f"output {name} has shape {shape}; a shape is a tuple of ints from 0")
        made[name] = tuple(int(n) for n in shape), DTYPES[dtype_name][1]
    _check_grid(program, threadgroups, threads)
    if not 0 <= seed < 2**63:
        raise declaration_error(program.name, f"seed is {seed}; it is an int from 0")
    groups_x, groups_y, groups_z = threadgroups
    x, y, z = threads
    return _Call(program, key, arrays, made, (groups_x, groups_y, groups_z), (x, y, z), seed, contract)


def _check_grid(program: Program, threadgroups: tuple[int, int, int], threads: tuple[int, int, int]) -> None:
    for name, value, least in (("threadgroups", threadgroups, 0), ("threads", threads, 1)):
        if len(value) != 3 or any(not isinstance(n, int | np.integer) or n < least for n in value):
            raise declaration_error(program.name, f"{name} is {value}; it is three ints, each at least {least}")
    width = math.prod(threads)
    if width % 32 or width > MAX_THREADS:
        raise declaration_error(
            program.name,
            f"a threadgroup of {threads} has {width} threads; it needs a multiple of 32, at most {MAX_THREADS}: "
            f"only whole SIMD groups behave alike on every device. The grid counts threads: launch whole threadgroups "
            f"and guard the spare threads with if (i < total)",
        )
    if math.prod(threadgroups) * width >= 2**32:
        raise declaration_error(
            program.name, f"{threadgroups} threadgroups of {width} threads are more than 2^32 threads"
        )


def _places(call: _Call) -> tuple[dict[str, _Place], int]:
    """Where each array lies; ``x`` and ``x shape`` for an input."""
    count = 2 * len(call.inputs) + len(call.outputs)
    end = ctypes.sizeof(Launch) + count * ctypes.sizeof(Buffer)
    places: dict[str, _Place] = {}

    def take(size: int) -> int:
        nonlocal end
        start = -(-end // _ALIGN) * _ALIGN
        end = start + size
        return start

    for name, array in call.inputs.items():
        places[name] = _Place(take(array.nbytes), 0, array.nbytes, array.itemsize)
        places[f"{name} shape"] = _Place(take(4 * array.ndim), 0, 4 * array.ndim, 4)
    for name, (shape, dtype) in call.outputs.items():
        elements = math.prod(shape)
        size = elements * dtype.itemsize
        places[name] = _Place(take(size), take(4 * elements), size, dtype.itemsize)
    return places, end + _ALIGN


def _write(call: _Call, places: dict[str, _Place], segment: Any) -> Launch:
    launch = Launch.from_buffer(segment)
    ctypes.memset(ctypes.addressof(launch), 0, ctypes.sizeof(Launch))
    launch.threadgroups[:], launch.threads[:] = call.threadgroups, call.threads
    launch.seed, launch.buffers = call.seed, len(places)
    table = (Buffer * len(places)).from_buffer(segment, ctypes.sizeof(Launch))
    for entry_, at in zip(table, places.values(), strict=True):
        entry_.data, entry_.owner, entry_.bytes, entry_.granule = at.data, at.owner, at.bytes, at.granule
    for name, array in call.inputs.items():
        _view(segment, places[name].data, array.nbytes, array.dtype)[:] = array.reshape(-1)
        shape = places[f"{name} shape"]
        _view(segment, shape.data, shape.bytes, np.dtype(np.int32))[:] = array.shape
    for name, (_, dtype) in call.outputs.items():
        at = places[name]
        _view(segment, at.owner, at.bytes // dtype.itemsize * 4, np.dtype(np.uint32))[:] = 0
    return launch


def _reported(call: _Call, raw: Report) -> SimulatorError:
    names = [name for array in call.inputs for name in (array, f"{array}_shape")] + list(call.outputs)
    buffer = names[raw.buffer] if raw.buffer >= 0 else ""
    memory = "output" if buffer in call.outputs else "input" if buffer else "threadgroup memory"
    report = raw.plain()
    kind, text = sentence(report, buffer, memory)
    return call.error(kind, text, report.file, report.line)


def _whereabouts(launch: Launch) -> str:
    groups = zip(launch.at_group, launch.threadgroups, strict=True)
    if launch.at_lane >= MAX_THREADS or any(at >= count for at, count in groups):
        return "a lane that is not known, because the kernel has overwritten the record of it"
    at = f"lane {launch.at_lane} of threadgroup {tuple(launch.at_group)}"
    return f"{at}, after the access or collective at line {launch.at_line}" if launch.at_line else at


def _died(call: _Call, launch: Launch, reason: str) -> SimulatorError:
    why = _SIGNALS.get(reason, "something outside the kernel may have ended it (memory?)")
    return call.error("crash", f"crashed ({reason}) in {_whereabouts(launch)}. Most likely {why}.")


def _endless(call: _Call, launch: Launch, time_limit: float) -> SimulatorError:
    return call.error(
        "endless",
        f"did not end within {time_limit:g} s and was stopped, in {_whereabouts(launch)}. Look for a loop whose "
        f"condition never becomes false (unsigned counters are never below zero); a launch that is only large needs a "
        f"higher time_limit.",
    )


def _complete(
    call: _Call, results: dict[str, np.ndarray[Any, Any]], owners: dict[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs, if each element has been written."""
    launched = math.prod(call.threadgroups) * math.prod(call.threads)
    for name, (shape, _) in call.outputs.items():
        total = math.prod(shape)
        missing = np.flatnonzero(owners[name] == 0) if name in owners else np.arange(total)
        if not missing.size:
            continue
        advice = "Write every element, in every branch; GPU memory holds stale values otherwise."
        if launched < total or missing[-1] == total - 1:  # the end is missing: the launch may have been too small
            advice += (
                f" The launch has {launched} threads, threadgroups {call.threadgroups} of {call.threads}. If "
                f"that is too few: grid counts threads, not threadgroups or groups of elements; "
                f"MLX divides it by the threadgroup."
            )
        raise call.error(
            "unwritten_output",
            f"output {name}[{missing[0]}] never written, nor {missing.size - 1} more of its {total} elements. {advice}",
        )
    return results
