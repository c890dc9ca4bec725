"""A device form: the order in which a device holds a method's pages, a fixed permutation of the canonical one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.api.layout import Layout
from vq_core.errors import PluginError
from vq_core.kernels.kernel import Kernel
from vq_core.kernels.rules import BACKENDS, Backend
from vq_core.kernels.skeleton.matrix import MatrixSnippet
from vq_core.kernels.skeleton.snippet import Snippet


@attrs.frozen(eq=False)
class DeviceForm:
    """One order.  Every function takes the method's state first, and moves paged fields only.

    Attributes:
        name: Letters, digits, underscores; it stands in states that are kept in this form.
        backends: Whose kernels read it.
        layout: Of the form: the fields of the method's layout, in another order; its blocks are whole pieces.
        to_device: Canonical fields (..., *field.shape), whole blocks of the form, to the form's; exact.
        from_device: Undoes it, bit for bit.
        kernels: All that ``run`` may call.
        run: Called with ``state, x, positions, sequence, backend``; rows of ``to_device``, bit for bit. ``None``: the
            method packs, and ``to_device`` orders.
        matrix: The snippet for tensor cores that reads the form, if there is one.
        snippet: The snippet of the portable skeleton that reads the form: for masks, prefill and other devices.
        declines: Why it does not serve a layer side, given the state; empty where it does.
    """

    name: str
    backends: tuple[Backend, ...]
    layout: Callable[[Any], Layout]
    to_device: Callable[[Any, Mapping[str, mx.array]], Mapping[str, mx.array]]
    from_device: Callable[[Any, Mapping[str, mx.array]], Mapping[str, mx.array]]
    kernels: Sequence[Kernel] = ()
    run: Callable[..., Mapping[str, mx.array]] | None = None
    matrix: Callable[[Any], MatrixSnippet] | None = None
    snippet: Callable[[Any], Snippet] | None = None
    declines: Callable[[Any], str] = attrs.field(default=lambda state: "")

    def __attrs_post_init__(self) -> None:
        wrong = ""
        if not isinstance(self.name, str) or not self.name.isidentifier():
            wrong = "its name must be letters, digits and underscores"
        elif not self.backends or any(backend not in BACKENDS for backend in self.backends):
            wrong = f"its backends are {self.backends!r}: give one or more of {', '.join(BACKENDS)}"
        elif bool(self.kernels) != (self.run is not None):
            wrong = "it has kernels if and only if it has a run"
        if wrong:
            raise PluginError(f"device form {self.name!r}: {wrong}")
