"""Declarations and calls that do not fit: one typed error, before anything is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vq_core import KernelError
from vq_core.kernels.simulator import Program, SimulatorError, build, run

ONE = {
    "name": "one",
    "body": "y[0] = T(x[0]);",
    "inputs": {"x": "T"},
    "outputs": {"y": "T"},
    "parameters": {"T": "dtype"},
}

DECLARATIONS = {
    "no identifier": ({"name": "1st"}, "'1st' is not a C identifier"),
    "a name of the dialect": ({"inputs": {"vq_x": "T"}}, "names that begin with vq_ belong to the dialect"),
    "twice": ({"inputs": {"y": "T"}}, "'y' is used twice"),
    "a grid name": ({"inputs": {"threads_per_grid": "T"}}, "is a grid name"),
    "no dtype": ({"inputs": {"x": "float64"}}, "'x' has dtype 'float64'; accepted are float32, float16"),
    "not a dtype parameter": ({"parameters": {"T": "int"}}, "or the name of a parameter declared as 'dtype'"),
    "no kind": ({"parameters": {"T": "type"}}, "a parameter is dtype, int or bool"),
    "no output": ({"outputs": {}}, "declares no output"),
}  # fmt: skip


@pytest.mark.parametrize("what", DECLARATIONS)
def test_declarations(what: str) -> None:
    change, message = DECLARATIONS[what]
    with pytest.raises(SimulatorError, match=message) as caught:
        Program(**{**ONE, **change})
    assert caught.value.kind == "declaration"
    assert isinstance(caught.value, KernelError)


X = np.zeros(4, np.float32)
GOOD: dict[str, Any] = {
    "arguments": {"T": "float32"},
    "inputs": {"x": X},
    "outputs": {"y": ((1,), "float32")},
    "threadgroups": (1, 1, 1),
    "threads": (32, 1, 1),
}
CALLS = {
    "no argument": ({"arguments": {}}, r"arguments \[\] were given; its parameters are \['T'\]"),
    "no dtype": ({"arguments": {"T": "float64"}}, "parameter T is 'float64'; it takes one of float32"),
    "an undeclared output": (
        {"outputs": {"y": ((1,), "float32"), "z": ((1,), "float32")}},
        r"outputs \['y', 'z'\] were given; it declares \['y'\]",
    ),
    "an input that is missing": ({"inputs": {}}, r"inputs \[\] were given; it declares \['x'\]"),
    "another dtype": ({"inputs": {"x": X.astype(np.float64)}}, "input x has dtype float64; it is declared float32"),
    "bfloat16 as float": ({"arguments": {"T": "bfloat16"}}, "it is declared bfloat16, carried by uint16"),
    "no dimension": ({"inputs": {"x": np.float32(1)}}, "input x has no dimension; .* Give it one: reshape"),
    "another dtype of an output": (
        {"outputs": {"y": ((1,), "float16")}},
        "output y is asked for as float16; it is declared float32",
    ),
    "a negative size": ({"outputs": {"y": ((-1,), "float32")}}, "a shape is a tuple of ints from 0"),
    "two axes": ({"threads": (32, 1)}, "threads is .* three ints"),
    "a count that is no int": ({"threads": (32.0, 1, 1)}, "threads is .* three ints"),
    "a negative count": ({"threadgroups": (1, -1, 1)}, "threadgroups is .* three ints"),
    "too many": ({"threadgroups": (2**16, 2**16, 1)}, "more than 2\\^32 threads"),
    "half a SIMD group": ({"threads": (48, 1, 1)}, "needs a multiple of 32"),
    "a negative seed": ({"seed": -1}, "seed is -1; it is an int from 0"),
    "no time": ({"time_limit": 0}, "time_limit is 0; it is a number of seconds above 0"),
    "another contraction": ({"contract": "on"}, "contract is 'on'; it is 'off' or 'fast'"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_calls(what: str) -> None:
    change, message = CALLS[what]
    program = Program(**ONE)
    call = {**GOOD, **change}
    with pytest.raises(SimulatorError, match=message):
        run(program, call.pop("arguments"), call.pop("inputs"), call.pop("outputs"), **call)


def test_values_of_parameters() -> None:
    program = Program("p", "y[0] = N;", {}, {"y": "int32"}, {"N": "int", "B": "bool"})
    for values, message in (
        ((1,), "1 values were given for its 2"),
        ((True, True), "N is True"),
        ((1, 1), "B is 1"),
        ((2**31, True), "N is 2147483648"),
    ):
        with pytest.raises(SimulatorError, match=message):
            build({program: [values]})


def test_programs_are_equal_by_content() -> None:
    one, same = Program(**ONE), Program(**ONE)
    assert one == same
    assert hash(one) == hash(same)
    assert one != Program(**{**ONE, "outputs": {"y": "float32"}})
