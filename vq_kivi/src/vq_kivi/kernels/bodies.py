"""The kernels' texts, in the dialect of docs/kernels/dialect.md."""

from __future__ import annotations

HELPERS = """
// Scale and zero as the store keeps them.
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
// The smaller of two numbers; a NaN wins.
VQ_FN float kivi_low(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
// The code of v by definition: rint((v - base) / step), clipped. Beside a NaN max takes the number, so a NaN gets 0.
VQ_RARE uint kivi_exact(float v, float base, float step, float levels) {
  return uint(min(max(rint(vq_div(vq_sub(v, base), step)), 0.0f), levels));
}
// The same quotient by a product, clipped: off by less than 3 * 2^-24 of itself, which matters only near halves.
VQ_FN float kivi_quotient(float v, float base, float inverse, float levels) {
  return min(max(vq_mul(vq_sub(v, base), inverse), 0.0f), levels);
}
"""

KEEP = """
low = low == 0.0f ? 0.0f : low;  // a minimum and a maximum do not promise which zero it is
high = high == 0.0f ? 0.0f : high;
const float levels = float((1u << bits) - 1u);
float step = vq_div(vq_sub(high, low), levels);
if (sizeof(M) == 2) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
}
// A step of zero, infinity or NaN gives codes of 0; one that cannot be inverted leaves every code to kivi_exact.
const bool usable = step > 0.0f && step < INFINITY, tiny = usable && step < 1e-30f;
const float divisor = usable ? step : INFINITY, inverse = usable && !tiny ? vq_div(1.0f, step) : 0.0f;
const float near = tiny ? -1.0f : 0.5f - levels * 1e-6f;
const float whole = 12582912.0f;  // 1.5 * 2^23: a sum with it rounds to a whole number, found in its last bits
"""
"""Scale and zero as the store keeps them: what the codes are computed from."""


def _codes(count: int, number: str, use: str) -> str:
    """Text that makes the codes of some numbers and uses them; by definition where a quotient lies near a half.

    Args:
        count: Of numbers.
        number: The number t.
        use: What is done with its code.
    """
    return f"""
  bool unsure = false;
  VQ_UNROLL
  for (int t = 0; t < {count}; ++t) {{
    const float w = {number}, quotient = kivi_quotient(w, low, inverse, levels), sum = vq_add(quotient, whole);
    unsure = unsure || !(fabs(vq_sub(quotient, vq_sub(sum, whole))) < near);
    const uint code = as_type<uint>(sum) & 255u;
    {use}
  }}
"""


def _words(count: int, number: str, words: str) -> str:
    """Text that makes the words of some numbers' codes."""
    clear = f"VQ_UNROLL\n  for (int k = 0; k < {words}; ++k) word[k] = 0u;"
    put = """const int at = t * bits;
    word[at / 32] |= code << uint(at % 32);
    if (at % 32 + bits > 32) word[at / 32 + 1] |= code >> uint(32 - at % 32);"""
    return f"""
  VQ_LOCAL(uint, word, {words});
  {clear}
  {_codes(count, number, put)}
  if (unsure) {{
    {clear}
    VQ_UNROLL
    for (int t = 0; t < {count}; ++t) {{
      const float w = {number};
      const uint code = kivi_exact(w, low, divisor, levels);
      {put}
    }}
  }}
"""


KEYS_RANGE = (
    """
// `first` is a group's first token of one channel, x (B, H, n, D).
float low = INFINITY, high = -INFINITY;
bool bad = false;
for (uint c = 0u; c < size; c += 32u) {
  VQ_UNROLL
  for (uint t = 0u; t < 32u; ++t) {
    const float w = float(x[first + (c + t) * D]);
    bad = bad || w != w;
    low = min(low, w);
    high = max(high, w);
  }
}
low = bad ? NAN : low;
"""
    + KEEP
)
KEY = "float(x[first + (c + uint(t)) * D])"

