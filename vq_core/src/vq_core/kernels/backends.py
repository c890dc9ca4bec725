"""Where kernels run, and which of them this process has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import mlx.core as mx

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.kernel import Kernel, Launch
from vq_core.kernels.rules import BACKENDS, Backend


class Runner(Protocol):
    """A backend."""

    backend: Backend

    def run(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> tuple[mx.array, ...]:
        """Run a checked call."""


def device_backend() -> Backend | None:
    """The default device's backend; ``None`` on a CPU, where kernels run in the simulator only when asked to."""
    if mx.default_device() == mx.cpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def choose(backend: Backend | None) -> Runner:
    """The backend asked for, or the device's.

    Raises:
        UnsupportedShapeError: this machine does not have it.
    """
    chosen = device_backend() if backend is None else backend
    if chosen is None:
        raise UnsupportedShapeError("kernels run on a Metal or CUDA device; on a CPU give backend='simulator'")
    if chosen not in BACKENDS:
        raise UnsupportedShapeError(f"backend {chosen!r}: accepted are {', '.join(BACKENDS)}")
    if chosen != "simulator" and chosen != device_backend():
        raise UnsupportedShapeError(
            f"backend {chosen!r}: the default device is {mx.default_device()}, which has not; 'simulator' runs anywhere"
        )
    return _runner(chosen)


def compiled() -> int:
    """Variants of kernels that this process has given to MLX on the default device; 0 on a CPU."""
    backend = device_backend()
    return 0 if backend is None else len(getattr(_runner(backend), "variants", ()))


@cache
def _runner(backend: Backend) -> Runner:
    if backend == "simulator":
        from vq_core.kernels.simulated import Simulated

        return Simulated()
    from vq_core.kernels.gpu import Gpu

    return Gpu(backend)
