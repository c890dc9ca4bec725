"""VecInfer's snippets for the matrix skeleton: centroids as halves in threadgroup memory, two of which a lane fetches.

A centroid is four words of two halves, a codebook of 256 is 4 KiB: one for all places, or one each.  All centroids are
scaled by a power of two so that the largest number lies in [2^14, 2^15): its undoing is a part of the prepared query
(keys) and the last word of the constants (values).  A code is fetched 4 times by a warp, one pair of its channels a
lane: 8 tokens or places at once, whose centroids lie in whatever banks they do.

Keys: a lane's pair is what the fragment takes.  Values: a pair is two channels of one token, the fragment takes two
tokens of one channel, so two pairs are exchanged by two permutations; row g of a tile is then channel 2 g and row g + 8
the next one, which ``matrix_finish`` puts in order.

Error, against float32 attention on the decoded codes: a centroid's numbers are rounded to halves, 2^-11 of themselves
at most (those 2^29 times smaller than the largest lose more), and so are the query and the weights. Relative L2 stays
below 2e-3 for normal queries; it grows with the scores' spread, as that of float16 keys does.
"""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.skeleton.matrix import MatrixField, MatrixSnippet
from vq_vecinfer.kernels import query
from vq_vecinfer.kernels.device import SUB, declines
from vq_vecinfer.method import VecInfer

PAIR = """
// Two halves of the centroid whose code is byte k of a word; `own` points to those of code 0.
VQ_FN uint vecinfer_SIDE_pair(VQ_SHARED_PTR(uint) own, uint word, uint k) {
  return own[(k == 0u ? word << 2 : word >> (8u * k - 2u)) & 0x3fcu];
}
"""

KEYS = """
VQ_FN float matrix_fold(uint) { return 1.0f; }
// 16 tokens, of words `low` and `high`, by the 16 channels of places k and k + 1.
VQ_FN float4 vecinfer_k_mma(float4 c, VQ_SHARED_PTR(uint) own, uint low, uint high, uint k, uint b0, uint b1) {
  VQ_SHARED_PTR(uint) next = own + BOOK;
  const uint a0 = vecinfer_k_pair(own, low, k), a1 = vecinfer_k_pair(own, high, k);
  const uint a2 = vecinfer_k_pair(next, low, k + 1u), a3 = vecinfer_k_pair(next, high, k + 1u);
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
}
VQ_FN void matrix_scores(VQ_SHARED_PTR(uint) kept, VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) query,
                         VQ_LOCAL_PTR(float4) c) {
  VQ_SHARED_PTR(uint) mine = kept + (lane & 3u);
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    float4 c0 = vq_float4(0.0f, 0.0f, 0.0f, 0.0f), c1 = c0;
    VQ_UNROLL
    for (uint x = 0u; x < DIM / 32u; ++x) {
      const uint4 w = vq_view<uint4>(step + (K_CODES_AT + u * K_CODES_WORDS))[x * 8u + lane / 4u];
      VQ_UNROLL
      for (uint k = 0u; k < 4u; k += 2u) {
        const uint place = 4u * x + k, b0 = query[place], b1 = query[place + 1u];
        c0 = vecinfer_k_mma(c0, mine + place * BOOK, w.x, w.y, k, b0, b1);
        c1 = vecinfer_k_mma(c1, mine + place * BOOK, w.z, w.w, k, b0, b1);
      }
    }
    c[2u * u] = c0;
    c[2u * u + 1u] = c1;
  }
}
"""