PACK_KEYS = (
    """
// x (B, H, n, D) -> codes (B, H, D, n * bits / 32), scale and zero (B, H, D, n / group).
// A threadgroup takes 32 channels of 4 neighbouring groups: a lane a channel, a SIMD group a group. The store runs
// along tokens, so what they made is turned in threadgroup memory and written in runs.
VQ_SHARED(uint, tile, 512 * bits + 32);
VQ_SHARED(float, steps, 128);
VQ_SHARED(float, lows, 128);
const uint heads = uint(x_shape[0]) * uint(x_shape[1]), n = x_shape[2], D = x_shape[3];
const uint groups = n / size, across = (D + 31u) / 32u, along = (groups + 3u) / 4u;
const uint b = threadgroup_position_in_grid.x, above = b / across, h = above / along;
const uint d0 = (b - above * across) * 32u, g0 = (above - h * along) * 4u;
const uint thread = thread_index_in_threadgroup, lane = thread & 31u, member = thread / 32u;
const uint first = (h * n + min(g0 + member, groups - 1u) * size) * D + min(d0 + lane, D - 1u);
"""
    + KEYS_RANGE
    + """
const uint words = size * uint(bits) / 32u, stride = 4u * words + 1u;
for (uint c = 0u; c < size; c += 32u) {
"""
    + _words(32, KEY, "bits")
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
const uint run = min(groups - g0, 4u) * words;
for (uint k = thread; k < 128u * words; k += 128u) {
  const uint d = k / (4u * words), place = k - d * 4u * words;
  if (d0 + d < D && place < run) codes[((h * D + d0 + d) * groups + g0) * words + place] = tile[d * stride + place];
}
const uint d = d0 + thread / 4u, g = g0 + (thread & 3u);
if (d < D && g < groups) {
  const float kept = steps[thread], base = lows[thread];
  scale[(h * D + d) * groups + g] = M(kept);
  zero[(h * D + d) * groups + g] = M(base);
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
    VQ_LOCAL(uint, q, 32);
"""
    + _codes(32, KEY, "q[t] = code;")
    + """
    for (int t = 0; t < 32; ++t) {
      uint code = q[t];
      if (unsure) code = kivi_exact(float(x[first + (c + uint(t)) * D]), low, divisor, levels);
      y[first + (c + uint(t)) * D] = vq_add(vq_mul(float(code), step), low);
    }
  }
}
"""
)

VALUES_GROUP = (
    """
// 16 channels of a token, and the range of their group by shuffles among its lanes.
VQ_LOCAL(float, v, 16);
if (channel + 16u <= D) {
  VQ_UNROLL
  for (uint k = 0u; k < 16u; ++k) v[k] = float(x[first + k]);
} else {  // a group that does not fill repeats the edge
  for (uint k = 0u; k < 16u; ++k) v[k] = float(x[row * D + min(channel + k, D - 1u)]);
}
float low = INFINITY, high = -INFINITY;
bool bad = false;
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) {
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
// x (B, H, n, D). A lane owns 16 neighbouring channels; the lanes of a group find its range by shuffles.
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, lanes = size / 16u, per = groups * lanes;
const uint i = thread_position_in_grid.x, total = rows * per;
const uint own = min(i, total - 1u);  // surplus lanes repeat the last one's work and write nothing
const uint row = own / per, channel = (own - row * per) * 16u, member = own & (lanes - 1u), group = own / lanes;
const uint first = row * D + channel;
"""
    + VALUES_GROUP
)

PACK_VALUES = (
    VALUES_RANGE
    + "// codes (B, H, n, P * bits / 32), scale and zero (B, H, n, P / group); P is D filled up to whole groups."
    + _words(16, "v[t]", "(bits + 1) / 2")
    + """
if (bits == 3) {
  // Two lanes' 48 bits make three words.
  const uint mine = word[0], rest = word[1];
  const uint next = simd_shuffle_xor(mine, 1u), half_words = i / 2u * 3u;
  if (i < total && (member & 1u) == 0u) {
    codes[half_words] = mine;
    codes[half_words + 1u] = rest | next << 16u;
  }
  if (i < total && (member & 1u) == 1u) codes[half_words + 2u] = mine >> 16u | rest << 16u;
} else if (i < total) {
  VQ_UNROLL
  for (int k = 0; k < bits / 2; ++k) {
    const uint one = word[k];
    codes[i * uint(bits / 2) + uint(k)] = one;
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
    + "VQ_LOCAL(uint, q, 16);"
    + _codes(16, "v[t]", "q[t] = code;")
    + """
for (uint k = 0u; k < 16u; ++k) {
  const float w = v[k];
  uint code = q[k];
  if (unsure) code = kivi_exact(w, low, divisor, levels);
  if (i < total && channel + k < D) y[first + k] = vq_add(vq_mul(float(code), step), low);
}
"""
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
