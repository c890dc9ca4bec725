"""Runs kernels of the dialect on the CPU, with every access, barrier and shuffle checked.

:class:`Program` is one kernel body, :func:`run` launches it, :func:`build` compiles many instances ahead.  What is
seen and what is not: ``docs/kernels/simulator.md``; what a body may hold: ``docs/kernels/dialect.md``.
"""

from vq_core.kernels.simulator.errors import SimulatorError
from vq_core.kernels.simulator.launch import run
from vq_core.kernels.simulator.library import build
from vq_core.kernels.simulator.program import Program

__all__ = ["Program", "SimulatorError", "build", "run"]