VALUES = """
// The 16 channels of two places by the 16 tokens of a word.
VQ_FN float4 vecinfer_v_mma(float4 c, VQ_SHARED_PTR(uint) own, uint word, uint b0, uint b1) {
  const uint one = vecinfer_v_pair(own, word, 0u), two = vecinfer_v_pair(own, word, 1u);
  const uint three = vecinfer_v_pair(own, word, 2u), four = vecinfer_v_pair(own, word, 3u);
  const uint a0 = vq_permute(one, two, 0x5410u), a1 = vq_permute(one, two, 0x7632u);
  const uint a2 = vq_permute(three, four, 0x5410u), a3 = vq_permute(three, four, 0x7632u);
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
}
VQ_FN void matrix_values(VQ_SHARED_PTR(uint) kept, VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) p,
                         VQ_LOCAL_PTR(float4) acc, VQ_LOCAL_PTR(float4) extra) {
  const uint ones = lane < 4u ? 0x3c003c00u : 0u;
  VQ_SHARED_PTR(uint) mine = kept + (lane / 4u & 3u) + lane / 16u * BOOK;
  VQ_UNROLL
  for (uint u = 0u; u < UNIT; ++u) {
    // Row 8 of the extra tile: the weights.
    extra[0] = vq_mma_m16n8k16(extra[0], 0u, ones, 0u, ones, p[4u * u], p[4u * u + 1u]);
    extra[0] = vq_mma_m16n8k16(extra[0], 0u, ones, 0u, ones, p[4u * u + 2u], p[4u * u + 3u]);
    const uint p0 = p[4u * u], p1 = p[4u * u + 1u], p2 = p[4u * u + 2u], p3 = p[4u * u + 3u];
    VQ_UNROLL
    for (uint x = 0u; x < DIM / 32u; ++x) {
      const uint4 w = vq_view<uint4>(step + (V_CODES_AT + u * V_CODES_WORDS))[(x * 2u + lane / 16u) * 4u + (lane & 3u)];
      VQ_SHARED_PTR(uint) one = mine + 4u * x * BOOK;
      VQ_SHARED_PTR(uint) two = mine + (4u * x + 2u) * BOOK;
      acc[2u * x] = vecinfer_v_mma(acc[2u * x], one, w.x, p0, p1);
      acc[2u * x + 1u] = vecinfer_v_mma(acc[2u * x + 1u], two, w.z, p0, p1);
      acc[2u * x] = vecinfer_v_mma(acc[2u * x], one, w.y, p2, p3);
      acc[2u * x + 1u] = vecinfer_v_mma(acc[2u * x + 1u], two, w.w, p2, p3);
    }
  }
}
VQ_FN void matrix_finish(VQ_SHARED_PTR(uint) kept, uint lane, VQ_LOCAL_PTR(float4) acc, VQ_LOCAL_PTR(float4) extra) {
  const float level = as_type<float>(uint(kept[WORDS]));
  // Channel g was in row g / 2, in its second half where g is odd; channel g + 8 four rows below.
  const uint from = lane / 8u * 4u + (lane & 3u);
  const bool odd = (lane & 4u) != 0u;
  VQ_UNROLL
  for (uint n = 0u; n < DIM / 16u; ++n) {
    const float x0 = simd_shuffle(acc[n].x, from), x1 = simd_shuffle(acc[n].x, from + 16u);
    const float y0 = simd_shuffle(acc[n].y, from), y1 = simd_shuffle(acc[n].y, from + 16u);
    const float z0 = simd_shuffle(acc[n].z, from), z1 = simd_shuffle(acc[n].z, from + 16u);
    const float w0 = simd_shuffle(acc[n].w, from), w1 = simd_shuffle(acc[n].w, from + 16u);
    acc[n] = vq_float4((odd ? z0 : x0) * level, (odd ? w0 : y0) * level, (odd ? z1 : x1) * level,
                       (odd ? w1 : y1) * level);
  }
}
"""
FULL = 15
"""The largest number of a scaled codebook lies below 2^15: float16 ends at 65504."""
MOST_POWER = 100


def power_of(codebook: mx.array) -> int:
    """The power of two that halves are scaled by."""
    largest = float(mx.abs(codebook).max().item())  # type: ignore[arg-type]
    if not 0 < largest < math.inf:
        return 0
    return max(-MOST_POWER, min(MOST_POWER, FULL - math.frexp(largest)[1]))


def constants(codebook: mx.array, power: int) -> mx.array:
    """Scaled halves, two in a word, and what undoes the scale as a float32, filled up to four words."""
    halves = (codebook * 2.0**power).astype(mx.float16).reshape(-1).view(mx.uint32)
    made = mx.concatenate([halves, mx.array([2.0**-power, 0, 0, 0], mx.float32).view(mx.uint32)])
    mx.eval(made)
    return made


def snippet(state: VecInfer) -> MatrixSnippet:
    """The snippet of a layer side.

    Raises:
        UnsupportedShapeError: it has none, and why.
    """
    reason = declines(state)
    if reason:
        raise UnsupportedShapeError(f"vecinfer has no matrix snippet here: {reason}")
    keys, dim, power = state.side == "keys", state.head_dim, power_of(state.codebook)
    book = constants(state.codebook, power)
    apart = state.codebook.shape[0] > 1
    text = PAIR + (KEYS if keys else VALUES)
    words = {"SIDE": state.side[0], "DIM": f"{dim}u", "BOOK": f"{1024 if apart else 0}u", "WORDS": f"{book.size - 4}u"}
    for word, value in words.items():
        text = text.replace(word, value) if word != "WORDS" else text.replace("[WORDS]", f"[{value}]")
    return MatrixSnippet(
        state.side,
        f"vecinfer{dim // SUB if apart else 1}_{state.side[0]}{dim}",
        dim,
        (MatrixField("codes", "uint32", dim),),
        text,
        constants={"book": book},
        prepare=partial(query.prepare, state, factor=2.0**-power) if keys else None,
    )
