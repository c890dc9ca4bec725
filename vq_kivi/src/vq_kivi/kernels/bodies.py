"""The kernels' texts, in the dialect of docs/kernels/dialect.md."""

from __future__ import annotations

HELPERS = """
// A group's range, scale and zero as the store keeps them. NaN stays NaN; zero has one sign.
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
VQ_FN float kivi_code(float v, float step, float base, float levels) {
  const bool usable = step > 0.0f && step < INFINITY;
  const float q = rint(vq_div(vq_sub(v, base), usable ? step : 1.0f));
  // A NaN fails every comparison, so it becomes 0.
  return usable && q > 0.0f ? (q < levels ? q : levels) : 0.0f;
}
"""

KEEP = """
if (sizeof(M) == 2) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
}
"""
"""Scale and zero as the store keeps them: what the codes are computed from."""

KEYS_RANGE = (
    """
// x (B, H, n, D). One thread owns a group of tokens of one channel; neighbours take neighbouring channels.
const uint heads = uint(x_shape[0]) * uint(x_shape[1]), n = x_shape[2], D = x_shape[3];
const uint groups = n / size, total = heads * groups * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint d = i % D, g = i / D % groups, h = i / D / groups;
  const uint first = (h * n + g * size) * D + d;
  float low = float(x[first]), high = low;
  bool bad = low != low;
  for (uint t = 1u; t < size; ++t) {
    const float v = float(x[first + t * D]);
    bad = bad || v != v;
    low = min(low, v);
    high = max(high, v);
  }
  const float levels = float((1u << bits) - 1u);
  low = bad ? NAN : low == 0.0f ? 0.0f : low;
  high = high == 0.0f ? 0.0f : high;
  float step = bad ? NAN : vq_div(vq_sub(high, low), levels);
"""
    + KEEP
)

PACK_KEYS = (
    KEYS_RANGE
    + """
  // codes (B, H, D, n * bits / 32), scale and zero (B, H, D, n / group).
  const uint words = size * uint(bits) / 32u;
  const uint row = h * D + d;
  uint place = row * groups * words + g * words;
  uint word = 0u, filled = 0u;
  for (uint t = 0u; t < size; ++t) {
    const float v = float(x[first + t * D]);
    const uint q = uint(kivi_code(v, step, low, levels));
    word |= q << filled;
    filled += uint(bits);
    if (filled >= 32u) {
      codes[place] = word;
      place += 1u;
      filled -= 32u;
      word = filled > 0u ? q >> (uint(bits) - filled) : 0u;
    }
  }
  scale[row * groups + g] = M(step);
  zero[row * groups + g] = M(low);
}
"""
)

ROUND_KEYS = (
    KEYS_RANGE
    + """
  for (uint t = 0u; t < size; ++t) {
    const float v = float(x[first + t * D]);
    y[first + t * D] = vq_add(vq_mul(kivi_code(v, step, low, levels), step), low);
  }
}
"""
)

VALUES_RANGE = (
    """
// x (B, H, n, D). A lane owns four neighbouring channels; the lanes of a group find its range by shuffles.
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, total = rows * groups;
const uint lanes = size / 4u, lane = thread_index_in_simdgroup, member = lane % lanes;
const uint unit = (threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup)
                * (32u / lanes) + lane / lanes;
const uint u = min(unit, total - 1u);  // surplus lanes repeat the last group and write nothing
const uint row = u / groups, channel = u % groups * size + member * 4u;
VQ_LOCAL(float, v, 4);
float low = INFINITY, high = -INFINITY;
uint bad = 0u;
for (uint k = 0u; k < 4u; ++k) {
  const float w = float(x[row * D + min(channel + k, D - 1u)]);  // a group that does not fill repeats the edge
  v[k] = w;
  bad |= w != w ? 1u : 0u;
  low = min(low, w);
  high = max(high, w);
}
for (uint o = lanes / 2u; o > 0u; o >>= 1) {
  low = min(low, simd_shuffle_xor(low, o));
  high = max(high, simd_shuffle_xor(high, o));
  bad |= simd_shuffle_xor(bad, o);
}
const float levels = float((1u << bits) - 1u);
low = bad != 0u ? NAN : low == 0.0f ? 0.0f : low;
high = high == 0.0f ? 0.0f : high;
float step = bad != 0u ? NAN : vq_div(vq_sub(high, low), levels);
"""
    + KEEP
)

