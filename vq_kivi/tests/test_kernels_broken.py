"""The parity tests can fail: each kernel's text broken in many ways, each break seen in the configurations."""

from __future__ import annotations

from collections.abc import Iterator

from vq_core.kernels import Case, Kernel
from vq_core.testing import Break, BrokenKernels
from vq_kivi.kernels import KERNELS, PACK, ROUND, UNPACK
from vq_kivi.kernels.reference import name_of

PACKERS, ROUNDERS, UNPACKERS = (tuple(kernels.values()) for kernels in (PACK, ROUND, UNPACK))
KEYS = (PACK["keys"], ROUND["keys"])
VALUES = (PACK["values"], ROUND["values"])
DECODED = "vq_add(vq_mul(float(q), step), base)"

BREAKS = [
    Break("round for rint", PACKERS + ROUNDERS, "max(rint(vq_div", "max(round(vq_div"),
    Break("halves left to the product", PACKERS + ROUNDERS, "return fma(fma(-product, step, d), inverse, product);",
          "return product;"),
    Break("nothing clipped", PACKERS + ROUNDERS, "< levels + 0.25f", "< INFINITY"),
    Break("every group by the inverse", PACKERS + ROUNDERS, "const bool exact = !(", "const bool exact = !(true || "),
    Break("plain multiply and add", ROUNDERS, "vq_add(vq_mul(float(code), step), low)",
          "float(code) * step + low", "fast"),
    Break("plain multiply and add", UNPACKERS, DECODED, "float(q) * step + base", "fast"),
    Break("zero padding", VALUES, "float(x[row * D + min(channel + k, D - 1u)])",
          "(channel + k < D ? float(x[row * D + min(channel + k, D - 1u)]) : 0.0f)"),
    Break("one token short", KEYS, "t = 0u; t < 32u; ++t) {\n    const float w",
          "t = 1u; t < 32u; ++t) {\n    const float w"),
    Break("the last tokens for all", KEYS[:1], "if (c + 32u < size) {", "if (c > size) {"),
    Break("neighbours read one place off", VALUES, "[first / wide + k]", "[first / wide + (k ^ 1u)]"),
    Break("half of the lanes left out of the range", VALUES, "o = lanes / 2u", "o = lanes / 4u"),
    Break("a wrong shift", PACKERS, "code << uint(at % 32)", "code << uint((at + 1) % 32)"),
    Break("a code across two words cut", PACKERS, "if (at % 32 + bits > 32) word[at / 32 + 1] |=",
          "if (at % 32 + bits > 33) word[at / 32 + 1] |="),
    Break("a wrong shift", UNPACKERS[:1], "<< uint(32 - at % 32)", "<< uint(31 - at % 32)"),
    Break("a wrong shift", UNPACKERS[1:], "<< (32u - shift)", "<< (31u - shift)"),
    Break("a code across two words cut", UNPACKERS[:1], "if (at % 32 + bits > 32)", "if (at % 32 + bits > 33)"),
    Break("a code across two words cut", UNPACKERS[1:], "if (shift + uint(4 * bits) > 32u)",
          "if (shift + uint(4 * bits) > 40u)"),
    Break("a mask one bit too wide", UNPACKERS, "(1u << bits) - 1u", "(2u << bits) - 1u"),
    Break("no NaN rule", KEYS + VALUES, "bad = bad || w != w;", "bad = bad || false;"),
    Break("no NaN rule among lanes", VALUES, "return a != a ? a : (b < a || b != b ? b : a);", "return min(a, b);"),
    Break("negative zero kept", PACKERS, "low = low == 0.0f ? 0.0f : low;", ""),
    Break("negative zero kept in the maximum", PACKERS, "high = high == 0.0f ? 0.0f : high;", ""),
    Break("codes from numbers that are not stored", KEYS + VALUES, "return float(half(v));", "return v;"),
    Break("scale and zero swapped", (PACK["keys"],), "scale[place + part] = M(kept)", "scale[place + part] = M(base)"),
    Break("scale and zero swapped", (PACK["values"],), "scale[group] = M(step)", "scale[group] = M(low)"),
    Break("scale and zero swapped", ROUNDERS, "vq_mul(float(code), step), low)", "vq_mul(float(code), low), step)"),
    Break("scale and zero swapped", UNPACKERS, DECODED, "vq_add(vq_mul(float(q), base), step)"),
    Break("the group of another row", (PACK["keys"],), "steps[thread], base = lows[thread]",
          "steps[thread ^ 1u], base = lows[thread ^ 1u]"),
    Break("the range of another group", KEYS, "float(x[first + (c + t) * D]);\n\n", "float(x[(c + t) * D]);\n\n"),
    Break("the group of another row", VALUES, "const uint first = row * D + channel;",
          "const uint first = (rows - 1u - row) * D + channel;"),
    Break("the group of another row", UNPACKERS, "group = row * groups", "group = row / 2u * groups"),
]  # fmt: skip


class TestBroken(BrokenKernels):
    """In the configurations of two variants."""

    kernels = KERNELS
    breaks = BREAKS
    configurations = 30

    def few(self, kernel: Kernel, among: str) -> Iterator[Case]:
        """One of three bits, one of two."""
        for case in kernel.cases():
            if (name_of(case.inputs[-1]), case.parameters["bits"]) in (("float32", 3), ("float16", 2)):
                yield case
