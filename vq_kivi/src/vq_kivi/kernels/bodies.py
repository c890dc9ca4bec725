"""The kernels' texts, in the dialect of docs/kernels/dialect.md."""

from __future__ import annotations

HELPERS = """
// Neighbours that are read at once.
template <class T> struct alignas(16) kivi_run { T v[16 / sizeof(T)]; };
// Scale and zero as the store keeps them.
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
// The smaller of two numbers; a NaN wins.
VQ_FN float kivi_low(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
// The code of v by definition: rint((v - base) / step), clipped. Beside a NaN max takes the number, so a NaN gets 0.
VQ_RARE uint kivi_exact(float v, float base, float step, float levels) {
  return uint(min(max(rint(vq_div(vq_sub(v, base), step)), 0.0f), levels));
}
// (v - base) / step without a division: a product with the rounded inverse, put right by what it leaves of v - base,
// which fma finds exactly. That is off by less than 2^-46 of itself before its last rounding, so it can differ from a
// division only where the quotient lies as near to the middle of two floats. A code depends on it where one of them is
// a half: test_quotients.py goes through all these pairs of numbers.
VQ_FN float kivi_quotient(float v, float base, float step, float inverse) {
  const float d = vq_sub(v, base), product = vq_mul(d, inverse);
  return fma(fma(-product, step, d), inverse, product);
}
"""

KEEP = """
low = low == 0.0f ? 0.0f : low;  // a minimum and a maximum do not promise which zero it is
high = high == 0.0f ? 0.0f : high;
const float levels = float((1u << bits) - 1u), lowest = low;
float step = vq_div(vq_sub(high, low), levels);
if (sizeof(M) == 2) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
}
// A step of infinity or NaN gives codes of 0, and one of 0 too. kivi_quotient takes a group where nothing that it
// computes gets too small and where no code needs clipping; kivi_exact takes the others.
const bool flat = step == 0.0f;
const float divisor = step > 0.0f && step < INFINITY ? step : INFINITY, inverse = flat ? 0.0f : vq_div(1.0f, step);
const bool inside = low <= lowest && vq_mul(vq_sub(high, low), inverse) < levels + 0.25f;
const bool exact = !(flat || (step > 1e-20f && step < 1e20f && inside));
const float whole = 12582912.0f;  // 1.5 * 2^23: a sum with it rounds to a whole number, found in its last bits
"""
"""Scale and zero as the store keeps them: what the codes are computed from."""


def _codes(count: int, use: str, before: str = "") -> str:
    """Text that makes the codes of the numbers in v and uses them.

    Args:
        count: Of numbers.
        use: What is done with the code of v[t].
        before: What precedes the first use.
    """
    return f"""
  {before}
  if (!exact) {{
    VQ_UNROLL
    for (int t = 0; t < {count}; ++t) {{
      const float w = v[t], sum = vq_add(kivi_quotient(w, low, step, inverse), whole);
      const uint code = as_type<uint>(sum) & 255u;
      {use}
    }}
  }} else {{
    VQ_UNROLL
    for (int t = 0; t < {count}; ++t) {{
      const float w = v[t];
      const uint code = kivi_exact(w, low, divisor, levels);
      {use}
    }}
  }}
"""


WORDS = _codes(
    32,
    """const int at = t * bits;
      word[at / 32] |= code << uint(at % 32);
      if (at % 32 + bits > 32) word[at / 32 + 1] |= code >> uint(32 - at % 32);""",
    """VQ_LOCAL(uint, word, bits);
  VQ_UNROLL
  for (int k = 0; k < bits; ++k) word[k] = 0u;""",
)
"""The words of the codes of 32 numbers."""

LOAD = """
  VQ_UNROLL
  for (uint t = 0u; t < 32u; ++t) v[t] = float(x[first + (c + t) * D]);
"""
KEYS_RANGE = (
    """
// `first` is a group's first token of one channel, x (B, H, n, D). The last 32 tokens stay in registers.
VQ_LOCAL(float, v, 32);
float low = INFINITY, high = -INFINITY;
bool bad = false;
for (uint c = 0u; c < size; c += 32u) {
"""
    + LOAD
    + """
  VQ_UNROLL
  for (uint t = 0u; t < 32u; ++t) {
    const float w = v[t];
    bad = bad || w != w;
    low = min(low, w);
    high = max(high, w);
  }
}
low = bad ? NAN : low;
"""
    + KEEP
)

