"""What a kernel may declare, and what would go wrong in MLX: told when the kernel is made, not when it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

if TYPE_CHECKING:
    from vq_core.kernels.kernel import Kernel

Shape = tuple[int, ...]
Kind = Literal["dtype", "int", "bool"]
Backend = Literal["metal", "cuda", "simulator"]
BACKENDS: tuple[Backend, ...] = ("metal", "cuda", "simulator")
DTYPES = {
    name: getattr(mx, name)
    for name in ("bool_", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32")
}
MOST_VARIANTS = 24
"""Compiled forms that one kernel may have: each costs seconds at its first use on a GPU."""
ATTRIBUTES = (
    "thread_position_in_grid", "thread_position_in_threadgroup", "thread_index_in_threadgroup",
    "threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_threadgroup",
    "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup",
)  # fmt: skip
MOST_THREADS = 1024
MOST_DYNAMIC = 160 * 1024
"""Bytes of dynamic threadgroup memory that every NVIDIA GPU with these instructions has room for, but for its
consumer variants, which have 99 KiB."""
CUDA_ONLY = re.compile(
    r"\b(?:vq_mma_m16n8k16|vq_transpose_8x8|vq_copy_(?:async|commit|wait)|vq_half_pair|vq_bfloat_pair|vq_exp2_fast"
    r"|vq_permute|VQ_DYNAMIC)\b"
)
MOST_LAUNCHES = 1024
SIMD = 32
NUMBERS = "run_numbers"
MOST_GRID = 2**32
TINY = 8
"""MLX puts an input of fewer elements into Metal's ``constant`` address space."""


def kind(values: tuple[Any, ...]) -> Kind:
    """What a compile-time parameter with these accepted values is."""
    if all(isinstance(v, bool) for v in values):
        return "bool"
    return "dtype" if all(isinstance(v, str) for v in values) else "int"


def listed(values: Sequence[Any]) -> str:
    """For a message."""
    return ", ".join(map(str, values))


def wrong(kernel: Kernel) -> str:
    """What would go wrong in MLX, and how to do it right; nothing if nothing would."""
    if not isinstance(kernel.name, str) or not re.fullmatch(r"[A-Za-z]\w*", kernel.name, re.ASCII):
        return "its name must be letters, digits and underscores"
    return _wrong_names(kernel) or _wrong_types(kernel) or _wrong_text(kernel)


def _wrong_names(kernel: Kernel) -> str:
    names = [*kernel.inputs, *kernel.outputs, *kernel.parameters, *kernel.numbers]
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            return f"{name!r} is no name in C: give it letters, digits and underscores"
        if name in (*ATTRIBUTES, NUMBERS, "backend") or name.startswith("vq_"):
            return f"{name!r} is taken by the dialect or by the call: give it another name"
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"two of its inputs, outputs, parameters and numbers have one name: {', '.join(twice)}"
    if not kernel.outputs:
        return "it has no outputs, so nobody could see what it does"
    lost = [name for name in kernel.fixed if name not in kernel.parameters]
    return f"fixed names {', '.join(lost)}, which is no parameter" if lost else ""


def _wrong_types(kernel: Kernel) -> str:
    for name, values in kernel.parameters.items():
        strings = [v for v in values if isinstance(v, str)]
        numbers = [v for v in values if isinstance(v, int) and not -(2**31) <= v < 2**31]
        kinds = {type(v) for v in values}
        if len(kinds) != 1 or not kinds <= {str, int, bool} or any(v not in DTYPES for v in strings) or numbers:
            kinds_accepted = "dtype names, whole numbers of 32 bits or bools"
            return f"parameter {name} must have accepted values of one kind: {kinds_accepted}"
        if len(set(values)) < len(values):
            return f"parameter {name} accepts a value twice"
    for name, dtype in [*kernel.inputs.items(), *((n, o.dtype) for n, o in kernel.outputs.items())]:
        if dtype not in DTYPES and not (dtype in kernel.parameters and kernel.kinds[dtype] == "dtype"):
            return (
                f"{name} is {dtype!r}, which is neither a dtype nor a dtype parameter; dtypes are {listed([*DTYPES])}"
            )
    if len(kernel.variants) > MOST_VARIANTS:
        return f"{len(kernel.variants)} variants; at most {MOST_VARIANTS}: make a parameter a run-time number"
    return ""


def _wrong_text(kernel: Kernel) -> str:
    code = stripped(kernel.body)
    accepted = [given for given in kernel.backends if given in BACKENDS]
    if not accepted or len(accepted) < len(kernel.backends):
        return f"its backends are {kernel.backends!r}: give one or more of {listed(BACKENDS)}"
    if "metal" in kernel.backends and (found := CUDA_ONLY.search(code + stripped(kernel.header))):
        return f"its text names {found.group()}, which Metal has not: give backends=('cuda', 'simulator')"
    dynamic = len(re.findall(r"\bVQ_DYNAMIC\(", code))
    if dynamic != bool(kernel.dynamic_bytes) or kernel.dynamic_bytes % 16 or kernel.dynamic_bytes > MOST_DYNAMIC:
        return (
            f"its body names VQ_DYNAMIC {dynamic} times and dynamic_bytes is {kernel.dynamic_bytes}: it is named once "
            f"where there are any, a multiple of 16 up to {MOST_DYNAMIC}"
        )
    if not any(attribute in code for attribute in ATTRIBUTES):
        # With more than one output MLX then closes the signature after the first.
        return f"its body names no attribute of the grid, such as {ATTRIBUTES[0]}"
    for name in kernel.inputs:
        for suffix in ("_shape", "_strides", "_ndim"):
            # MLX looks for the plain text, so `k` would also get the arguments of `mask_shape`.
            if re.search(rf"\w{name}{suffix}\b", code) and not re.search(rf"\b{name}{suffix}\b", code):
                return (
                    f"the name of input {name!r} ends another's, in {name}{suffix}: MLX would mix them up; rename one"
                )
    return ""


def stripped(text: str) -> str:
    """Text without comments and indentation: MLX hashes all of it at every call."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)
