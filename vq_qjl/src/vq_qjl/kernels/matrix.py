"""QJL's snippet for the matrix skeleton: signs as halves of +1 and -1 against the sketched query, a norm a token.

A pair of signs takes a shift and one operation of three operands. The norm multiplies the score, in float32.

Error, against float32 attention on the decoded signs: the sketched query is rounded to halves, 2^-11 of itself at most,
and so are the weights. Relative L2 stays below 2e-3 for normal queries; it grows with the scores' spread, as that of
float16 keys does.
"""

from __future__ import annotations

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.skeleton.matrix import MatrixField, MatrixSnippet
from vq_qjl.kernels.device import CHUNK, declines
from vq_qjl.method import Qjl

KEYS = """
VQ_FN float matrix_fold(uint) { return 1.0f; }
// Bits j and 16 + j of a word, 1 for +1, as halves.
VQ_FN uint qjl_pair(uint word, uint j) { return (word << (15u - j) & 0x80008000u) ^ 0xbc00bc00u; }
// 16 tokens, of words `low` and `high`, by the 16 signs of places j and j + 1.
VQ_FN float4 qjl_mma(float4 c, uint low, uint high, uint j, uint b0, uint b1) {
  const uint a0 = qjl_pair(low, j), a1 = qjl_pair(high, j), a2 = qjl_pair(low, j + 1u), a3 = qjl_pair(high, j + 1u);
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
}
VQ_FN void matrix_scores(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) query, VQ_LOCAL_PTR(float4) c) {
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    float4 c0 = vq_float4(0.0f, 0.0f, 0.0f, 0.0f), c1 = c0;
    VQ_UNROLL
    for (uint x = 0u; x < CHUNKS; ++x) {
      const uint4 w = vq_view<uint4>(step + (K_SIGNS_AT + u * K_SIGNS_WORDS))[x * 32u + lane];
      VQ_UNROLL
      for (uint j = 0u; j < 16u; j += 2u) {
        const uint b0 = query[x * 16u + j], b1 = query[x * 16u + j + 1u];
        c0 = qjl_mma(c0, w.x, w.y, j, b0, b1);
        c1 = qjl_mma(c1, w.z, w.w, j, b0, b1);
      }
    }
    const uint2 s = vq_view<uint2>(step + (K_WEIGHT_AT + u * K_WEIGHT_WORDS))[lane / 4u];
    const float2 s0 = matrix_floats(s.x, half(0.0f)), s1 = matrix_floats(s.y, half(0.0f));
    c[2u * u] = vq_float4(c0.x * s0.x, c0.y * s0.x, c0.z * s0.y, c0.w * s0.y);
    c[2u * u + 1u] = vq_float4(c1.x * s1.x, c1.y * s1.x, c1.z * s1.y, c1.w * s1.y);
  }
}
"""


def snippet(state: Qjl) -> MatrixSnippet:
    """The snippet of a layer's keys.

    Raises:
        UnsupportedShapeError: it has none, and why.
    """
    reason = declines(state)
    if reason:
        raise UnsupportedShapeError(f"qjl has no matrix snippet here: {reason}")
    width, dim = state.sketch.width, state.dim
    fields = (MatrixField("signs", "uint32", width), MatrixField("weight", "float16", 16))
    text = KEYS.replace("CHUNKS", f"{width // CHUNK}u")
    name = f"qjl{width}_k{dim}"
    return MatrixSnippet("keys", name, dim, fields, text, width=width, prepare=state.sketch.query)
