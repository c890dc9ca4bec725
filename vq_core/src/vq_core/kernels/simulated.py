"""The simulator as a backend: MLX arrays in, MLX arrays out, at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.kernels import simulator
from vq_core.kernels.kernel import Call, Kernel, Launch
from vq_core.kernels.rules import DTYPES, Backend


class Simulated:
    """Runs kernels on the CPU, with every access checked.

    Attributes:
        seed: Order of lanes and threadgroups.
        contract: ``"fast"`` lets the compiler contract multiply and add, which must change nothing.
    """

    backend: Backend = "simulator"

    def __init__(self, seed: int = 0, contract: str = "off"):
        self.seed, self.contract = seed, contract

    def run(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> tuple[mx.array, ...]:
        """Evaluate the inputs and run.

        Raises:
            KernelError: the kernel broke a rule.
        """
        arrays = {name: to_numpy(x) for name, x in zip(kernel.arguments, inputs, strict=True)}
        wanted = {
            name: (shape, _plain(dtype))
            for name, shape, dtype in zip(kernel.outputs, launch.shapes, launch.dtypes, strict=True)
        }
        parameters = dict(zip(launch.call.parameters, instance(launch.call), strict=True))
        found = simulator.run(
            program(kernel), parameters, arrays, wanted, threadgroups=launch.threadgroups, threads=launch.threads,
            seed=self.seed, contract=self.contract,  # type: ignore[arg-type]
        )  # fmt: skip
        return tuple(to_mlx(found[name], dtype) for name, dtype in zip(kernel.outputs, launch.dtypes, strict=True))


_programs: dict[Kernel, Any] = {}


def program(kernel: Kernel) -> Any:
    """A kernel as the simulator reads it, with its own lines."""
    if kernel not in _programs:
        make: Any = simulator.Program
        _programs[kernel] = make(
            name=kernel.name,
            body=kernel.text,
            inputs={name: _plain(dtype) for name, dtype in kernel.arguments.items()},
            outputs={name: _plain(output.dtype) for name, output in kernel.outputs.items()},
            parameters=kernel.kinds,
            header=kernel.header,
            dynamic_bytes=kernel.dynamic_bytes,
        )
    return _programs[kernel]


def instance(call: Call) -> tuple[object, ...]:
    """A call's compile-time parameters as the simulator takes them."""
    return tuple(_plain(v) if isinstance(v, str) else v for v in call.parameters.values())


def _plain(dtype: str) -> str:
    return "bool" if dtype == "bool_" else dtype


def to_numpy(x: mx.array) -> np.ndarray[Any, Any]:
    """An array's numbers; bfloat16 as its bits."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def to_mlx(x: np.ndarray[Any, Any], dtype: str) -> mx.array:
    """Back, bits kept."""
    return mx.array(x).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(x).astype(DTYPES[dtype])
