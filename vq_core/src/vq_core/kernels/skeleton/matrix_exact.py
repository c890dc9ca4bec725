"""The matrix skeleton's text for exact tokens: the same products, on keys and values as the model made them.

A warp takes 16 tokens at once. Channels of a product may come in any order that both factors share, so a lane reads
eight neighbours at a time: of keys, those of its token; of values, those of four tokens, which become pairs of tokens.
Where a step brings tokens that have not joined the window yet, the same registers are written as the next window.
Weights of bfloat16 values are two bfloat16 numbers each: one alone has eight bits.
"""

from __future__ import annotations

UNIT = 16
"""Tokens that a warp takes at once."""
TYPES = {"float16": "half", "bfloat16": "bfloat"}

HEADER = """
VQ_FN float4 matrix_exact_mma(float4 c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1, KIND(0.0f));
}
// Eight neighbours of 16 bits; at once where they lie so.
VQ_FN uint4 matrix_eight(VQ_GLOBAL(KIND) from, bool wide) {
  if (wide) return vq_view<uint4>(from)[0];
  VQ_GLOBAL(ushort) one = vq_view<ushort>(from);
  const uint a = uint(one[0]) | uint(one[1]) << 16, b = uint(one[2]) | uint(one[3]) << 16;
  const uint c = uint(one[4]) | uint(one[5]) << 16, d = uint(one[6]) | uint(one[7]) << 16;
  return vq_uint4(a, b, c, d);
}
// The first numbers of two pairs, and the second ones.
VQ_FN uint matrix_lows(uint a, uint b) { return (a & 0xffffu) | b << 16; }
VQ_FN uint matrix_highs(uint a, uint b) { return a >> 16 | (b & 0xffff0000u); }
"""

