"""What a method offers the core: kernels, and how they serve a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import attrs

from vq_core.errors import PluginError
from vq_core.kernels.kernel import Kernel

Operation = Literal["encode+pack", "decode", ""]


@attrs.frozen(eq=False)
class KernelOffer:
    """Kernels that together do what hooks do.

    Attributes:
        operation: ``"encode+pack"``: what ``vq_encode`` and ``vq_pack`` do; ``"decode"``: what ``vq_decode`` does;
            empty: nothing that the core calls, kernels that are only to be verified.
        kernels: All kernels that ``run`` may call.
        run: For ``"encode+pack"`` called with ``state, x, positions, sequence, backend``, returning the rows of
            ``vq_pack``; for ``"decode"`` with ``state, packed, positions, backend``, returning ``vq_decode``'s array.
        declines: Why it does not serve a layer side, given the method's state; empty where it does.
    """

    operation: Operation
    kernels: Sequence[Kernel]
    run: Callable[..., Any] | None = None
    declines: Callable[[Any], str] = attrs.field(default=lambda state: "")

    def __attrs_post_init__(self) -> None:
        accepted = get_args(Operation)
        if self.operation not in accepted:
            raise PluginError(
                f"an offer's operation is {self.operation!r}: accepted are {', '.join(map(repr, accepted))}"
            )
        if not self.kernels or not all(isinstance(kernel, Kernel) for kernel in self.kernels):
            raise PluginError(f"an offer needs kernels, one or more Kernel objects: got {self.kernels!r}")
        if bool(self.operation) != (self.run is not None):
            what = "has no run, so nothing would call it" if self.operation else "has a run, which nothing calls"
            raise PluginError(f"an offer for {self.operation or 'no operation'!r} {what}")

    @property
    def name(self) -> str:
        """Names of its kernels."""
        return "+".join(kernel.name for kernel in self.kernels)