PACK_KEYS = (
    """
// x (B, H, n, D) -> codes (B, H, D, n * bits / 32), scale and zero (B, H, D, n / group).
// A threadgroup takes 32 channels of 4 neighbouring groups: a lane a channel, a SIMD group a group. The store runs
// along tokens, so what they made is turned in threadgroup memory: four lanes write a channel's runs.
VQ_SHARED(uint, tile, 512 * bits + 32);
VQ_SHARED(float, steps, 128);
VQ_SHARED(float, lows, 128);
const uint n = x_shape[2], D = x_shape[3];
const uint groups = n / size, across = (D + 31u) / 32u, along = (groups + 3u) / 4u;
const uint b = threadgroup_position_in_grid.x, above = b / across, h = above / along;
const uint d0 = (b - above * across) * 32u, g0 = (above - h * along) * 4u;
const uint thread = thread_index_in_threadgroup, lane = thread & 31u, member = thread / 32u;
const uint first = (h * n + min(g0 + member, groups - 1u) * size) * D + min(d0 + lane, D - 1u);
"""
    + KEYS_RANGE
    + """
const uint words = size * uint(bits) / 32u, stride = 4u * words + 1u;
for (uint c = size; c > 0u;) {
  c -= 32u;
  if (c + 32u < size) {
"""
    + LOAD
    + "}"
    + WORDS
    + """
  VQ_UNROLL
  for (int k = 0; k < bits; ++k) {
    const uint one = word[k];
    tile[lane * stride + member * words + c / 32u * uint(bits) + uint(k)] = one;
  }
}
steps[lane * 4u + member] = step;
lows[lane * 4u + member] = low;
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint turned = thread / 4u, d = d0 + turned, part = thread & 3u, run = min(groups - g0, 4u);
if (d < D) {
  const uint place = (h * D + d) * groups + g0;
  for (uint k = part; k < run * words; k += 4u) codes[place * words + k] = tile[turned * stride + k];
  if (part < run) {
    const float kept = steps[thread], base = lows[thread];
    scale[place + part] = M(kept);
    zero[place + part] = M(base);
  }
}
"""
)

ROUND_KEYS = (
    """
// One thread owns a group of tokens of one channel; neighbours take neighbouring channels.
const uint D = x_shape[3], total = uint(x_shape[0]) * uint(x_shape[1]) * (uint(x_shape[2]) / size) * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint above = i / D, first = above * size * D + (i - above * D);
"""
    + KEYS_RANGE
    + """
  for (uint c = 0u; c < size; c += 32u) {
"""
    + LOAD
    + _codes(32, "y[first + (c + uint(t)) * D] = vq_add(vq_mul(float(code), step), low);")
    + """
  }
}
"""
)

VALUES_GROUP = (
    """
// 32 channels of a token, and the range of their group by shuffles among its lanes.
VQ_LOCAL(float, v, 32);
const uint wide = 16u / uint(sizeof(T));
if (channel + 32u <= D && first % wide == 0u && vq_aligned<kivi_run<T>>(x)) {
  VQ_UNROLL
  for (uint k = 0u; k < 32u / wide; ++k) {
    const kivi_run<T> some = vq_view<kivi_run<T>>(x)[first / wide + k];
    VQ_UNROLL
    for (uint j = 0u; j < wide; ++j) v[k * wide + j] = float(some.v[j]);
  }
} else {  // a group that does not fill repeats the edge
  VQ_UNROLL
  for (uint k = 0u; k < 32u; ++k) v[k] = float(x[row * D + min(channel + k, D - 1u)]);
}
float low = INFINITY, high = -INFINITY;
bool bad = false;
VQ_UNROLL
for (uint k = 0u; k < 32u; ++k) {
  const float w = v[k];
  bad = bad || w != w;
  low = min(low, w);
  high = max(high, w);
}
low = bad ? NAN : low;
for (uint o = lanes / 2u; o > 0u; o >>= 1) {
  low = kivi_low(low, simd_shuffle_xor(low, o));
  high = max(high, simd_shuffle_xor(high, o));
}
"""
    + KEEP
)

