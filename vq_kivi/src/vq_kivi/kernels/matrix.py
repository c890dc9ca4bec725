"""KIVI's snippets for the matrix skeleton: codes of 2, 4 or 8 bits in groups of 32, as tensor cores take them.

A code at the last bits of a float16 is code * 2^-24 exactly, so unpacking is one AND for two codes; the powers of two
of the places are folded into the query, or into the sums at the end.  Scales multiply the query (keys) and the weights
(values) in float16; zeros are products of their own.

Error, against float32 attention on the decoded codes: scores carry the rounding of query * scale, sums that of
weights and of weight * scale, each at most 2^-11 of itself and independent.  Relative L2 stays below 2e-3 for normal
queries and keys with channels four times as large; it grows with the scores' spread, as that of float16 keys does.
Scales of values lie between 2^-10 and 2^12: larger ones can overflow float16, for weights reach 2^4; smaller ones
lose bits.
"""

from __future__ import annotations

from functools import cache

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.skeleton.matrix import MatrixField, MatrixSnippet
from vq_kivi.kernels.device import declines
from vq_kivi.method import KiviState

UNPACK = """
// The place, in bits, of a pair in its word's halves, after the shift that brings it into their last ten bits.
VQ_FN uint kivi_SIDE_place(uint j) { return PLACE; }
VQ_FN uint kivi_SIDE_pair(uint word, uint j) {
  return (j < FREE ? word : word >> SHIFT) & (MASK << kivi_SIDE_place(j));
}
"""

KEYS = """
// Channels are multiplied by 4 / 2^place, so that a score is the sum of the products times 2^22.
VQ_FN float matrix_fold(uint pair) { return 4.0f / float(1u << kivi_k_place(pair % PLACES)); }
VQ_FN uint kivi_unfolded(VQ_LOCAL_PTR(uint) query, uint pair) {
  return matrix_times(query[pair], 0x00010001u * (0x3400u + (kivi_k_place(pair % PLACES) << 10)));
}
// 16 tokens, of words `low` and `high`, by the channels of places j and j + 1.
VQ_FN float4 kivi_k_mma(float4 c, uint low, uint high, uint j, uint b0, uint b1) {
  const uint a0 = kivi_k_pair(low, j), a1 = kivi_k_pair(high, j);
  const uint a2 = kivi_k_pair(low, j + 1u), a3 = kivi_k_pair(high, j + 1u);
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
}
VQ_FN void matrix_scores(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) query, VQ_LOCAL_PTR(float4) c) {
  const uint t = lane & 3u;
  // Query by zeros, of the first block in rows 0 to 7, of the second in the rest. Added last: nothing waits for them.
  float4 y = vq_float4(0.0f, 0.0f, 0.0f, 0.0f), z = y;
  VQ_UNROLL
  for (uint x = 0u; x < DIM / 32u; ++x) {
    const uint p = 4u * x;
    const uint4 one = vq_view<uint4>(step + K_ZERO_AT)[p + t];
    const uint4 two = vq_view<uint4>(step + (K_ZERO_AT + (UNIT - 1u) * K_ZERO_WORDS))[p + t];
    const uint q0 = kivi_unfolded(query, p), q1 = kivi_unfolded(query, p + 1u);
    const uint q2 = kivi_unfolded(query, p + 2u), q3 = kivi_unfolded(query, p + 3u);
    y = vq_mma_m16n8k16(y, one.x, two.x, one.y, two.y, q0, q1);
    z = vq_mma_m16n8k16(z, one.z, two.z, one.w, two.w, q2, q3);
  }
  const float unit = 1.0f / 4194304.0f;
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    float4 c0 = vq_float4(0.0f, 0.0f, 0.0f, 0.0f), c1 = c0;
    VQ_LOCAL(uint, scaled, DIM / 8u);
    VQ_UNROLL
    for (uint x = 0u; x < DIM / 32u; ++x) {
      const uint4 s = vq_view<uint4>(step + (K_SCALE_AT + u * K_SCALE_WORDS))[x * 4u + t];
      scaled[4u * x] = matrix_times(query[4u * x], s.x);
      scaled[4u * x + 1u] = matrix_times(query[4u * x + 1u], s.y);
      scaled[4u * x + 2u] = matrix_times(query[4u * x + 2u], s.z);
      scaled[4u * x + 3u] = matrix_times(query[4u * x + 3u], s.w);
    }
    VQ_UNROLL
    for (uint x = 0u; x < DIM / CHUNK; ++x) {
      const uint4 w = vq_view<uint4>(step + (K_CODES_AT + u * K_CODES_WORDS))[x * 32u + lane];
      VQ_UNROLL
      for (uint j = 0u; j < PLACES; j += 2u) {
        const uint b0 = scaled[x * PLACES + j], b1 = scaled[x * PLACES + j + 1u];
        c0 = kivi_k_mma(c0, w.x, w.y, j, b0, b1);
        c1 = kivi_k_mma(c1, w.z, w.w, j, b0, b1);
      }
    }
HALF
    const float add0 = (u == 0u ? y.x + z.x : y.z + z.z) * unit, add1 = (u == 0u ? y.y + z.y : y.w + z.w) * unit;
    c[2u * u] = vq_float4(c0.x + add0, c0.y + add1, c0.z + add0, c0.w + add1);
    c[2u * u + 1u] = vq_float4(c1.x + add0, c1.y + add1, c1.z + add0, c1.w + add1);
  }
}
"""
KEYS_HALF = """
    const uint2 w = vq_view<uint2>(step + (K_CODES_AT + u * K_CODES_WORDS + DIM / CHUNK * 128u))[lane];
    VQ_UNROLL
    for (uint j = 0u; j < PLACES / 2u; j += 2u) {
      const uint b0 = scaled[DIM / CHUNK * PLACES + j], b1 = scaled[DIM / CHUNK * PLACES + j + 1u];
      c0 = kivi_k_mma(c0, w.x, w.y, j, b0, b1);
      c1 = kivi_k_mma(c1, w.x >> 8, w.y >> 8, j, b0, b1);
    }
"""

