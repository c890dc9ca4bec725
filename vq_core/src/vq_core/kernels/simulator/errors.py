"""The error of the simulator."""

from __future__ import annotations

from vq_core.errors import KernelError


class SimulatorError(KernelError):
    """A kernel that breaks a rule of the dialect, does not compile, crashes, hangs, or is launched wrongly.

    The message names kernel, line, lane and threadgroup where there are such, what happened, and what to do.

    Args:
        message: The whole sentence.
        kind: The kind of fault, one word per kind, such as ``"race"``, ``"write_outside"`` or ``"compile"``.
        kernel: The program's name, or None where the fault is in no program.
        line: Line of the body (or of the header) that is at fault, from 1, where it is known.
    """

    def __init__(self, message: str, *, kind: str, kernel: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.line = line
