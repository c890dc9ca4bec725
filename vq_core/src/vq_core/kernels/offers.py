"""What a method offers the core: kernels, and how they serve a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

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