EXACT = """
const int first = rows[b * 8u + 1u], recent = rows[b * 8u + 2u], pad = rows[b * 8u + 3u], hidden = rows[b * 8u + 4u];
VQ_LOCAL(uint, query, PAIRS);  // of row g: channels 32 x + 8 t and seven more in four registers from 4 x on
{
  const uint m = m0 + min(g, held - 1u), group = m / L;
  const uint from = (((b * Hq + h * (Hq / H) + group) * L + (m - group * L)) * D + 8u * t) / 2u;
  VQ_UNROLL
  for (uint i = 0u; i < PAIRS; ++i) query[i] = vq_view<uint>(q)[from + i / 4u * 16u + (i & 3u)];
}
const float scale = as_type<float>(scale_bits);
const uint row0 = min(m0 + 2u * t, M - 1u), row1 = min(m0 + 2u * t + 1u, M - 1u);
const int last0 = int(length) - (causal != 0u ? int(L - row0 % L) : 0);
const int last1 = int(length) - (causal != 0u ? int(L - row1 % L) : 0);
// The newest `fresh` tokens of the window are new_k and new_v; with them the window is written anew, by those who read.
const uint kept = exact_k_shape[2], width = kept + fresh, near = (uint(recent) + 15u) / 16u;
const uint units = near + (uint(first) + 15u) / 16u;
for (uint n = turn * WARPS + warp; n < units; n += exact_splits * WARPS) {
  const bool old = n >= near;
  const uint unit = old ? n - near : n, count = min(16u, uint(old ? first : recent) - unit * 16u);
  const uint place = unit * 16u + (old ? 0u : width - uint(recent));
  const uint above = (b * H + h) * (old ? uint(sink_k_shape[2]) : kept) + place;
  const uint edge = old ? 16u : kept - min(kept, place);
  const uint late = old ? 0u : (b * H + h) * fresh + place - min(kept, place);
  const int column = old ? pad - hidden + int(place) : int(length) - int(width) + int(place);
  VQ_GLOBAL(KIND) from_k = (old ? sink_k : exact_k) + above * D;
  VQ_GLOBAL(KIND) from_v = (old ? sink_v : exact_v) + above * V;
  const bool wide = vq_aligned<uint4>(from_k) && vq_aligned<uint4>(from_v) && vq_aligned<uint4>(new_k) &&
                    vq_aligned<uint4>(new_v);
  // All loads are under way before the first is used: each waits as long as a step of packed tokens takes.
  VQ_LOCAL(uint, k, PAIRS * 2);
  VQ_LOCAL(uint, r, TILES * 4);
  VQ_UNROLL
  for (uint x = 0u; x < PAIRS / 2; ++x) {
    const uint token = min(g + 8u * (x & 1u), count - 1u), c = 8u * t + x / 2u * 32u;
    const uint4 four = matrix_eight((token < edge ? from_k + token * D : new_k + (late + token - edge) * D) + c, wide);
    k[4u * x] = four.x;
    k[4u * x + 1u] = four.y;
    k[4u * x + 2u] = four.z;
    k[4u * x + 3u] = four.w;
  }
  VQ_UNROLL
  for (uint y = 0u; y < TILES / RUN * 4u; ++y) {
    const uint s = y & 3u, token = min(2u * t + (s & 1u) + 8u * (s >> 1), count - 1u);
    const uint c = FOUR * 8u * (y / 4u) + FOUR * g;
    VQ_GLOBAL(KIND) from = (token < edge ? from_v + token * V : new_v + (late + token - edge) * V) + c;
    READ
  }
  if (fresh != 0u && !old && m0 == 0u) {
    // After all loads: none of these would be asked for before a store that might change what it reads.
    const uint to = (b * H + h) * width + place;
    VQ_UNROLL
    for (uint x = 0u; x < PAIRS / 2; ++x) {
      const uint token = g + 8u * (x & 1u), c = 8u * t + x / 2u * 32u;
      const uint4 four = vq_uint4(k[4u * x], k[4u * x + 1u], k[4u * x + 2u], k[4u * x + 3u]);
      if (token < count) vq_view<uint4>(grown_k)[((to + token) * D + c) / 8u] = four;
    }
    VQ_UNROLL
    for (uint y = 0u; y < TILES / RUN * 4u; ++y) {
      const uint s = y & 3u, token = 2u * t + (s & 1u) + 8u * (s >> 1), c = FOUR * 8u * (y / 4u) + FOUR * g;
      WRITE
    }
  }
  float4 y = vq_float4(0.0f, 0.0f, 0.0f, 0.0f), z = y;
  VQ_UNROLL
  for (uint x = 0u; x < PAIRS / 4; ++x) {
    const uint o = 8u * x;
    y = matrix_exact_mma(y, k[o], k[o + 4u], k[o + 1u], k[o + 5u], query[4u * x], query[4u * x + 1u]);
    z = matrix_exact_mma(z, k[o + 2u], k[o + 6u], k[o + 3u], k[o + 7u], query[4u * x + 2u], query[4u * x + 3u]);
  }
  const int a = column + int(g), d = a + 8;
  const bool may = g < count && a >= pad, might = g + 8u < count && d >= pad;
  const float s0 = may && a <= last0 ? (y.x + z.x) * scale : -INFINITY;
  const float s1 = may && a <= last1 ? (y.y + z.y) * scale : -INFINITY;
  const float s2 = might && d <= last0 ? (y.z + z.z) * scale : -INFINITY;
  const float s3 = might && d <= last1 ? (y.w + z.w) * scale : -INFINITY;
  float most0 = max(s0, s2), most1 = max(s1, s3);
  VQ_UNROLL
  for (uint o = 4u; o < 32u; o <<= 1) {
    most0 = max(most0, simd_shuffle_xor(most0, o));
    most1 = max(most1, simd_shuffle_xor(most1, o));
  }
  most0 = max(most0, top0);
  most1 = max(most1, top1);
  const float less0 = vq_exp2_fast(top0 - most0), less1 = vq_exp2_fast(top1 - most1);
  top0 = most0;
  top1 = most1;
  VQ_UNROLL
  for (uint i = 0u; i < TILES; ++i)
    acc[i] = vq_float4(acc[i].x * less0, acc[i].y * less1, acc[i].z * less0, acc[i].w * less1);
  extra[0] = vq_float4(extra[0].x * less0, extra[0].y * less1, extra[0].z * less0, extra[0].w * less1);
  const float w0 = vq_exp2_fast(s0 - top0), w1 = vq_exp2_fast(s1 - top1);
  const float w2 = vq_exp2_fast(s2 - top0), w3 = vq_exp2_fast(s3 - top1);
  WEIGHTS
  const uint ones = lane < 4u ? ONES : 0u;
  SUMS
  VQ_UNROLL
  for (uint i = 0u; i < TILES; ++i) {
    const uint o = i / RUN * (4u * RUN) + i % RUN;
    const uint a0 = matrix_lows(r[o], r[o + RUN]), a1 = matrix_highs(r[o], r[o + RUN]);
    const uint a2 = matrix_lows(r[o + 2u * RUN], r[o + 3u * RUN]);
    const uint a3 = matrix_highs(r[o + 2u * RUN], r[o + 3u * RUN]);
    ADD
  }
}
"""