VALUES = """
// The channels of places j and j + 1 by 16 tokens, of words `low` and `high`.
VQ_FN float4 kivi_v_mma(float4 c, uint low, uint high, uint j, uint b0, uint b1) {
  const uint a0 = kivi_v_pair(low, j), a1 = kivi_v_pair(low, j + 1u);
  const uint a2 = kivi_v_pair(high, j), a3 = kivi_v_pair(high, j + 1u);
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
}
VQ_FN void matrix_values(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) p, VQ_LOCAL_PTR(float4) acc,
                         VQ_LOCAL_PTR(float4) extra) {
  const uint t = lane & 3u, ones = lane < 4u ? 0x3c003c00u : 0u;
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    // Row k of the extra tile: weights by zeros of group k; row 8: the weights.
    uint4 z = vq_uint4(0u, 0u, 0u, 0u);
    if (lane < DIM / 8u) z = vq_view<uint4>(step + (V_ZERO_AT + u * V_ZERO_WORDS))[lane];
    extra[0] = vq_mma_m16n8k16(extra[0], z.x, ones, z.y, ones, p[4u * u], p[4u * u + 1u]);
    extra[0] = vq_mma_m16n8k16(extra[0], z.z, ones, z.w, ones, p[4u * u + 2u], p[4u * u + 3u]);
    VQ_LOCAL(uint, scaled, DIM / 8u);
    VQ_UNROLL
    for (uint x = 0u; x < DIM / 32u; ++x) {
      const uint4 s = vq_view<uint4>(step + (V_SCALE_AT + u * V_SCALE_WORDS))[x * 4u + t];
      scaled[4u * x] = matrix_times(p[4u * u], s.x);
      scaled[4u * x + 1u] = matrix_times(p[4u * u + 1u], s.y);
      scaled[4u * x + 2u] = matrix_times(p[4u * u + 2u], s.z);
      scaled[4u * x + 3u] = matrix_times(p[4u * u + 3u], s.w);
    }
    VQ_UNROLL
    for (uint x = 0u; x < DIM / CHUNK; ++x) {
      const uint4 w = vq_view<uint4>(step + (V_CODES_AT + u * V_CODES_WORDS))[x * 32u + lane];
      VQ_UNROLL
      for (uint j = 0u; j < PLACES; j += 2u) {
        const uint n = (x * PLACES + j) / 2u, s = n / 2u * 4u;
        acc[n] = kivi_v_mma(acc[n], w.x, w.y, j, scaled[s], scaled[s + 1u]);
        acc[n] = kivi_v_mma(acc[n], w.z, w.w, j, scaled[s + 2u], scaled[s + 3u]);
      }
    }
HALF
  }
}
VQ_FN void matrix_finish(uint lane, VQ_LOCAL_PTR(float4) acc, VQ_LOCAL_PTR(float4) extra) {
  VQ_UNROLL
  for (uint n = 0u; n < DIM / 16u; ++n) {
    const uint from = n / 2u * 4u + (lane & 3u);
    const float zero0 = simd_shuffle(extra[0].x, from), zero1 = simd_shuffle(extra[0].y, from);
    const float by = 16777216.0f / float(1u << kivi_v_place(2u * n % PLACES));
    const float next = 16777216.0f / float(1u << kivi_v_place((2u * n + 1u) % PLACES));
    acc[n] = vq_float4(fma(acc[n].x, by, zero0), fma(acc[n].y, by, zero1),
                       fma(acc[n].z, next, zero0), fma(acc[n].w, next, zero1));
  }
}
"""
VALUES_HALF = """
    const uint2 w = vq_view<uint2>(step + (V_CODES_AT + u * V_CODES_WORDS + DIM / CHUNK * 128u))[lane];
    VQ_UNROLL
    for (uint j = 0u; j < PLACES / 2u; j += 2u) {
      const uint n = (DIM / CHUNK * PLACES + j) / 2u, s = n / 2u * 4u;
      acc[n] = kivi_v_mma(acc[n], w.x, w.y, j, scaled[s], scaled[s + 1u]);
      acc[n] = kivi_v_mma(acc[n], w.x >> 8, w.y >> 8, j, scaled[s + 2u], scaled[s + 3u]);
    }
"""
PLACE = {2: "2u * (j < 5u ? j : j - 5u)", 4: "(j & 1u) * 4u", 8: "0u"}
"""Of the places of a word those that lie in the last 10 bits of a half need no shift; the rest share one."""
FREE = {2: 5, 4: 2, 8: 1}


