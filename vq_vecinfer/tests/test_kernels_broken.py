"""The parity tests can fail: each kernel's text broken in many ways, each break seen in the configurations."""

from __future__ import annotations

from collections.abc import Iterator

from vq_core.kernels import Case, Kernel
from vq_core.testing import Break, BrokenKernels, variants
from vq_vecinfer.kernels import DEQUANTIZE, KERNELS, QUANTIZE, QUANTIZE_KEYS

BREAKS = [
    Break("the last of equals", (QUANTIZE,), "if (sum > best)", "if (sum >= best)"),
    Break("no half norms", (QUANTIZE,), "float sum = -halves[at];", "float sum = 0.0f;"),
    Break("whole norms", (QUANTIZE,), "float sum = -halves[at];", "float sum = -2.0f * halves[at];"),
    Break("plain multiply and add", (QUANTIZE,), "vq_add(sum, vq_mul(v[j], codebook[at * uint(sub) + uint(j)]))",
          "sum + v[j] * codebook[at * uint(sub) + uint(j)]", "fast"),
    Break("channels from the last", (QUANTIZE,), "vq_mul(v[j], codebook[at * uint(sub) + uint(j)])",
          "vq_mul(v[sub - 1 - j], codebook[at * uint(sub) + uint(sub - 1 - j)])"),
    Break("infinity is a number", (QUANTIZE,), "fabs(w) < INFINITY", "w == w"),
    Break("NaN is a number", (QUANTIZE,), "? code : 0u;", "|| !finite ? code + uint(!finite) : 0u;"),
    Break("nothing cut", (QUANTIZE,), "min(max(w, -1e30f), 1e30f)", "w"),
    Break("one centroid short", (QUANTIZE,), "c < C; ++c", "c < C - 1u; ++c"),
    Break("the codebook of the first place", (QUANTIZE,), "books == 1u ? 0u : own % M", "books == 1u ? 0u : 0u"),
    Break("the codebook of another place", (QUANTIZE,), "own % M", "(own + 1u) % M"),
    Break("a neighbour's numbers", (QUANTIZE,), "x[own * uint(sub) + uint(j)]", "x[(own ^ 1u) * uint(sub) + uint(j)]"),
    Break("a code across two words cut", (QUANTIZE,), "found[i] >> (begin - bit)", "0u"),
    Break("a wrong shift", (QUANTIZE,), "found[i] << (bit - begin)", "found[i] << ((bit - begin) & 24u)"),
    Break("no barrier", (QUANTIZE,), "threadgroup_barrier(mem_flags::mem_threadgroup);", "",
          error="starts undefined"),
    Break("words of another threadgroup", (QUANTIZE,), "grid.x * 4u * bits + thread", "grid.x * 3u * bits + thread",
          error="has one writer"),
    Break("the last of equals", (QUANTIZE_KEYS,), "if (sum > best)", "if (sum >= best)"),
    Break("not smoothed", (QUANTIZE_KEYS,), "vq_mul(float(x[row * D + i]), inverse[pair % heads * D + i])",
          "float(x[row * D + i]) + 0.0f * inverse[0]"),
    Break("the smoothing of another head", (QUANTIZE_KEYS,), "inverse[pair % heads * D + i]",
          "inverse[(heads - 1u - pair % heads) * D + i]"),
    Break("the other way round", (QUANTIZE_KEYS,), "hadamard(all + t * D, D, lane, false)",
          "hadamard(all + t * D, D, lane, true)"),
    Break("a stride short", (QUANTIZE_KEYS,), "stride < run;", "stride < run / 2u;"),
    Break("the mean left in", (QUANTIZE_KEYS,), "centred != 0u", "centred > 1u"),
    Break("the mean before the transform", (QUANTIZE_KEYS,),
          "vq_mul(float(x[row * D + i]), inverse[pair % heads * D + i]);",
          "vq_sub(vq_mul(float(x[row * D + i]), inverse[pair % heads * D + i]), centred ? mean[pair * D + i] : 0.0f);"),
    Break("the mean of the first row", (QUANTIZE_KEYS,), "mean[pair * D + i]", "mean[pair % heads * D + i]"),
    Break("the token of another", (QUANTIZE_KEYS,), "row = min(first + t, rows - 1u)",
          "row = rows - 1u - min(first + t, rows - 1u)"),
    Break("the codebook of another place", (QUANTIZE_KEYS,), "own % M", "(own + 1u) % M"),
    Break("NaN is a number", (QUANTIZE_KEYS,), "rows * M && finite ? code : 0u",
          "rows * M ? (finite ? code : 1u) : 0u"),
    Break("plain multiply and add", (QUANTIZE_KEYS,),
          "vq_add(sum, vq_mul(v[j], codebook[at * uint(sub) + uint(j)]))",
          "sum + v[j] * codebook[at * uint(sub) + uint(j)]", "fast"),
    Break("a code across two words cut", (QUANTIZE_KEYS,), "found[i] >> (begin - bit)", "0u"),
    Break("no barrier before codes", (QUANTIZE_KEYS,),
          "}\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nfor (uint own", "}\nfor (uint own",
          error="No barrier lies between"),
    Break("tokens of half of a word", (QUANTIZE_KEYS,), "32u >> min(uint(ctz(M * bits)), 5u)",
          "max(1u, 16u >> min(uint(ctz(M * bits)), 5u))"),
    Break("the codebook of the first place", (DEQUANTIZE,), "i % M * C", "0u * M"),
    Break("the codebook of another place", (DEQUANTIZE,), "i % M * C", "(i + 1u) % M * C"),
    Break("a code across two words cut", (DEQUANTIZE,), "if (shift + bits > 32u)", "if (shift + bits > 40u)"),
    Break("a wrong shift", (DEQUANTIZE,), "<< (32u - shift)", "<< (31u - shift)"),
    Break("a mask one bit too narrow", (DEQUANTIZE,), "code & (C - 1u)", "code & (C / 2u - 1u)"),
    Break("the next word", (DEQUANTIZE,), "at = bit / 32u", "at = min(bit / 32u + 1u, total * bits / 32u - 1u)"),
    Break("one channel for all", (DEQUANTIZE,), "codebook[code * uint(sub) + uint(j)]", "codebook[code * uint(sub)]"),
    Break("spare threads write", (DEQUANTIZE,), "if (i < total)", "if (i < total + 1u)", error="Missing bound check"),
]  # fmt: skip


class TestBroken(BrokenKernels):
    """In the configurations of one variant of each kernel."""

    kernels = KERNELS
    breaks = BREAKS
    configurations = 18
    order = 1

    def few(self, kernel: Kernel, among: str) -> Iterator[Case]:
        """Four channels a code, of float32 numbers."""
        return (case for case in variants(kernel, sub=4) if kernel.name == DEQUANTIZE.name or "float32" in case.name)