VALUES_RANGE = (
    """
// x (B, H, n, D). A lane owns 32 neighbouring channels, read 16 bytes at a time where they lie so; the lanes of a group
// find its range by shuffles.
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, lanes = size / 32u, per = groups * lanes;
const uint i = thread_position_in_grid.x, total = rows * per;
const uint own = min(i, total - 1u);  // surplus lanes repeat the last one's work and write nothing
const uint row = own / per, channel = (own - row * per) * 32u, member = own & (lanes - 1u), group = own / lanes;
const uint first = row * D + channel;
"""
    + VALUES_GROUP
)

PACK_VALUES = (
    VALUES_RANGE
    + "// codes (B, H, n, P * bits / 32), scale and zero (B, H, n, P / group); P is D filled up to whole groups."
    + WORDS
    + """
if (i < total) {
  VQ_UNROLL
  for (int k = 0; k < bits; ++k) {
    const uint one = word[k];
    codes[i * uint(bits) + uint(k)] = one;
  }
  if (member == 0u) {
    scale[group] = M(step);
    zero[group] = M(low);
  }
}
"""
)

ROUND_VALUES = VALUES_RANGE + _codes(
    32, "if (i < total && channel + uint(t) < D) y[first + uint(t)] = vq_add(vq_mul(float(code), step), low);"
)

UNPACK_KEYS = """
// codes (N, H, D, words), scale and zero (N, H, D, groups) -> x (N, H, n, D).
// One thread takes 32 tokens of one channel.
const uint heads = uint(codes_shape[0]) * uint(codes_shape[1]), D = codes_shape[2], words = codes_shape[3];
const uint parts = words / uint(bits), groups = scale_shape[3], total = heads * parts * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint above = i / D, d = i - above * D, h = above / parts, part = above - h * parts;
  const uint row = h * D + d, group = row * groups + part / (parts / groups), place = row * words + part * uint(bits);
  const float step = float(scale[group]), base = float(zero[group]);
  VQ_LOCAL(uint, word, bits);
  VQ_UNROLL
  for (int k = 0; k < bits; ++k) word[k] = codes[place + uint(k)];
  VQ_UNROLL
  for (int t = 0; t < 32; ++t) {
    const int at = t * bits;
    uint q = uint(word[at / 32]) >> uint(at % 32);
    if (at % 32 + bits > 32) q |= uint(word[at / 32 + 1]) << uint(32 - at % 32);
    q &= (1u << bits) - 1u;
    x[(above * 32u + uint(t)) * D + d] = vq_add(vq_mul(float(q), step), base);
  }
}
"""

UNPACK_VALUES = """
// codes (N, H, n, words), scale and zero (N, H, n, groups) -> x (N, H, n, D), D = head_dim.
// One thread takes 4 neighbouring channels of a token: they share scale and zero, and are written at once.
const uint rows = uint(codes_shape[0]) * uint(codes_shape[1]) * uint(codes_shape[2]), words = codes_shape[3];
const uint groups = scale_shape[3], D = head_dim, across = (D + 3u) / 4u;
const uint i = thread_position_in_grid.x;
if (i < rows * across) {
  const uint row = i / across, d = (i - row * across) * 4u, group = row * groups + d / size;
  const uint bit = d * uint(bits), place = row * words + bit / 32u, shift = bit % 32u;
  const float step = float(scale[group]), base = float(zero[group]);
  uint four = codes[place] >> shift;
  if (shift + uint(4 * bits) > 32u) four |= codes[place + 1u] << (32u - shift);
  VQ_LOCAL(float, v, 4);
  VQ_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint q = four >> uint(k * bits) & ((1u << bits) - 1u);
    v[k] = vq_add(vq_mul(float(q), step), base);
  }
  if (D % 4u == 0u) {
    const float4 all = vq_float4(v[0], v[1], v[2], v[3]);
    vq_view<float4>(x)[i] = all;
  } else {
    for (uint k = 0u; k < min(D - d, 4u); ++k) x[row * D + d + k] = v[k];
  }
}
"""
