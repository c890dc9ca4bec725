"""The parity tests can fail: each kernel's text broken in many ways, each break seen in the configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from vq_core.kernels import Case, Kernel
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import Verdict, build_ahead, verify
from vq_kivi.kernels import KERNELS, PACK, ROUND, UNPACK
from vq_kivi.kernels.reference import name_of

PACKERS, ROUNDERS, UNPACKERS = (tuple(kernels.values()) for kernels in (PACK, ROUND, UNPACK))
KEYS = (PACK["keys"], ROUND["keys"])
VALUES = (PACK["values"], ROUND["values"])
DECODED = "vq_add(vq_mul(float(q), float(scale[group])), float(zero[group]))"


def narrowed(kernel: Kernel) -> Kernel:
    """With the configurations of two variants only: less to compile and to run."""

    def cases() -> Iterator[Case]:
        for case in kernel.cases():
            variant = (name_of(case.inputs[-1]), case.parameters["bits"])
            if variant in (("float32", 3), ("float16", 4)):
                yield case

    return attrs.evolve(kernel, cases=cases)


@attrs.frozen
class Break:
    """A wrong text: what it does, in which kernels, and what is put in the place of what."""

    what: str
    kernels: tuple[Kernel, ...]
    old: str
    new: str
    contract: str = "off"


BREAKS = [
    Break("round for rint", PACKERS + ROUNDERS, "rint(vq_div", "round(vq_div"),
    Break("a product with the reciprocal", PACKERS + ROUNDERS,
          "vq_div(vq_sub(v, base), usable ? step : 1.0f)",
          "vq_mul(vq_sub(v, base), vq_div(1.0f, usable ? step : 1.0f))"),
    Break("plain multiply and add", (ROUND["keys"],), "vq_add(vq_mul(kivi_code(v, step, low, levels), step), low)",
          "kivi_code(v, step, low, levels) * step + low", "fast"),
    Break("plain multiply and add", (ROUND["values"],), "vq_add(vq_mul(code, step), low)", "code * step + low", "fast"),
    Break("plain multiply and add", UNPACKERS, f"x[i] = {DECODED}",
          "const float s = scale[group], z = zero[group]; x[i] = float(q) * s + z", "fast"),
    Break("zero padding", VALUES, "float(x[row * D + min(channel + k, D - 1u)])",
          "(channel + k < D ? float(x[row * D + min(channel + k, D - 1u)]) : 0.0f)"),
    Break("one token short", KEYS, "t = 1u; t < size", "t = 1u; t + 1u < size"),
    Break("half of the lanes left out of the range", VALUES, "o = lanes / 2u", "o = lanes / 4u"),
    Break("a wrong shift", (PACK["keys"],), "q >> (uint(bits) - filled)", "q >> filled"),
    Break("a wrong shift", (PACK["values"],), "mine >> (from - at)", "mine >> (from - at - 1u)"),
    Break("a wrong shift of whole codes", (PACK["values"],), "member % share * 4u", "member % share * 2u"),
    Break("a wrong shift", UNPACKERS, "<< (32u - shift)", "<< (31u - shift)"),
    Break("a code across two words cut", UNPACKERS, "if (shift + uint(bits) > 32u)", "if (shift + uint(bits) > 33u)"),
    Break("no NaN rule for the zero", PACKERS, "NAN : low == 0.0f ? 0.0f : low", "low : low == 0.0f ? 0.0f : low"),
    Break("no NaN rule", KEYS, "bad = bad || v != v", "bad = bad || false"),
    Break("no NaN rule", VALUES, "w != w ? 1u", "false ? 1u"),
    Break("no NaN rule for codes", PACKERS, "usable && q > 0.0f ?", "true ?"),
    Break("negative zero kept", PACKERS, "low == 0.0f ? 0.0f : low;", "low;"),
    Break("negative zero kept in the maximum", PACKERS, "high = high == 0.0f ? 0.0f : high;", ""),
    Break("codes from numbers that are not stored", KEYS + VALUES, "return float(half(v));", "return v;"),
    Break("scale and zero swapped", (PACK["keys"],), "scale[row * groups + g] = M(step)",
          "scale[row * groups + g] = M(low)"),
    Break("scale and zero swapped", (PACK["values"],), "scale[u] = M(step)", "scale[u] = M(low)"),
    Break("scale and zero swapped", (ROUND["keys"],), "levels), step), low)", "levels), low), step)"),
    Break("scale and zero swapped", (ROUND["values"],), "vq_mul(code, step), low)", "vq_mul(code, low), step)"),
    Break("scale and zero swapped", UNPACKERS, DECODED,
          "vq_add(vq_mul(float(q), float(zero[group])), float(scale[group]))"),
    Break("the group of another row", (PACK["keys"],), "scale[row * groups + g]", "scale[i]"),
    Break("the range of another group", (ROUND["keys"],), "    bad = bad || v != v;\n",
          "    bad = bad || v != v;\n    if (g > 0u) continue;\n"),
    Break("the group of another row", VALUES, "float(x[row * D", "float(x[(rows - 1u - row) * D"),
    Break("codes that are not masked", UNPACKERS, "q &= (1u << bits) - 1u;", ""),
    Break("every group with the first one's zero", UNPACKERS, "float(zero[group])", "float(zero[row * groups])"),
    Break("the group of another row", UNPACKERS, "const uint group = row * groups",
          "const uint group = row / 2u * groups"),
]  # fmt: skip


def broken(item: Break, kernel: Kernel) -> Kernel:
    text = kernel.header + kernel.body
    assert text.count(item.old) >= 1, f"{kernel.name} holds no {item.old!r}"
    return attrs.evolve(
        narrowed(kernel), header=kernel.header.replace(item.old, item.new), body=kernel.body.replace(item.old, item.new)
    )


MADE = {f"{item.what}, {kernel.name}": (item, broken(item, kernel)) for item in BREAKS for kernel in item.kernels}


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    for contract in ("off", "fast"):
        kernels: list[Any] = [kernel for item, kernel in MADE.values() if item.contract == contract]
        build_ahead([*kernels, *map(narrowed, KERNELS)], contract)  # type: ignore[arg-type]


def judged(kernel: Kernel, contract: str) -> Verdict:
    return verify("kivi", kernel, "simulator", Simulated(0, contract))


@pytest.mark.parametrize("contract", ["off", "fast"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_unbroken_it_passes(kernel: Kernel, contract: str) -> None:
    """So that what fails below fails for its one change."""
    verdict = judged(narrowed(kernel), contract)
    assert verdict.passed and verdict.configurations >= 30, verdict


@pytest.mark.parametrize("what", MADE)
def test_broken_it_fails(what: str) -> None:
    item, kernel = MADE[what]
    verdict = judged(kernel, item.contract)
    assert not verdict.passed and not verdict.identical
    assert "differs by" in verdict.first and verdict.differing > 0, verdict


def test_every_kernel_is_broken_in_six_ways() -> None:
    counts = {kernel.name: sum(kernel in item.kernels for item in BREAKS) for kernel in KERNELS}
    assert all(count >= 6 for count in counts.values()) and sum(counts.values()) > 40, counts
