"""Kernels that are written once: see docs/kernels/."""

from vq_core.kernels.backends import choose, device_backend
from vq_core.kernels.kernel import Call, Case, Kernel, Output
from vq_core.kernels.offers import KernelOffer
from vq_core.kernels.rules import Backend
from vq_core.kernels.skeleton.snippet import Snippet

__all__ = ["Backend", "Call", "Case", "Kernel", "KernelOffer", "Output", "Snippet", "choose", "device_backend"]
