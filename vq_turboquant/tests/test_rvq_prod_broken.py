"""The parity tests can fail: each kernel's text broken in many ways, each break seen in few configurations."""

from __future__ import annotations

from collections.abc import Iterator

from vq_core.kernels import Case, Kernel
from vq_core.testing import Break, BrokenKernels
from vq_turboquant.kernels import prod, rvq
from vq_turboquant.kernels.vectors import name_of

KERNELS = (*rvq.KERNELS, *prod.KERNELS)
RVQ, RVQ_BACK, PROD, PROD_BACK = (tuple(each.values()) for each in (rvq.PACK, rvq.UNPACK, prod.PACK, prod.UNPACK))
HADAMARD = tuple(kernel for kernel in KERNELS if "signs" in kernel.inputs)
HAAR = tuple(kernel for kernel in KERNELS if "turning" in kernel.inputs)
CODED, CODED_BACK, SKETCH, SKETCH_BACK = PROD[:2], PROD_BACK[:2], PROD[2:], PROD_BACK[2:]

BREAKS = [
    Break("a boundary counted by what lies on it", RVQ + CODED, "> tables[0 + k]", ">= tables[0 + k]"),
    Break("a code from a scale that is not stored", RVQ + CODED, "step = float(half(step))", "step = step"),
    Break("a division by nothing", RVQ[:1] + CODED[1:], "usable ? vq_div(w, size) : 0.0f", "vq_div(w, size)"),
    Break("squares added in another order", SKETCH, "h = 16u; h > 0u; h >>= 1", "h = 1u; h < 32u; h <<= 1",
          among="float32"),
    Break("half of the squares left out", RVQ[:1] + SKETCH, "h = 16u; h > 0u", "h = 8u; h > 0u"),
    Break("the scale of another size", RVQ[1:] + SKETCH, "scale[row] = M(step)", "scale[row] = M(size)"),
    Break("the vector of another row", CODED[:1] + SKETCH, "x[row * D + i]", "x[(rows - 1u - row) * D + i]"),
    Break("one round", HADAMARD, "uint(signs_shape[0])", "1u"),
    Break("no signs", HADAMARD, "all[own + i] *= signs[", "all[own + i] *= 1.0f + 0.0f * signs["),
    Break("the matrix of the other way", HADAMARD, "hadamard(all + own, D, lane, ", "hadamard(all + own, D, lane, !"),
    Break("the matrix of the other way", HAAR, "turning[i * D + j]", "turning[j * D + i]"),
    Break("low parts left out", HAAR, "mixed += a * s;", "mixed += 0.0f * s;"),
    Break("stage 2 of the number and not of its residual", RVQ, "const float r = vq_sub(y, tables[16u + first])",
          "const float r = vq_sub(y, 0.0f * tables[16u + first])"),
    Break("stage 2 with the boundaries of stage 1", RVQ[1:], "r > tables[32 + k]", "r > tables[0 + k]"),
    Break("both streams of one code", RVQ[:1], "w >> 8u", "w & 255u"),
    Break("a word one bit off", RVQ[1:], "q << (at - o * 32u)", "q << (at - o * 32u ^ 1u)"),
    Break("a code across two words cut", RVQ[:1] + CODED[1:], "q >> (o * 32u - at)", "0u * q"),
    Break("the residual's size from the key's", CODED, "gap[row] = M(sqrt(vq_div(left", "gap[row] = M(sqrt(vq_div(sum"),
    Break("signs of the key and not of its residual", CODED, "all[own + i] = vq_mul(r, unit)",
          "all[own + i] = vq_mul(y, unit)"),
    Break("a filling code that is not 0", CODED[:1], "made[own + i] = 0.0f;", "made[own + i] = 1.0f;"),
    Break("signs turned", CODED, "1.0f) > 0.0f", "1.0f) < 0.0f"),
    Break("a projection of 0 is a sign", SKETCH, "1.0f) > 0.0f", "1.0f) >= 0.0f"),
    Break("the sketch transposed", SKETCH, "sketching[i * m + j]", "sketching[j % D * m + i % m]"),
    Break("a sketch of half of the numbers", SKETCH, "for (uint i = 0u; i < D; ++i) {\n    const float a",
          "for (uint i = 0u; i < D / 2u; ++i) {\n    const float a"),
    Break("tables swapped", RVQ_BACK, "tables[16u + first], tables[48u + second]",
          "tables[48u + first], tables[16u + second]"),
    Break("streams swapped", RVQ_BACK[:1], "turboquant_code(rest[", "turboquant_code(codes["),
    Break("a wrong shift", RVQ_BACK[1:] + CODED_BACK[:1], "high << (32u - shift)", "high << (31u - shift)"),
    Break("a code across two words cut", RVQ_BACK[:1] + CODED_BACK[1:], "shift + bits > 32u", "shift + bits > 33u"),
    Break("a mask one bit too wide", RVQ_BACK[1:], "(1u << bits) - 1u", "(2u << bits) - 1u"),
    Break("the scale of another row", RVQ_BACK[1:] + SKETCH_BACK, "float(scale[row])", "float(scale[rows - 1u - row])"),
    Break("not times sqrt(D)", RVQ_BACK + SKETCH_BACK, "vq_mul(float(scale[row]), root)", "float(scale[row])"),
    Break("rounded another way", RVQ_BACK[1:] + SKETCH_BACK, "vq_mul(all[own + i], size)",
          "vq_mul(vq_mul(all[own + i], root), float(scale[row]))"),
    Break("bits from the other end", PROD_BACK, "word >> k & 1u", "word >> (31u - k) & 1u"),
    Break("low parts left out", SKETCH_BACK, "vq_mul(low_part, part", "vq_mul(0.0f * low_part, part"),
    Break("the constant left out", CODED_BACK[1:], "factor = tables[32]", "factor = 1.0f + 0.0f * tables[32]"),
    Break("the scale of the sketch left out", SKETCH_BACK, "tables[33] *", "(1.0f + 0.0f * tables[33]) *"),
    Break("the residual's size left out", CODED_BACK[1:], "vq_mul(float(gap[row]), factor)", "factor"),
    Break("plain multiply and add", CODED_BACK,
          "vq_add(tables[16u + which], vq_mul(vq_mul(float(gap[row]), factor), back))",
          "tables[16u + which] + vq_mul(float(gap[row]), factor) * back", contract="fast"),
]  # fmt: skip


class TestBroken(BrokenKernels):
    """In the configurations of one variant, with contraction where none is named."""

    kernels = KERNELS
    breaks = BREAKS
    configurations = 7
    contracts = ("fast",)

    def few(self, kernel: Kernel, among: str) -> Iterator[Case]:
        """Of codes of three bits, or of none, and of one dtype."""
        at = next(i for i, name in enumerate(kernel.inputs) if name in ("x", "scale"))
        dtype = among or "float16"
        for case in kernel.cases():
            if (name_of(case.inputs[at]), case.parameters.get("bits", 0)) in ((dtype, 3), (dtype, 0)):
                yield case
