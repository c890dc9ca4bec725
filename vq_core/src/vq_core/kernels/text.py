"""The complete Metal text of a kernel, on a machine without Metal.

MLX makes the text when the call is recorded, and recording inside ``mx.export_function`` needs no device.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from vq_core.errors import PluginError
from vq_core.kernels.gpu import arguments, declaration
from vq_core.kernels.kernel import Case, Kernel


def metal_text(kernel: Kernel, case: Case) -> str:
    """What ``mx.fast.metal_kernel`` would compile for a case; nothing runs.

    Raises:
        PluginError: MLX printed no text; another version of MLX may have stopped to.
    """
    call = kernel.resolve(case.inputs, case.parameters)
    inputs, launch = kernel.arrays(case.inputs, call), kernel.launch(call)
    made: Any = mx.fast.metal_kernel(**declaration(kernel, "metal"))

    def record(*arrays: mx.array) -> Any:
        return made(inputs=list(arrays), verbose=True, **arguments(kernel, launch))

    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        with _StandardOutput(printed):
            mx.export_function(str(Path(folder) / "f.mlxfn"), record, *inputs)
        found = re.search(r"```\n(.*?)```", printed.read_text(), re.DOTALL)
    if found is None:
        raise PluginError(f"this MLX printed no text for kernel {kernel.name}")
    text: str = found.group(1)
    return text


class _StandardOutput:
    """Sends the process's standard output, that of C++ too, to a file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        sys.stdout.flush()
        self._kept = os.dup(1)
        target = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.close(target)

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._kept, 1)
        os.close(self._kept)
