"""The parity tests can fail: each kernel's text broken in many ways, each break seen in the configurations."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from vq_core.kernels import Case, Kernel
from vq_core.testing import Break, BrokenKernels
from vq_turboquant.kernels.mse import KERNELS, PACK, UNPACK

# Text that both rotations share is broken in one of them.
PACKERS, UNPACKERS = tuple(PACK.values()), tuple(UNPACK.values())
HADAMARD, DENSE = (PACK[False], UNPACK[False]), (PACK[True], UNPACK[True])

BREAKS = [
    Break("an edge belongs to the upper code", PACKERS[:1], "y > table[16u + e]", "y >= table[16u + e]"),
    Break("an edge left out", PACKERS[1:], "e + 1u < levels", "e + 2u < levels"),
    Break("another order of the sum", PACKERS[:1], "p[r] = p[r] + p[r + half_of]",
          "p[r] = p[r] + p[2u * half_of - 1u - r]"),
    Break("sums across half of the lanes", PACKERS[1:], "o = 16u; o > 0u", "o = 16u; o > 1u"),
    Break("squares fused into sums", PACKERS[:1], "p[r] = vq_mul(v, v)", "p[r] = fma(v, v, 1e-9f * v)"),
    Break("raw codes from a norm that is not stored", PACKERS[1:], "asked = mode == 0u ? vq_mul(raw, span) : norm",
          "asked = norm"),
    Break("a scale that is not cut", PACKERS[:1], "v > 65504.0f && v < INFINITY ? 65504.0f : v", "v"),
    Break("zero vectors divided", PACKERS[1:], "divisor = asked > 0.0f ? asked : 1.0f", "divisor = asked"),
    Break("matched taken for unbiased", PACKERS[:1], "vq_mul(mode == 1u ? unit : y, unit)", "vq_mul(y, unit)"),
    Break("no root", PACKERS[1:], "mode == 1u ? sqrt(sum) : sum", "sum"),
    Break("the scale of a vector that is no number", PACKERS[:1], "vq_mul(shrunk, span)) : norm",
          "vq_mul(shrunk, span)) : 0.0f"),
    Break("the first channels for all", PACKERS[1:], "channel = channels[i]", "channel = i"),
    Break("a wrong shift", PACKERS[:1], "q << (at - begin)", "q << (at - begin + 1u)"),
    Break("a code across two words cut", PACKERS[1:], "first = begin / bits", "first = (begin + bits - 1u) / bits"),
    Break("the last vector for all", KERNELS, "row = min(n, rows - 1u)", "row = rows - 1u", error="has one writer"),
    Break("a code across two words cut", UNPACKERS, "if (shift + bits > 32u)", "if (shift + bits > 40u)"),
    Break("a mask one bit too narrow", UNPACKERS, "(1u << bits) - 1u", "(1u << (bits - 1u)) - 1u"),
    Break("the span left out", UNPACKERS, "vq_mul(float(scale[row]), table[31])", "float(scale[row])"),
    Break("another codebook", UNPACKERS, "all[own + i] = unit;", "all[own + i] = unit * 1.0001f;"),
    Break("the scale of another row", UNPACKERS, "float(scale[row])", "float(scale[rows - 1u - row])"),
    Break("one round", HADAMARD[:1], "k < uint(signs_shape[0])", "k < 1u"),
    Break("rounds in the other order", HADAMARD[1:], "(k - 1u) * d", "(uint(signs_shape[0]) - k) * d"),
    Break("not transposed", HADAMARD[1:], "hadamard(all + own, d, lane, true)", "hadamard(all + own, d, lane, false)"),
    Break("no signs", HADAMARD, "all[own + i] *= signs", "all[own + i] *= 0.0f * signs"),
    Break("a stride short", HADAMARD, "stride < run;", "stride < run / 2u;"),
    Break("the matrix turned round", DENSE, "matrix[j * d + i]", "matrix[i * d + j]"),
    Break("the second part left out", DENSE, "first_second = fma(a, parts.y, first_second);", ""),
    Break("the vector's second part left out", DENSE, "second_first = fma(b, parts.x, second_first);", ""),
    Break("halves away from zero", DENSE, "first = rint(scaled)", "first = round(scaled)"),
    Break("a number short", DENSE, "j = 0u; j < d;", "j = 0u; j + 1u < d;"),
    Break("one sum in float", DENSE, "projected(high, first_second, second_first, 1.0f)",
          "fma(high, 2.384185791015625e-07f, (first_second * 1.00001f + second_first) * 4.656612873077393e-10f)"),
]  # fmt: skip


def name_of(x: mx.array) -> str:
    return str(x.dtype).removeprefix("mlx.core.")


@cache
def few(kernel: Kernel) -> tuple[Case, ...]:
    """The configurations of two variants, less to compile, with short vectors, less to run; of an unpacking kernel
    some of them, whose text has fewer branches."""
    found = []
    for case in kernel.cases():
        x, metadata = case.inputs[0], case.parameters.get("M") or name_of(case.inputs[1])
        one = kernel in UNPACKERS or (name_of(x), metadata) in (("float32", "float32"), ("float16", "float16"))
        if one and (case.inputs[-1].shape[-1] <= 128 or case.name.startswith("ties")):
            found.append(case)
    return tuple(found[::2] if kernel in UNPACKERS else found)


class TestBroken(BrokenKernels):
    """In few configurations, without contraction."""

    kernels = KERNELS
    breaks = BREAKS
    configurations = 24
    contracts = ("off",)

    def few(self, kernel: Kernel, among: str) -> tuple[Case, ...]:
        """Made once."""
        return few(kernel)
