"""Whether a kernel would be compiled anew as a sequence grows: its Metal text for several lengths, compared."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from vq_core.kernels.kernel import Call, Case, Kernel
from vq_core.kernels.nvrtc import cuda_text
from vq_core.kernels.rules import TINY
from vq_core.kernels.text import metal_text

MOST_CASES = 48


def grows(kernel: Kernel, cases: Iterable[Case] | None = None) -> str:
    """Why a kernel's text depends on a length; empty where it does not.

    Two calls of one variant must have one text whatever their shapes, and no compile-time number may follow a length
    of an input, but for those that the kernel names in ``fixed``.

    Args:
        kernel: Any.
        cases: By default the first of its own; they must hold two lengths for one variant.
    """
    texts: dict[Any, tuple[str, Call]] = {}
    calls: list[Call] = []
    compared = False
    for case in islice(kernel.cases(), MOST_CASES) if cases is None else cases:
        call = kernel.resolve(case.inputs, case.parameters)
        calls.append(call)
        # MLX keeps a small array in another address space, which is another text: one more, not one a length.
        key = (*call.parameters.values(), *(x.size < TINY for x in case.inputs))
        text = metal_text(kernel, case) if "metal" in kernel.backends else cuda_text(kernel, call.parameters)
        known, before = texts.setdefault(key, (text, call))
        if known != text:
            return f"the text for {_sizes(call)} is not that for {_sizes(before)}: each length would be compiled"
        compared |= call.shapes != before.shapes
    followed = _follows(kernel, calls)
    if followed:
        return followed
    return "" if compared else "no two cases of one variant differ in their lengths, so nothing was compared"


def _follows(kernel: Kernel, calls: list[Call]) -> str:
    """A compile-time number that goes up and down with a length."""
    for name, kind in kernel.kinds.items():
        if kind != "int" or name in kernel.fixed:
            continue
        for array in kernel.inputs:
            for axis in range(max((len(call.shapes[array]) for call in calls), default=0)):
                pairs = {(c.parameters[name], c.shapes[array][axis]) for c in calls if axis < len(c.shapes[array])}
                values, lengths = ({pair[i] for pair in pairs} for i in (0, 1))
                if len(pairs) == len(values) == len(lengths) > 1:
                    return (
                        f"compile-time parameter {name} follows axis {axis} of {array} ({_listed(pairs)}): each length "
                        f"would be compiled; read {array}_shape[{axis}] instead, or name {name} in `fixed` if it is a "
                        f"size of the model"
                    )
    return ""


def _listed(pairs: set[tuple[Any, int]]) -> str:
    return ", ".join(f"{value} for {length}" for value, length in sorted(pairs))


def _sizes(call: Call) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in call.shapes.items())
