"""The parity tests can fail: each kernel's text broken in many ways, each break seen in the configurations."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from vq_core.kernels import Case, Kernel
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import Verdict, build_ahead, verify
from vq_vecinfer.kernels import DEQUANTIZE, KERNELS, QUANTIZE


def narrowed(kernel: Kernel) -> Kernel:
    """With the configurations of one variant of each kernel only: less to compile and to run."""

    def cases() -> Iterator[Case]:
        for case in kernel.cases():
            if case.parameters["sub"] == 4 and (kernel is DEQUANTIZE or "float32" in case.name):
                yield case

    return attrs.evolve(kernel, cases=cases)


@attrs.frozen
class Break:
    """A wrong text: what it does, in which kernel, and what is put in the place of what."""

    what: str
    kernel: Kernel
    old: str
    new: str
    contract: str = "off"


BREAKS = [
    Break("the last of equals", QUANTIZE, "if (sum > best)", "if (sum >= best)"),
    Break("no half norms", QUANTIZE, "float sum = -halves[at];", "float sum = 0.0f;"),
    Break("whole norms", QUANTIZE, "float sum = -halves[at];", "float sum = -2.0f * halves[at];"),
    Break("plain multiply and add", QUANTIZE, "vq_add(sum, vq_mul(v[j], codebook[at * uint(sub) + uint(j)]))",
          "sum + v[j] * codebook[at * uint(sub) + uint(j)]", "fast"),
    Break("channels from the last", QUANTIZE, "vq_mul(v[j], codebook[at * uint(sub) + uint(j)])",
          "vq_mul(v[sub - 1 - j], codebook[at * uint(sub) + uint(sub - 1 - j)])"),
    Break("infinity is a number", QUANTIZE, "fabs(w) < INFINITY", "w == w"),
    Break("NaN is a number", QUANTIZE, "? code : 0u;", "|| !finite ? code + uint(!finite) : 0u;"),
    Break("nothing cut", QUANTIZE, "min(max(w, -1e30f), 1e30f)", "w"),
    Break("one centroid short", QUANTIZE, "c < C; ++c", "c < C - 1u; ++c"),
    Break("the codebook of the first place", QUANTIZE, "books == 1u ? 0u : own % M", "books == 1u ? 0u : 0u"),
    Break("the codebook of another place", QUANTIZE, "own % M", "(own + 1u) % M"),
    Break("a neighbour's numbers", QUANTIZE, "x[own * uint(sub) + uint(j)]", "x[(own ^ 1u) * uint(sub) + uint(j)]"),
    Break("a code across two words cut", QUANTIZE, "found[i] >> (begin - bit)", "0u"),
    Break("a wrong shift", QUANTIZE, "found[i] << (bit - begin)", "found[i] << ((bit - begin) & 24u)"),
    Break("no barrier", QUANTIZE, "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    Break("words of another threadgroup", QUANTIZE, "grid.x * 4u * bits + thread", "grid.x * 3u * bits + thread"),
    Break("the codebook of the first place", DEQUANTIZE, "i % M * C", "0u * M"),
    Break("the codebook of another place", DEQUANTIZE, "i % M * C", "(i + 1u) % M * C"),
    Break("a code across two words cut", DEQUANTIZE, "if (shift + bits > 32u)", "if (shift + bits > 40u)"),
    Break("a wrong shift", DEQUANTIZE, "<< (32u - shift)", "<< (31u - shift)"),
    Break("a mask one bit too narrow", DEQUANTIZE, "code & (C - 1u)", "code & (C / 2u - 1u)"),
    Break("the next word", DEQUANTIZE, "at = bit / 32u", "at = min(bit / 32u + 1u, total * bits / 32u - 1u)"),
    Break("one channel for all", DEQUANTIZE, "codebook[code * uint(sub) + uint(j)]", "codebook[code * uint(sub)]"),
    Break("spare threads write", DEQUANTIZE, "if (i < total)", "if (i < total + 1u)"),
]  # fmt: skip


def broken(item: Break) -> Kernel:
    assert item.old in item.kernel.body, f"{item.kernel.name} holds no {item.old!r}"
    return attrs.evolve(narrowed(item.kernel), body=item.kernel.body.replace(item.old, item.new))


MADE = {f"{item.what}, {item.kernel.name}, {i}": (item, broken(item)) for i, item in enumerate(BREAKS)}


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    for contract in ("off", "fast"):
        kernels = [kernel for item, kernel in MADE.values() if item.contract == contract]
        build_ahead([*kernels, *map(narrowed, KERNELS)], contract)  # type: ignore[arg-type]


def judged(kernel: Kernel, contract: str) -> Verdict:
    return verify("vecinfer", kernel, "simulator", Simulated(1, contract))  # type: ignore[arg-type]


@pytest.mark.parametrize("contract", ["off", "fast"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_unbroken_they_pass(kernel: Kernel, contract: str) -> None:
    verdict = judged(narrowed(kernel), contract)
    assert verdict.identical and verdict.configurations >= 18, verdict


@pytest.mark.parametrize("name", MADE)
def test_broken_it_differs(name: str) -> None:
    item, kernel = MADE[name]
    verdict = judged(kernel, item.contract)
    assert not verdict.passed and (verdict.error or verdict.differing), verdict
