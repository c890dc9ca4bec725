"""The kernels' texts, in the dialect of docs/kernels/dialect.md."""

from __future__ import annotations

HELPERS = """
// Scale and zero as the store keeps them.
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
// The smaller, or the larger, of two numbers; a NaN wins.
VQ_FN float kivi_low(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
VQ_FN float kivi_high(float a, float b) { return a != a ? a : (b > a || b != b ? b : a); }
// rint((v - base) / step), clipped. The product with the inverse is off by less than 3 * 2^-24 of the quotient; where that
// could change the code, the quotient itself is taken.
VQ_FN uint kivi_code(float v, float step, float inverse, float base, float levels) {
  const float a = vq_sub(v, base);
  const float t = vq_mul(a, inverse);
  float q = rint(t);
  if (!(fabs(fabs(t - q) - 0.5f) > levels * 1e-6f)) q = rint(vq_div(a, step));
  // A NaN fails every comparison, so it becomes 0.
  return q > 0.0f ? uint(q < levels ? q : levels) : 0u;
}
// 1 / step; of a step that cannot be used infinity, of one too small to invert NaN: then every quotient is exact.
VQ_FN float kivi_inverse(float step) { return step > 1e-30f && step < INFINITY ? vq_div(1.0f, step) : NAN; }
VQ_FN float kivi_usable(float step) { return step > 0.0f && step < INFINITY ? step : INFINITY; }
"""

KEEP = """
if (sizeof(M) == 2) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
}
// By infinity every code becomes 0.
const float inverse = kivi_inverse(step), divisor = kivi_usable(step);
"""
"""Scale and zero as the store keeps them: what the codes are computed from."""

KEYS_RANGE = (
    """
// x (B, H, n, D). One thread owns a group of tokens of one channel; neighbours take neighbouring channels.
const uint heads = uint(x_shape[0]) * uint(x_shape[1]), n = x_shape[2], D = x_shape[3];
const uint groups = n / size, total = heads * groups * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint above = i / D, d = i - above * D, h = above / groups, g = above - h * groups;
  const uint first = (above * size) * D + d;
  VQ_LOCAL(float, v, 32);
  float low = float(x[first]), high = low;
  for (uint c = 0u; c < size; c += 32u) {
    VQ_UNROLL
    for (uint t = 0u; t < 32u; ++t) v[t] = float(x[first + (c + t) * D]);
    VQ_UNROLL
    for (uint t = 0u; t < 32u; ++t) {
      const float w = v[t];
      low = kivi_low(low, w);
      high = kivi_high(high, w);
    }
  }
  const float levels = float((1u << bits) - 1u);
  low = low == 0.0f ? 0.0f : low;  // a minimum does not promise which zero it is
  float step = vq_div(vq_sub(high, low), levels);
"""
    + KEEP
)

RELOAD = """
    if (size > 32u) {
      VQ_UNROLL
      for (uint t = 0u; t < 32u; ++t) v[t] = float(x[first + (c + t) * D]);
    }
"""

PACK_KEYS = (
    KEYS_RANGE
    + """
  // codes (B, H, D, n * bits / 32), scale and zero (B, H, D, n / group).
  const uint row = h * D + d;
  for (uint c = 0u; c < size; c += 32u) {
"""
    + RELOAD
    + """
    VQ_LOCAL(uint, q, 32);
    VQ_UNROLL
    for (uint t = 0u; t < 32u; ++t) {
      const float w = v[t];
      q[t] = kivi_code(w, divisor, inverse, low, levels);
    }
    const uint place = ((row * groups + g) * size + c) / 32u * uint(bits);
    VQ_UNROLL
    for (int w = 0; w < bits; ++w) {
      uint word = 0u;
      VQ_UNROLL
      for (int t = 0; t < 32; ++t) {
        const int at = t * bits - w * 32;
        if (at > -bits && at < 32) word |= at >= 0 ? uint(q[t]) << uint(at) : uint(q[t]) >> uint(-at);
      }
      codes[place + uint(w)] = word;
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
  for (uint c = 0u; c < size; c += 32u) {
"""
    + RELOAD
    + """
    for (uint t = 0u; t < 32u; ++t) {
      const float w = v[t];
      y[first + (c + t) * D] = vq_add(vq_mul(float(kivi_code(w, divisor, inverse, low, levels)), step), low);
    }
  }
}
"""
)

VALUES_RANGE = (
    """
// x (B, H, n, D). A lane owns eight neighbouring channels; the lanes of a group find its range by shuffles.
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, lanes = size / 8u, per = groups * lanes;
const uint i = thread_position_in_grid.x, total = rows * per;
const uint own = min(i, total - 1u);  // surplus lanes repeat the last one's work and write nothing
const uint row = own / per, channel = (own - row * per) * 8u, member = own & (lanes - 1u), group = own / lanes;
VQ_LOCAL(float, v, 8);
VQ_UNROLL
for (uint k = 0u; k < 8u; ++k) v[k] = float(x[row * D + min(channel + k, D - 1u)]);  // a ragged group repeats the edge
float low = v[0], high = low;
VQ_UNROLL
for (uint k = 1u; k < 8u; ++k) {
  const float w = v[k];
  low = kivi_low(low, w);
  high = kivi_high(high, w);
}
for (uint o = lanes / 2u; o > 0u; o >>= 1) {
  low = kivi_low(low, simd_shuffle_xor(low, o));
  high = kivi_high(high, simd_shuffle_xor(high, o));
}
const float levels = float((1u << bits) - 1u);
low = low == 0.0f ? 0.0f : low;  // a minimum does not promise which zero it is
float step = vq_div(vq_sub(high, low), levels);
"""
    + KEEP
)

PACK_VALUES = (
    VALUES_RANGE
    + """
// codes (B, H, n, P * bits / 32), scale and zero (B, H, n, P / group); P is D filled up to whole groups.
VQ_LOCAL(uint, q, 8);
VQ_UNROLL
for (uint k = 0u; k < 8u; ++k) {
  const float w = v[k];
  q[k] = kivi_code(w, divisor, inverse, low, levels);
}
if (bits == 8) {
  if (i < total) {
    codes[i * 2u] = q[0] | q[1] << 8u | q[2] << 16u | q[3] << 24u;
    codes[i * 2u + 1u] = q[4] | q[5] << 8u | q[6] << 16u | q[7] << 24u;
  }
} else {
  uint mine = 0u;
  VQ_UNROLL
  for (uint k = 0u; k < 8u; ++k) mine |= uint(q[k]) << (k * uint(bits) % 32u);
  if (bits == 4) {
    if (i < total) codes[i] = mine;
  } else if (bits == 3) {
    // Four lanes' 24 bits make three words: each of the first three takes some of its right neighbour's.
    const uint part = member & 3u, next = simd_shuffle(mine, (thread_index_in_simdgroup & 28u) + min(part + 1u, 3u));
    const uint word = mine >> (part * 8u) | next << (24u - part * 8u);
    if (i < total && part < 3u) codes[i / 4u * 3u + part] = word;
  } else {
    const uint both = simd_shuffle_xor(mine, 1u);
    if (i < total && (member & 1u) == 0u) codes[i / 2u] = mine | both << 16u;
  }
}
if (i < total && member == 0u) {
  scale[group] = M(step);
  zero[group] = M(low);
}
"""
)

ROUND_VALUES = (
    VALUES_RANGE
    + """
for (uint k = 0u; k < 8u; ++k) {
  const float w = v[k];
  const float code = float(kivi_code(w, divisor, inverse, low, levels));
  if (i < total && channel + k < D) y[row * D + channel + k] = vq_add(vq_mul(code, step), low);
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
