"""Golden Metal text: what MLX would compile on a Mac, kept in files and compared on any machine.

    python -m vq_core.kernels.golden METHOD FOLDER

writes the files of a method's kernels (``core``: the core's own; of pass kernels one); a test compares with
:func:`differences`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vq_core.errors import PluginError
from vq_core.kernels.kernel import Case, Kernel
from vq_core.kernels.rules import TINY
from vq_core.kernels.text import metal_text


def golden_text(kernel: Kernel) -> str:
    """The first variant that its cases use in full, and the other variants' signatures."""
    texts = [metal_text(kernel, case) for case in one_a_variant(kernel)]
    if not texts:
        raise PluginError(f"kernel {kernel.name!r} has no case whose inputs have {TINY} elements or more")
    rest = "\n".join(f"// another variant\n{signature(text)}\n" for text in texts[1:])
    return f"{texts[0].rstrip()}\n\n{rest}".rstrip() + "\n"


def signature(text: str) -> str:
    """Names, types and attributes of the kernel in a complete text."""
    at = text.index("[[kernel]]")
    template = text.rfind("template <", 0, at)
    begin = at if template < 0 or "\n\n" in text[template:at] else template
    return text[begin : text.index(") {\n", at) + 1]


def differences(kernels: Iterable[Kernel], folder: Path) -> list[str]:
    """What is not as the files have it, as differences to read; empty where all agree.  Only of kernels for Metal."""
    found = []
    kernels = [kernel for kernel in kernels if "metal" in kernel.backends]
    files = {path.stem for path in folder.glob("*.metal")}
    for kernel in kernels:
        path = folder / f"{kernel.name}.metal"
        before = path.read_text(encoding="utf-8") if kernel.name in files else ""
        files.discard(kernel.name)
        lines = (before.splitlines(), golden_text(kernel).splitlines())
        found += ["\n".join(difflib.unified_diff(*lines, str(path), kernel.name, lineterm=""))]
    found += [f"{folder / name}.metal belongs to no kernel" for name in sorted(files)]
    return [text for text in found if text]


def write(kernels: Iterable[Kernel], folder: Path) -> None:
    """Make the folder's files those of the kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.metal"):
        path.unlink()
    for kernel in kernels:
        if "metal" not in kernel.backends:
            continue
        (folder / f"{kernel.name}.metal").write_text(golden_text(kernel), encoding="utf-8")


def one_a_variant(kernel: Kernel) -> list[Case]:
    """A case of each variant that the kernel's cases use, in the order of the variants."""
    found: dict[Any, Case] = {}
    for case in kernel.cases():
        if all(x.size >= TINY for x in case.inputs):
            found.setdefault(tuple(kernel.resolve(case.inputs, case.parameters).parameters.values()), case)
    order = sorted(
        found, key=lambda key: [kernel.variants.index(v) for v in kernel.variants if tuple(v.values()) == key]
    )
    return [found[key] for key in order]


if __name__ == "__main__":
    from vq_core.plugins.offered import offered_kernels

    parser = argparse.ArgumentParser(prog="python -m vq_core.kernels.golden")
    parser.add_argument("method")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write([one.kernel for one in offered_kernels(given.method, one_pass=True)[0]], given.folder)
