"""turboquant_prod's snippet for the matrix skeleton: codes of one or two bits, then signs, two scales a token.

Codes of two bits are looked up by bytes, see :mod:`vq_turboquant.kernels.tile_matrix`; codes of one bit and the signs
of the sketch become halves of +1 and -1 by a shift and one operation a pair.  A score is s (L x + g y) in float32, x
and y being the sums of the codes and of the signs, s and g the stored scale and gap, L what the codebook is scaled by.

Codes of three bits (``bits=4``) have none here: they fill neither a byte nor half of one, which permutations of bytes
look up; sizes and signs would have to be two planes of words.

Error, against float32 attention on the decoded codes: a centroid is off by 1e-4 of itself at most, the query's parts
and the weights by 2^-11. Relative L2 stays below 2e-3 for normal queries; it grows with the scores' spread, as that of
float16 keys does.
"""

from __future__ import annotations

from typing import Any

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.skeleton.matrix import MatrixField, MatrixSnippet
from vq_turboquant.kernels import tile_matrix
from vq_turboquant.prod import State, no_tiles

SIGNS = """
VQ_FN float matrix_fold(uint) { return 1.0f; }
// Bits j and 16 + j of a word, 1 for +1, as halves.
VQ_FN uint prod_sign(uint word, uint j) { return (word << (15u - j) & 0x80008000u) ^ 0xbc00bc00u; }
// 16 tokens, of words `low` and `high`, by the 16 signs of places j and j + 1.
VQ_FN float4 prod_sign_mma(float4 c, uint low, uint high, uint j, uint b0, uint b1) {
  const uint a0 = prod_sign(low, j), a1 = prod_sign(high, j), a2 = prod_sign(low, j + 1u), a3 = prod_sign(high, j + 1u);
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
}
"""
LOOKED_UP = """
// 16 tokens, of words `low` and `high`, by the 16 channels of a look-up.
VQ_FN float4 prod_code_mma(float4 c, uint low, uint high, uint l, uint b0, uint b1) {
  const uint2 one = tile_k_pairs(low, l), two = tile_k_pairs(high, l);
  return vq_mma_m16n8k16(c, one.x, two.x, one.y, two.y, b0, b1);
}
"""
CODES = {
    2: """
    VQ_UNROLL
    for (uint x = 0u; x < DIM / 64u; ++x) {
      const uint4 w = vq_view<uint4>(step + (K_CODES_AT + u * K_CODES_WORDS))[x * 32u + lane];
      VQ_UNROLL
      for (uint l = 0u; l < 4u; ++l) {
        const uint b0 = query[x * 8u + 2u * l], b1 = query[x * 8u + 2u * l + 1u];
        c0 = prod_code_mma(c0, w.x, w.y, l, b0, b1);
        c1 = prod_code_mma(c1, w.z, w.w, l, b0, b1);
      }
    }
""",
    1: """
    const uint4 w = vq_view<uint4>(step + (K_CODES_AT + u * K_CODES_WORDS))[lane];
    VQ_UNROLL
    for (uint j = 0u; j < 16u; j += 2u) {
      c0 = prod_sign_mma(c0, w.x, w.y, j, query[j], query[j + 1u]);
      c1 = prod_sign_mma(c1, w.z, w.w, j, query[j], query[j + 1u]);
    }
""",
}
SCORES = """
VQ_FN float4 prod_whole(float4 x, float4 y, uint scale, uint gap) {
  const float2 s = matrix_floats(scale, half(0.0f)), g = matrix_floats(gap, half(0.0f));
  return vq_float4(s.x * fma(y.x, g.x, x.x * LEVEL), s.x * fma(y.y, g.x, x.y * LEVEL),
                   s.y * fma(y.z, g.y, x.z * LEVEL), s.y * fma(y.w, g.y, x.w * LEVEL));
}
VQ_FN void matrix_scores(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) query, VQ_LOCAL_PTR(float4) c) {
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    float4 c0 = vq_float4(0.0f, 0.0f, 0.0f, 0.0f), c1 = c0, y0 = c0, y1 = c0;
CODES
    const uint4 v = vq_view<uint4>(step + (K_SKETCH_AT + u * K_SKETCH_WORDS))[lane];
    VQ_UNROLL
    for (uint j = 0u; j < 16u; j += 2u) {
      const uint b0 = query[DIM / 8u + j], b1 = query[DIM / 8u + j + 1u];
      y0 = prod_sign_mma(y0, v.x, v.y, j, b0, b1);
      y1 = prod_sign_mma(y1, v.z, v.w, j, b0, b1);
    }
    const uint2 s = vq_view<uint2>(step + (K_SCALE_AT + u * K_SCALE_WORDS))[lane / 4u];
    const uint2 g = vq_view<uint2>(step + (K_GAP_AT + u * K_GAP_WORDS))[lane / 4u];
    c[2u * u] = prod_whole(c0, y0, s.x, g.x);
    c[2u * u + 1u] = prod_whole(c1, y1, s.y, g.y);
  }
}
"""


def snippet(state: State) -> MatrixSnippet:
    """The snippet of a layer's keys.

    Raises:
        UnsupportedShapeError: it has none, and why.
    """
    reason = no_tiles(state)
    if reason:
        raise UnsupportedShapeError(f"turboquant_prod has no matrix snippet here: {reason}")
    dim, bits = state.dim, state.bits
    levels: Any = state.levels.tolist()
    if bits == 2:
        table, level = tile_matrix.look_up("k", tuple(levels[:2]))
        text = table + SIGNS + LOOKED_UP
    else:
        text, level = SIGNS, levels[1]
    text += SCORES.replace("CODES\n", CODES[bits])
    for word, value in {"DIM": f"{dim}u", "LEVEL": f"{level:.9e}f"}.items():
        text = text.replace(word, value)
    words = {"codes": dim * bits, "sketch": state.signs}
    fields = [MatrixField(name, "uint32", size) for name, size in words.items()]
    fields += [MatrixField(name, "float16", 16) for name in ("scale", "gap")]
    name, width = f"turboquant_prod{bits + 1}_k{dim}", dim + state.signs
    return MatrixSnippet("keys", name, dim, tuple(fields), text, width=width, prepare=state.prepare_query)