def snippet(state: KiviState) -> MatrixSnippet:
    """The snippet of a layer side.

    Raises:
        UnsupportedShapeError: it has none, and why.
    """
    reason = declines(state)
    if reason:
        raise UnsupportedShapeError(f"kivi has no matrix snippet here: {reason}")
    return _made(state.side, state.bits, state.head_dim)


@cache
def _made(side: str, bits: int, dim: int) -> MatrixSnippet:
    keys, places, chunk = side == "keys", 16 // bits, 128 // bits
    half = (KEYS_HALF if keys else VALUES_HALF) if dim % chunk else ""
    text = (UNPACK + (KEYS if keys else VALUES)).replace("HALF\n", half)
    words = {
        "SIDE": side[0], "PLACES": f"{places}u", "PLACE": PLACE[bits], "FREE": f"{FREE[bits]}u",
        "SHIFT": f"{FREE[bits] * bits}u", "MASK": f"0x{(2**bits - 1) * 0x10001:08x}u",
        "DIM": f"{dim}u", "CHUNK": f"{chunk}u",
    }  # fmt: skip
    for word, value in words.items():
        text = text.replace(word, value)
    fields = (MatrixField("codes", "uint32", dim * bits), MatrixField("scale", "float16", dim // 2),
              MatrixField("zero", "float16", dim // 2))  # fmt: skip
    return MatrixSnippet(side, f"kivi{bits}_{side[0]}{dim}", dim, fields, text, 4194304.0)  # type: ignore[arg-type]