PACK_VALUES = (
    VALUES_RANGE
    + """
// codes (B, H, n, P * bits / 32), scale and zero (B, H, n, P / group); P is D filled up to whole groups.
// Four codes are `4 * bits` bits of the group's stream, at bit `member * 4 * bits`.
uint mine = 0u;
for (uint k = 0u; k < 4u; ++k) {
  const float w = v[k];
  mine |= uint(kivi_code(w, step, low, levels)) << (k * uint(bits));
}
const uint out = u * (size * uint(bits) / 32u);
if (bits == 3) {
  // 8 lanes make 3 words; a lane's 12 bits may lie across two of them.
  const uint at = member % 8u * 12u;
  for (uint w = 0u; w < 3u; ++w) {
    const uint from = w * 32u;
    uint part = 0u;
    if (at >= from && at < from + 32u) part = mine << (at - from);
    if (at < from && from < at + 12u) part = mine >> (from - at);
    part |= simd_shuffle_xor(part, 1u);
    part |= simd_shuffle_xor(part, 2u);
    part |= simd_shuffle_xor(part, 4u);
    if (unit < total && member % 8u == 0u) codes[out + member / 8u * 3u + w] = part;
  }
} else {
  const uint share = 8u / uint(bits);  // lanes of one word
  mine <<= member % share * 4u * uint(bits) % 32u;
  if (bits < 8) mine |= simd_shuffle_xor(mine, 1u);
  if (bits < 4) mine |= simd_shuffle_xor(mine, 2u);
  if (unit < total && member % share == 0u) codes[out + member / share] = mine;
}
if (unit < total && member == 0u) {
  scale[u] = M(step);
  zero[u] = M(low);
}
"""
)

ROUND_VALUES = (
    VALUES_RANGE
    + """
for (uint k = 0u; k < 4u; ++k) {
  const float w = v[k];
  const float code = kivi_code(w, step, low, levels);
  if (unit < total && channel + k < D) y[row * D + channel + k] = vq_add(vq_mul(code, step), low);
}
"""
)

UNPACK_KEYS = """
// codes (N, H, D, words), scale and zero (N, H, D, groups) -> x (N, H, n, D).
const uint heads = uint(codes_shape[0]) * uint(codes_shape[1]), D = codes_shape[2], words = codes_shape[3];
const uint n = words * 32u / uint(bits), groups = scale_shape[3], total = heads * n * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint d = i % D, t = i / D % n, row = i / D / n * D + d;
  const uint bit = t * uint(bits), place = row * words + bit / 32u, shift = bit % 32u;
  uint q = codes[place] >> shift;
  if (shift + uint(bits) > 32u) q |= codes[place + 1u] << (32u - shift);
  q &= (1u << bits) - 1u;
  const uint group = row * groups + t / (n / groups);
  x[i] = vq_add(vq_mul(float(q), float(scale[group])), float(zero[group]));
}
"""

UNPACK_VALUES = """
// codes (N, H, n, words), scale and zero (N, H, n, groups) -> x (N, H, n, D), D = head_dim.
const uint rows = uint(codes_shape[0]) * uint(codes_shape[1]) * uint(codes_shape[2]), words = codes_shape[3];
const uint groups = scale_shape[3], D = head_dim, total = rows * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint d = i % D, row = i / D;
  const uint bit = d * uint(bits), place = row * words + bit / 32u, shift = bit % 32u;
  uint q = codes[place] >> shift;
  if (shift + uint(bits) > 32u) q |= codes[place + 1u] << (32u - shift);
  q &= (1u << bits) - 1u;
  const uint group = row * groups + d / size;
  x[i] = vq_add(vq_mul(float(q), float(scale[group])), float(zero[group]));
}
"""
