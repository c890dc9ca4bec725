"""Metal and CUDA through MLX's custom kernels: a prelude for each, the same body."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import mlx.core as mx

from vq_core.kernels.kernel import DTYPES, Backend, Kernel, Launch, stripped


class Gpu:
    """One of MLX's two kinds of custom kernels.

    MLX compiles a variant when it is first evaluated; the object that it compiles from is kept here, keyed by the
    kernel, which never changes.  Nothing that grows with a sequence is part of the text.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self._made: dict[Kernel, Any] = {}
        self._lock = threading.Lock()

    def run(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> tuple[mx.array, ...]:
        """Put the call into MLX's graph."""
        outputs: list[mx.array] = self.made(kernel)(inputs=list(inputs), **arguments(kernel, launch))
        return tuple(outputs)

    def made(self, kernel: Kernel) -> Any:
        """MLX's object for a kernel."""
        made = self._made.get(kernel)
        if made is None:
            with self._lock:
                make = mx.fast.metal_kernel if self.backend == "metal" else mx.fast.cuda_kernel
                made = self._made.setdefault(kernel, make(**declaration(kernel, self.backend)))
        return made


def declaration(kernel: Kernel, backend: Backend) -> dict[str, Any]:
    """Arguments of ``mx.fast.metal_kernel`` or ``cuda_kernel``."""
    return {
        "name": kernel.name,
        "input_names": list(kernel.arguments),
        "output_names": list(kernel.outputs),
        "header": prelude(backend) + stripped(kernel.header) + "\n",
        "source": stripped(kernel.text) + "\n",
    }


def arguments(kernel: Kernel, launch: Launch) -> dict[str, Any]:
    """Arguments of the call, but for the inputs."""
    kinds = kernel.kinds
    template = [(n, DTYPES[v] if kinds[n] == "dtype" else v) for n, v in launch.call.parameters.items()]
    return {
        "template": template,
        "grid": launch.grid,
        "threadgroup": launch.threads,
        "output_shapes": list(launch.shapes),
        "output_dtypes": [DTYPES[dtype] for dtype in launch.dtypes],
    }


@cache
def prelude(backend: Backend) -> str:
    """The header that lets the dialect compile."""
    return stripped(resources.files("vq_core.kernels").joinpath("prelude", f"{backend}.h").read_text()) + "\n"
