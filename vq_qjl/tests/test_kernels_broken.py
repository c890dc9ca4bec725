"""The parity tests can fail: each kernel's text broken in many ways, each break seen in the configurations."""

from __future__ import annotations

from collections.abc import Iterator

from vq_core.kernels import Case, Kernel
from vq_core.testing import Break, BrokenKernels, variants
from vq_qjl.kernels import DECODE, DECODE_OUTLIERS, ENCODE, ENCODE_OUTLIERS, KERNELS

ENCODERS, DECODERS = (ENCODE, ENCODE_OUTLIERS), (DECODE, DECODE_OUTLIERS)

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


class TestBroken(BrokenKernels):
    """In the configurations of one variant, six at a time."""

    kernels = KERNELS
    breaks = BREAKS
    configurations = 14
    at_once = 6

    def few(self, kernel: Kernel, among: str) -> Iterator[Case]:
        """Signs in bytes, of float32 numbers."""
        return (case for case in variants(kernel, U="uint8") if "float32" in case.name)