WEIGHTS = """const uint p0 = vq_transpose_8x8(vq_half_pair(w0, w1)), p1 = vq_transpose_8x8(vq_half_pair(w2, w3));"""
WEIGHTS_TWICE = """
  const uint a01 = vq_bfloat_pair(w0, w1), a23 = vq_bfloat_pair(w2, w3);
  const float r0 = w0 - as_type<float>(a01 << 16), r1 = w1 - as_type<float>(a01 & 0xffff0000u);
  const float r2 = w2 - as_type<float>(a23 << 16), r3 = w3 - as_type<float>(a23 & 0xffff0000u);
  const uint p0 = vq_transpose_8x8(a01), p1 = vq_transpose_8x8(a23);
  const uint rest0 = vq_transpose_8x8(vq_bfloat_pair(r0, r1)), rest1 = vq_transpose_8x8(vq_bfloat_pair(r2, r3));
"""
EIGHT = """
    const uint4 four = matrix_eight(from, wide);
    r[4u * y] = four.x;
    r[4u * y + 1u] = four.y;
    r[4u * y + 2u] = four.z;
    r[4u * y + 3u] = four.w;
"""
PAIR = "r[y] = vq_view<uint>(from)[0];"
WRITE_EIGHT = """
      const uint4 four = vq_uint4(r[4u * y], r[4u * y + 1u], r[4u * y + 2u], r[4u * y + 3u]);
      if (token < count) vq_view<uint4>(grown_v)[((to + token) * V + c) / 8u] = four;
"""
WRITE_PAIR = "if (token < count) vq_view<uint>(grown_v)[((to + token) * V + c) / 2u] = r[y];"


def header(dtype: str) -> str:
    """Functions of exact tokens of a dtype."""
    return HEADER.replace("KIND", TYPES[dtype])


def text(dtype: str, value_dim: int) -> str:
    """The text, with the names that :mod:`vq_core.kernels.skeleton.matrix_text` fills in."""
    twice = dtype == "bfloat16"

    def product(to: str, a: str) -> str:
        lines = [f"{to} = matrix_exact_mma({to}, {a}, {p}0, {p}1);" for p in ("p", "rest")]
        return "\n    ".join(lines if twice else lines[:1])

    run = run_of(value_dim)
    parts = {
        "WEIGHTS": WEIGHTS_TWICE if twice else WEIGHTS,
        "SUMS": product("extra[0]", "0u, ones, 0u, ones"),
        "ADD": product("acc[i]", "a0, a1, a2, a3"),
        "READ": EIGHT if run == 4 else PAIR,
        "WRITE": WRITE_EIGHT if run == 4 else WRITE_PAIR,
        "ONES": "0x3f803f80u" if twice else "0x3c003c00u",
        "FOUR": f"{2 * run}u", "RUN": f"{run}u", "KIND": TYPES[dtype],
    }  # fmt: skip
    found = EXACT
    for word, part in parts.items():
        found = found.replace(word, part)
    return found


def run_of(value_dim: int) -> int:
    """Pairs of neighbouring channels that a lane reads at once: a tile of 16 channels holds one of each of 8 lanes."""
    return 4 if value_dim % 64 == 0 else 1


def channel(value_dim: int) -> str:
    """Text: the channel of row g of tile i; row g + 8 is the next one."""
    run = run_of(value_dim)
    return f"i / {run}u * {16 * run}u + {2 * run}u * g + i % {run}u * 2u"
