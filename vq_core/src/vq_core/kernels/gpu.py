"""Metal and CUDA through MLX's custom kernels: a prelude for each, the same body."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import cache, partial
from importlib import resources
from typing import Any

import mlx.core as mx

from vq_core.kernels.included import included
from vq_core.kernels.kernel import Kernel, Launch
from vq_core.kernels.rules import DTYPES, Backend, stripped


class Gpu:
    """One of MLX's two kinds of custom kernels.

    MLX compiles a variant when it is first evaluated; the object that it compiles from is kept here, keyed by the
    kernel, which never changes.  Nothing that grows with a sequence is part of the text.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self._made: dict[Kernel, Any] = {}
        self.variants: set[tuple[str, str]] = set()
        """What MLX compiles once each: kernels with their compile-time parameters."""
        self._lock = threading.Lock()

    def run(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> tuple[mx.array, ...]:
        """Put the call into MLX's graph."""
        call = launch.prepared.get(self.backend)
        if call is None:
            given = arguments(kernel, launch)
            self.variants.add((kernel.name, str(given["template"])))
            call = launch.prepared[self.backend] = partial(self.made(kernel), **given)
        return tuple(call(inputs=inputs))

    def made(self, kernel: Kernel) -> Any:
        """MLX's object for a kernel."""
        made = self._made.get(kernel)
        if made is None:
            with self._lock:
                given = declaration(kernel, self.backend)
                if self.backend == "metal":
                    made = self._made.setdefault(kernel, mx.fast.metal_kernel(**given))
                else:
                    made = self._made.setdefault(kernel, mx.fast.cuda_kernel(**included(given)))
        return made


def declaration(kernel: Kernel, backend: Backend) -> dict[str, Any]:
    """Arguments of ``mx.fast.metal_kernel`` or ``cuda_kernel``."""
    return {
        "name": kernel.name,
        "input_names": list(kernel.arguments),
        "output_names": list(kernel.outputs),
        "header": prelude(backend, stripped(kernel.header) + "\n" + stripped(kernel.text))
        + stripped(kernel.header)
        + "\n",
        "source": stripped(kernel.text) + "\n",
    } | ({"shared_memory": kernel.dynamic_bytes} if kernel.dynamic_bytes else {})


def arguments(kernel: Kernel, launch: Launch) -> dict[str, Any]:
    """Arguments of the call, but for the inputs."""
    kinds = kernel.kinds
    template = [(n, DTYPES[v] if kinds[n] == "dtype" else v) for n, v in launch.call.parameters.items()]
    return {
        "template": template,
        "grid": launch.grid,
        "threadgroup": launch.threads,
        "output_shapes": list(launch.shapes),
        "output_dtypes": [DTYPES[dtype] for dtype in launch.dtypes],
    }


def prelude(backend: Backend, used_by: str) -> str:
    """The header that lets a text of the dialect compile: what it uses, for MLX hashes all of it at every call."""
    pieces = _pieces(backend)
    kept: set[int] = set()
    words = set(re.findall(r"\w+", used_by))
    while True:
        more = {i for i, (names, _) in enumerate(pieces) if i not in kept and (not names or names & words)}
        if not more:
            return "".join(text for i, (_, text) in enumerate(pieces) if i in kept)
        kept |= more
        for i in more:
            words.update(re.findall(r"\w+", pieces[i][1]))


@cache
def _pieces(backend: Backend) -> list[tuple[frozenset[str], str]]:
    """The header's definitions, each with the names that it gives; what gives none is always needed."""
    found: list[tuple[frozenset[str], str]] = []
    lines: list[str] = []
    text = stripped(resources.files("vq_core.kernels").joinpath("prelude", f"{backend}.h").read_text())
    for line in text.splitlines():
        lines.append(line)
        whole = "\n".join(lines)
        opened = len(re.findall(r"^#if", whole, re.MULTILINE)) - len(re.findall(r"^#endif", whole, re.MULTILINE))
        if whole.count("{") == whole.count("}") and not opened:
            found.append((frozenset(_names(whole)), whole + "\n"))
            lines = []
    return found


def _names(piece: str) -> list[str]:
    first = re.sub(r"^(#ifndef .*|#if .*)\n", "", piece)
    if first.startswith("#include"):
        return []
    for pattern in (r"#define (\w+)", r"typedef .*?(\w+);", r"namespace (\w+)", r"struct (?:__\w+__\(\w+\) )?(\w+)"):
        if given := re.match(pattern, first):
            return [given.group(1)]
    given = re.match(r"(?:template <[^>]*> )?[^(]*?(\w+)\(", first)
    return [given.group(1)] if given else []
