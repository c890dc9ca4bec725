"""Merging what the pass kernel's threadgroups found: one softmax over all splits, in a fixed order."""

from __future__ import annotations

from vq_core.kernels.standard.hadamard import first_signs, turn

THREADS = 512
MOST_SPLITS = 512
MOST = 256
"""Largest head size that is rotated back: more would take registers that 512 threads do not have."""

BODY = """
// sums (B, H, splits, R * L, W), tops (B, H, splits, R * L, 2) -> out (B, Hq, L, D). A threadgroup takes a query row:
// 128 channels at a time, by 4 runs of splits.
VQ_SHARED(float, share, 512);
VQ_SHARED(float, marks, 32);
VQ_SHARED(float, parts, 512);
const uint thread = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint sg = simdgroup_index_in_threadgroup, splits = sums_shape[2], rows = sums_shape[3], W = sums_shape[4];
const uint n = threadgroup_position_in_grid.x, above = n / rows, m = n - above * rows;
const uint L = query_length, H = sums_shape[1], head = above - above / H * H;
const uint first = above * splits * rows + m;
const uint run = thread / 128u, column = thread & 127u, each = (splits + 3u) / 4u;
const uint begin = min(run * each, splits), end = min(begin + each, splits);
// What is summed first is on its way before the shares are known.
VQ_LOCAL(float, early, 8);
VQ_UNROLL
for (uint k = 0u; k < 8u; ++k) early[k] = sums[(first + min(begin + k, splits - 1u) * rows) * W + min(column, W - 1u)];
const uint mine = min(thread, splits - 1u);
const float all = thread < splits ? float(tops[(first + mine * rows) * 2u + 1u]) : 0.0f;
const float top = tops[(first + mine * rows) * 2u];
float highest = simd_max(all != 0.0f ? top : -3.0e38f);
if (lane == 0u) marks[sg] = highest;
threadgroup_barrier(mem_flags::mem_threadgroup);
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) highest = max(highest, float(marks[k]));
float extra = 0.0f;
if (with_logits != 0u) {
  const float logit = logits[head * (rows / L) + m / L] * 1.4426950408889634f;
  highest = max(highest, logit);
  extra = exp2(logit - highest);
}
const float one = all != 0.0f ? exp2(top - highest) : 0.0f;
share[thread] = one;
float weight = one * all;
VQ_UNROLL
for (uint o = 1u; o < 32u; o <<= 1) weight += simd_shuffle_xor(weight, ushort(o));  // in an order that is promised
if (lane == 0u) marks[16u + sg] = weight;
threadgroup_barrier(mem_flags::mem_threadgroup);
float whole = extra;
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) whole += marks[16u + k];
whole = whole == 0.0f ? 1.0f : whole;  // a row without tokens: its sums are 0, and 0 / 0 is not
"""


def _sum(name: str, begin: str, end: str) -> str:
    """Text that sums the splits' shares of channel c, eight loads at a time, into a name known to all of a column."""
    return f"""
  float {name} = 0.0f;
  for (uint s0 = {begin}; s0 < {end}; s0 += 8u) {{
    if (c0 == 0u && s0 == begin) {{
      VQ_UNROLL
      for (uint k = 0u; k < 8u; ++k) {name} += s0 + k < {end} ? share[s0 + k] * early[k] : 0.0f;
      continue;
    }}
    VQ_UNROLL
    for (uint k = 0u; k < 8u; ++k) {{
      const uint s = min(s0 + k, {end} - 1u);
      const float found = sums[(first + s * rows) * W + min(c, W - 1u)];
      {name} += s0 + k < {end} ? share[s] * found : 0.0f;
    }}
  }}
  parts[thread] = {name};
  threadgroup_barrier(mem_flags::mem_threadgroup);
  {name} = parts[column] + parts[128u + column] + parts[256u + column] + parts[384u + column];
  threadgroup_barrier(mem_flags::mem_threadgroup);
"""


TOGETHER = (
    BODY
    + f"""
for (uint c0 = 0u; c0 < D; c0 += 128u) {{
  const uint c = c0 + column;
{_sum("sum", "begin", "end")}
  if (run == 0u && c < D) out[n * D + c] = T(sum / whole);
}}
"""
)

# The exact splits' sums and the packed ones' apart, for a method that stores values in another basis.
SHARED_APART = """
VQ_SHARED(float, others, 512);
"""
SUMS = """
  float exact = 0.0f, packed = 0.0f;
  for (uint s0 = begin; s0 < end; s0 += 8u) {
    VQ_LOCAL(float, found, 8);
    const bool known = c0 == 0u && s0 == begin;
    VQ_UNROLL
    for (uint k = 0u; k < 8u; ++k) {
      found[k] = known ? float(early[k]) : float(sums[(first + min(s0 + k, end - 1u) * rows) * W + min(c, W - 1u)]);
    }
    VQ_UNROLL
    for (uint k = 0u; k < 8u; ++k) {
      const float one = s0 + k < end ? share[s0 + k] * found[k] : 0.0f;
      exact += s0 + k < exact_splits ? one : 0.0f;
      packed += s0 + k < exact_splits ? 0.0f : one;
    }
  }
  parts[thread] = exact;
  others[thread] = packed;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  exact = parts[column] + parts[128u + column] + parts[256u + column] + parts[384u + column];
  packed = others[column] + others[128u + column] + others[256u + column] + others[384u + column];
  threadgroup_barrier(mem_flags::mem_threadgroup);
"""
APART = (
    SHARED_APART
    + BODY
    + f"""
for (uint c0 = 0u; c0 < W; c0 += 128u) {{
  const uint c = c0 + column;
{SUMS}
  if (run == 0u && c < D) plain[n * D + c] = exact / whole;
  if (run == 0u && c < width) stored[n * width + c] = packed / whole;
}}
"""
)

TURNED = (
    f"""
// Packed sums are rotated back here by the rounds of `signs` (rounds, D), and what is written is the sum of both.
VQ_SHARED(float, plain, {MOST});
VQ_SHARED(float, room, {2 * MOST});
"""
    + SHARED_APART
    + BODY
    + f"""
for (uint c0 = 0u; c0 < D; c0 += 128u) {{
  const uint c = c0 + column;
{SUMS}
  if (run == 0u && c < D) {{
    plain[c] = exact / whole;
    room[c] = packed / whole;
  }}
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (sg == 0u) {{
  const uint rounds = signs_shape[0];
{first_signs("true", MOST)}
  VQ_LOCAL(float, v, {MOST // 32});
  VQ_UNROLL
  for (uint r = 0u; r < {MOST // 32}u; ++r) v[r] = r * 32u + lane < D ? float(room[r * 32u + lane]) : 0.0f;
{turn("true", "room", MOST)}
  VQ_UNROLL
  for (uint r = 0u; r < {MOST // 32}u; ++r) {{
    const uint i = r * 32u + lane;
    if (i < D) out[n * D + i] = T(plain[i] + v[r]);
  }}
}}
"""
)
