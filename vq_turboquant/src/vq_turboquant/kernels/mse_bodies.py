"""Texts of turboquant_mse's kernels, in the dialect of docs/kernels/dialect.md.

A SIMD group takes one vector, in threadgroup memory.  The table holds what the codes need: 16 centroids over sqrt(d),
15 edges between them, and the span.
"""

from __future__ import annotations

from vq_core.kernels.standard.hadamard import MOST, ROTATE
from vq_core.kernels.standard.projection import PROJECT

THREADS = 128
GROUPS = THREADS // 32
LANE = MOST // 32
"""Numbers of a lane, at most."""

HELPERS = f"""
// The scale as it is stored.
template <class M> VQ_FN float mse_stored(float v) {{
  if (sizeof(M) != 2) return v;
  return float(half(v > 65504.0f && v < INFINITY ? 65504.0f : v));
}}
// Sum of a lane's numbers lane, lane + 32, ... over all lanes: the second half is added to the first until one is left.
VQ_FN float mse_fold(VQ_LOCAL_PTR(float) p) {{
  VQ_UNROLL
  for (uint half_of = {LANE // 2}u; half_of > 0u; half_of /= 2u) {{
    VQ_UNROLL
    for (uint r = 0u; r < half_of; ++r) p[r] = p[r] + p[r + half_of];
  }}
  float sum = p[0];
  VQ_UNROLL
  for (uint o = 16u; o > 0u; o /= 2u) sum += simd_shuffle_xor(sum, ushort(o));
  return sum;
}}
"""

PLACE = f"""
const uint lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup * {MOST}u;
const uint n = threadgroup_position_in_grid.x * {GROUPS}u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u);  // spare SIMD groups repeat the last vector and write nothing
"""

HADAMARD = """
for (uint k = 0u; k < uint(signs_shape[0]); ++k) {
  for (uint i = lane; i < d; i += 32u) all[own + i] *= signs[k * d + i];
  hadamard(all + own, d, lane, false);
}
"""
UNHADAMARD = """
for (uint k = uint(signs_shape[0]); k > 0u; --k) {
  hadamard(all + own, d, lane, true);
  for (uint i = lane; i < d; i += 32u) all[own + i] *= signs[(k - 1u) * d + i];
}
simdgroup_barrier(mem_flags::mem_threadgroup);
"""
DENSE = f"""
for (uint i = lane; i < d; i += 32u) {{
  const float2 parts = projection_parts(all[own + i]);
  all[own + i] = parts.x;
  less[own + i] = parts.y;
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
VQ_LOCAL(float, turned, {LANE});
VQ_UNROLL
for (uint r = 0u; r < {LANE}u; ++r) {{
  const uint i = r * 32u + lane;
  if (i < d) {{
    float high = 0.0f, first_second = 0.0f, second_first = 0.0f;
    for (uint j = 0u; j < d; ++j) {{
      const float entry = matrix[j * d + i], a = all[own + j], b = less[own + j];
      const float2 parts = projection_parts(entry);
      high = fma(a, parts.x, high);
      first_second = fma(a, parts.y, first_second);
      second_first = fma(b, parts.x, second_first);
    }}
    turned[r] = projected(high, first_second, second_first, 1.0f);
  }}
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
VQ_UNROLL
for (uint r = 0u; r < {LANE}u; ++r) {{
  if (r * 32u + lane < d) {{
    const float one = turned[r];
    all[own + r * 32u + lane] = one;
  }}
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
"""
SHARED = f"VQ_SHARED(float, all, {GROUPS * MOST});\n"
SHARED_DENSE = SHARED + f"VQ_SHARED(float, less, {GROUPS * MOST});\n"


def encode(dense: bool) -> str:
    """Norm, rotation, boundaries counted, scale, codes packed."""
    return f"""
// x (..., D), channels (d), table (32), {"matrix (d, d), transposed" if dense else "signs (rounds, d)"}
// -> codes (..., words), scale (..., 1).
{SHARED_DENSE if dense else SHARED}
{PLACE}
const uint D = uint(x_shape[x_ndim - 1]), d = channels_shape[0];
const float span = table[31];
VQ_LOCAL(float, p, {LANE});
VQ_UNROLL
for (uint r = 0u; r < {LANE}u; ++r) {{
  const uint i = r * 32u + lane;
  p[r] = 0.0f;
  if (i < d) {{
    const uint channel = channels[i];
    const float v = float(x[row * D + channel]);
    all[own + i] = v;
    p[r] = vq_mul(v, v);
  }}
}}
const float norm = sqrt(mse_fold(p)), raw = mse_stored<M>(vq_div(norm, span));
const float asked = mode == 0u ? vq_mul(raw, span) : norm, divisor = asked > 0.0f ? asked : 1.0f;
for (uint i = lane; i < d; i += 32u) all[own + i] = vq_div(all[own + i], divisor);
{DENSE if dense else HADAMARD}
const uint levels = 1u << bits;
VQ_UNROLL
for (uint r = 0u; r < {LANE}u; ++r) {{
  const uint i = r * 32u + lane;
  p[r] = 0.0f;
  if (i < d) {{
    const float y = all[own + i];
    uint code = 0u;
    for (uint e = 0u; e + 1u < levels; ++e) code += y > table[16u + e] ? 1u : 0u;
    const float unit = table[code];
    p[r] = vq_mul(mode == 1u ? unit : y, unit);
    all[own + i] = float(code);
  }}
}}
const float sum = mse_fold(p), shrunk = mode == 1u ? sqrt(sum) : sum;
const float found = shrunk > 0.0f ? vq_div(norm, vq_mul(shrunk, span)) : norm;
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint w = lane; n < rows && w < words; w += 32u) {{
  const uint begin = w * 32u, first = begin / bits;
  uint word = 0u;
  for (uint code = first; code < d && code * bits < begin + 32u; ++code) {{
    const uint q = uint(all[own + code]), at = code * bits;
    word |= at >= begin ? q << (at - begin) : q >> (begin - at);
  }}
  codes[row * words + w] = word;
}}
if (n < rows && lane == 0u) scale[row] = M(mode == 0u ? raw : mse_stored<M>(found));
"""


def decode(dense: bool) -> str:
    """Codes looked up, rotated back, times the scale."""
    return f"""
// codes (..., words), scale (..., 1), table (32), {"matrix (d, d)" if dense else "signs (rounds, d)"} -> x (..., d).
{SHARED_DENSE if dense else SHARED}
{PLACE}
const uint words = uint(codes_shape[codes_ndim - 1]), mask = (1u << bits) - 1u;
for (uint i = lane; i < d; i += 32u) {{
  const uint bit = i * bits, at = row * words + bit / 32u, shift = bit % 32u;
  uint code = codes[at] >> shift;
  if (shift + bits > 32u) code |= codes[at + 1u] << (32u - shift);
  const float unit = table[code & mask];
  all[own + i] = unit;
}}
{DENSE if dense else UNHADAMARD}
const float size = vq_mul(float(scale[row]), table[31]);
for (uint i = lane; n < rows && i < d; i += 32u) x[row * d + i] = vq_mul(all[own + i], size);
"""


HEADERS = {False: ROTATE + HELPERS, True: PROJECT + HELPERS}
