"""The parity tests can fail: each kernel's text broken in many ways, each break seen in the configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from vq_core.kernels import Case, Kernel
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import Verdict, build_ahead, verify
from vq_qjl.kernels import DECODE, DECODE_OUTLIERS, ENCODE, ENCODE_OUTLIERS, KERNELS

ENCODERS, DECODERS = (ENCODE, ENCODE_OUTLIERS), (DECODE, DECODE_OUTLIERS)


def narrowed(kernel: Kernel) -> Kernel:
    """With the configurations of one variant only: less to compile and to run."""

    def cases() -> Iterator[Case]:
        for case in kernel.cases():
            parameters = kernel.resolve(case.inputs, case.parameters).parameters
            if parameters["U"] == "uint8" and "float32" in case.name:
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
    Break("sign(0) is +1", ENCODERS, "+ low[t] > 0.0f", "+ low[t] >= 0.0f"),
    Break("the second part left out", ENCODERS, "high[t] * 512.0f + low[t] >", "high[t] >"),
    Break("parts that weigh the same", ENCODERS, "high[t] * 512.0f", "high[t]"),
    Break("the column of another sign", ENCODERS, "* m + own]", "* m + (own ^ 1u)]"),
    Break("the number of another channel", ENCODERS, "min(c0 + j, D - 1u) * m", "min(c0 + j + 1u, D - 1u) * m"),
    Break("numbers beyond the head size", ENCODERS, "parts[2u * k] = c < D ? two.x : 0.0f", "parts[2u * k] = two.x"),
    Break("squares fused into sums", ENCODERS, "v[k] = vq_mul(one, one);", "v[k] = one * one + 1e-30f;", "fast"),
    Break("squares added up in another order", ENCODERS, "o = 16u; o > 0u; o >>= 1", "o = 1u; o < 32u; o <<= 1"),
    Break("no smallest norm", ENCODERS, "M(square <= 8.271806125530277e-25f ?", "M(false ?"),
    Break("a NaN becomes a norm of zero", ENCODERS, "M(square <= 8.271806125530277e-25f ?",
          "M(!(square > 8.271806125530277e-25f) ?"),
    Break("the norm itself", ENCODERS, "sqrt(vq_div(square, float(D)))", "sqrt(square)"),
    Break("the norm of another token", ENCODERS, "norms[token]))", "norms[token ^ 1u]))"),
    Break("bytes in another order", ENCODERS, "kept >> (k % 4u * 8u)", "kept >> (24u - k % 4u * 8u)"),
    Break("the word of another token", ENCODERS, "kept = lane == t ? found", "kept = (lane ^ 1u) == t ? found"),
    Break("outliers counted twice", (ENCODE_OUTLIERS,), "chosen[i] == 1u ? 0.0f : float(x[row * D + i])",
          "float(x[row * D + i])"),
    Break("outliers sketched twice", (ENCODE_OUTLIERS,), "chosen[i] == 1u ? 0.0f : float(x[(first + token) * D + i])",
          "float(x[(first + token) * D + i])"),
    Break("of equal channels the last", (ENCODE_OUTLIERS,), "other == mine && k < c", "other == mine && k > c"),
    Break("outliers in falling order", (ENCODE_OUTLIERS,), "k = 0u; k < c; ++k) place",
          "k = c + 1u; k < D; ++k) place"),
    Break("a NaN is no outlier", (ENCODE_OUTLIERS,), "v[0] == v[0] ? v[0] : INFINITY", "v[0] == v[0] ? v[0] : 0.0f"),
    Break("energy of half of the group", (ENCODE_OUTLIERS,), "float(x[(first + k) * D + c])",
          "float(x[(first + k % 16u) * D + c])"),
    Break("outliers over the root of D", (ENCODE_OUTLIERS,), "vq_div(apart_square, float(O))",
          "vq_div(apart_square, float(D))"),
    Break("the outliers' norm for the others", (ENCODE_OUTLIERS,), "own_norms[token]", "norms[token]"),
    Break("bits turned round", DECODERS, "!= 0u ? s : -s", "!= 0u ? -s : s"),
    Break("bits in another order", DECODERS, "word[t] >> b & 1u", "word[t] >> (b ^ 1u) & 1u"),
    Break("rows of another word", DECODERS, "sketch[(w * 32u + b) * D + channel]",
          "sketch[((w ^ 1u) * 32u % m + b % 8u) * D + channel]"),
    Break("bytes in another order", DECODERS, "<< (k % 4u * 8u)", "<< (24u - k % 4u * 8u)"),
    Break("signs beyond the sketch", DECODERS, "b < min(32u, m - w * 32u)", "b < min(32u, m - w * 32u) - 1u"),
    Break("no unit", DECODERS, "vq_mul(one, as_type<float>(unit))", "one"),
    Break("no norm", DECODERS, "vq_mul(one, as_type<float>(unit))", "as_type<float>(unit)"),
    Break("the norm of another token", DECODERS, "weight[min(first + t, rows - 1u)]", "weight[min(first, rows - 1u)]"),
    Break("rounded once instead of twice", DECODERS, "vq_mul(sum[t], vq_mul(one, as_type<float>(unit)))",
          "vq_mul(vq_mul(sum[t], one), as_type<float>(unit))"),
    Break("the channels of another group", (DECODE_OUTLIERS,), "group = first / 32u", "group = first / 64u"),
    Break("the outliers' unit is the others'", (DECODE_OUTLIERS,), "as_type<float>(own_unit)", "as_type<float>(unit)"),
    Break("another outlier's row", (DECODE_OUTLIERS,), "* O + place]", "* O + O - 1u - place]"),
    Break("outliers added to the others", (DECODE_OUTLIERS,), "sum[t] = 0.0f;\n  for (uint w = 0u; w < own_words",
          "sum[t] *= 1.0f;\n  for (uint w = 0u; w < own_words"),
]  # fmt: skip


def broken(item: Break, kernel: Kernel) -> Kernel:
    text = kernel.body
    assert text.count(item.old) >= 1, f"{kernel.name} holds no {item.old!r}"
    return attrs.evolve(narrowed(kernel), body=text.replace(item.old, item.new))


MADE = {f"{item.what}, {kernel.name}": (item, broken(item, kernel)) for item in BREAKS for kernel in item.kernels}


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    for contract in ("off", "fast"):
        kernels: list[Any] = [kernel for item, kernel in MADE.values() if item.contract == contract]
        build_ahead([*kernels, *map(narrowed, KERNELS)], contract)  # type: ignore[arg-type]


def judged(kernel: Kernel, contract: str) -> Verdict:
    """Of six configurations at a time, up to the first that fails."""
    cases, verdict = list(kernel.cases()), Verdict("qjl", kernel.name, kernel.stands_for, "simulator")
    for begin in range(0, len(cases), 6):
        some = attrs.evolve(kernel, cases=lambda begin=begin: cases[begin : begin + 6])
        verdict = verify("qjl", some, "simulator", Simulated(0, contract))
        if not verdict.passed:
            break
    return attrs.evolve(verdict, configurations=begin + verdict.configurations)


@pytest.mark.parametrize("contract", ["off", "fast"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_unbroken_it_passes(kernel: Kernel, contract: str) -> None:
    """So that what fails below fails for its one change."""
    verdict = judged(narrowed(kernel), contract)
    assert verdict.passed and verdict.configurations >= 14, verdict


@pytest.mark.parametrize("what", MADE)
def test_broken_it_fails(what: str) -> None:
    item, kernel = MADE[what]
    verdict = judged(kernel, item.contract)
    assert not verdict.passed and not verdict.identical
    assert "differs by" in verdict.first and verdict.differing > 0, verdict


def test_every_kernel_is_broken_in_six_ways() -> None:
    counts = {kernel.name: sum(kernel in item.kernels for item in BREAKS) for kernel in KERNELS}
    assert all(count >= 6 for count in counts.values()) and sum(counts.values()) > 40, counts
