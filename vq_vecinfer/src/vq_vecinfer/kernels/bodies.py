"""The kernels' texts, in the dialect of docs/kernels/dialect.md."""

from __future__ import annotations

from vq_core.api import Side
from vq_core.kernels.standard.hadamard import ROTATE

HEADER = ROTATE
"""Of the kernel that turns keys."""

_NEAREST = """
VQ_LOCAL(float, v, sub);
bool finite = true;
VQ_UNROLL
for (int j = 0; j < sub; ++j) {
  const float w = SOURCE;
  finite = finite && fabs(w) < INFINITY;  // false for NaN too
  v[j] = min(max(w, -1e30f), 1e30f);
}
float best = -INFINITY;
uint code = 0u;
for (uint c = 0u; c < C; ++c) {
  const uint at = book * C + c;
  float sum = -halves[at];
  VQ_UNROLL
  for (int j = 0; j < sub; ++j) sum = vq_add(sum, vq_mul(v[j], codebook[at * uint(sub) + uint(j)]));
  if (sum > best) {  // of equals the first
    best = sum;
    code = c;
  }
}
""".strip()

QUANTIZE = f"""
// x (B, H, n, D), codebook (S, C, sub), halves (S, C) -> codes (B, H, words): one stream of bits for each head.
// A thread finds the nearest centroid of one sub-vector, a threadgroup those of 128 in a row, whose codes are 4 * bits
// whole words. All heads' codes are one stream, since those of a head fill whole words.
VQ_SHARED(uint, found, 128);
const uint D = x_shape[3], M = D / uint(sub), books = halves_shape[0], C = 1u << bits;
const uint total = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]) * M;
const uint thread = thread_index_in_threadgroup, first = threadgroup_position_in_grid.x * 128u;
const uint own = min(first + thread, total - 1u);  // spare threads repeat the last one's work
const uint book = books == 1u ? 0u : own % M;
{_NEAREST.replace("SOURCE", "float(x[own * uint(sub) + uint(j)])")}
found[thread] = first + thread < total && finite ? code : 0u;
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint words = total * bits / 32u, place = threadgroup_position_in_grid.x * 4u * bits + thread;
if (thread < 4u * bits && place < words) {{
  uint word = 0u;
  const uint begin = thread * 32u;
  for (uint i = begin / bits; i < 128u && i * bits < begin + 32u; ++i) {{
    const uint bit = i * bits;
    word |= bit >= begin ? found[i] << (bit - begin) : found[i] >> (begin - bit);
  }}
  codes[place] = word;
}}
"""

QUANTIZE_KEYS = f"""
// x (B, H, n, D), inverse (H, D), mean (B, H, D), codebook (S, C, sub), halves (S, C) -> codes (B, H, words).
// A threadgroup takes so many whole tokens that their codes are whole words, and about 128. A SIMD group turns a token
// in threadgroup memory: times 1 / lambda, Hadamard, less the mean where there is one. Then a thread finds the nearest
// centroid of a sub-vector, as above.
VQ_SHARED(float, all, 1024);
VQ_SHARED(uint, found, 256);
const uint D = x_shape[3], M = D / uint(sub), books = halves_shape[0], C = 1u << bits;
const uint heads = x_shape[1], n = x_shape[2], rows = uint(x_shape[0]) * heads * n;
const uint block = 32u >> min(uint(ctz(M * bits)), 5u), tokens = block * max(1u, 128u / (block * M));
const uint thread = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint first = threadgroup_position_in_grid.x * tokens;
for (uint t = simdgroup_index_in_threadgroup; t < tokens; t += 4u) {{
  const uint row = min(first + t, rows - 1u), pair = row / n;  // spare ones repeat the last token's work
  for (uint i = lane; i < D; i += 32u) all[t * D + i] = vq_mul(float(x[row * D + i]), inverse[pair % heads * D + i]);
  hadamard(all + t * D, D, lane, false);
  if (centred != 0u) {{
    for (uint i = lane; i < D; i += 32u) all[t * D + i] = vq_sub(all[t * D + i], mean[pair * D + i]);
  }}
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint own = thread; own < tokens * M; own += 128u) {{
const uint book = books == 1u ? 0u : own % M;
{_NEAREST.replace("SOURCE", "all[own * uint(sub) + uint(j)]")}
found[own] = first * M + own < rows * M && finite ? code : 0u;
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint words = rows * M * bits / 32u, mine = tokens * M * bits / 32u;
for (uint k = thread; k < mine; k += 128u) {{
  const uint begin = k * 32u, place = threadgroup_position_in_grid.x * mine + k;
  uint word = 0u;
  for (uint i = begin / bits; i < tokens * M && i * bits < begin + 32u; ++i) {{
    const uint bit = i * bits;
    word |= bit >= begin ? found[i] << (bit - begin) : found[i] >> (begin - bit);
  }}
  if (place < words) codes[place] = word;
}}
"""

DEQUANTIZE = """
// codes (N, H, words), codebook (S, C, sub) -> y (N, H, n, D), D = head_dim. One thread takes one code.
const uint M = head_dim / uint(sub), books = codebook_shape[0], C = 1u << bits;
const uint total = uint(codes_shape[0]) * uint(codes_shape[1]) * uint(codes_shape[2]) * 32u / bits;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint bit = i * bits, at = bit / 32u, shift = bit & 31u;
  uint code = codes[at] >> shift;
  if (shift + bits > 32u) code |= codes[at + 1u] << (32u - shift);
  code = (code & (C - 1u)) + (books == 1u ? 0u : i % M * C);
  VQ_UNROLL
  for (int j = 0; j < sub; ++j) {
    const float w = codebook[code * uint(sub) + uint(j)];
    y[i * uint(sub) + uint(j)] = w;
  }
}
"""


# ---- the device's order, see vq_vecinfer.kernels.device: sub and bits are 8

DEVICE_KEYS = f"""
// x (B, H, n, D), inverse (H, D), codebook (S, 256, 8), halves (S, 256) -> codes (B, H, n / 32, D).
// As of keys above, but for the mean; a word is of one token.
const int sub = 8;
VQ_SHARED(float, all, 1024);
VQ_SHARED(uint, found, 128);
const uint D = x_shape[3], M = D / 8u, books = halves_shape[0], C = 256u;
const uint heads = x_shape[1], n = x_shape[2], rows = uint(x_shape[0]) * heads * n, tokens = 128u / M;
const uint thread = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint first = threadgroup_position_in_grid.x * tokens;
for (uint t = simdgroup_index_in_threadgroup; t < tokens; t += 4u) {{
  const uint row = min(first + t, rows - 1u);  // spare ones repeat the last token's work
  for (uint i = lane; i < D; i += 32u) {{
    all[t * D + i] = vq_mul(float(x[row * D + i]), inverse[row / n % heads * D + i]);
  }}
  hadamard(all + t * D, D, lane, false);
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint own = min(thread, tokens * M - 1u), book = books == 1u ? 0u : own % M;
{_NEAREST.replace("SOURCE", "all[own * uint(sub) + uint(j)]")}
found[thread] = finite ? code : 0u;
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint row = first + thread / (M / 4u), r = thread % (M / 4u);
if (thread < tokens * M / 4u && row < rows) {{
  uint word = 0u;
  VQ_UNROLL
  for (uint i = 0u; i < 4u; ++i) word |= found[4u * thread + i] << (8u * i);
  codes[row / 32u * D + (r * 8u + (row & 7u)) * 4u + (row / 8u & 3u)] = word;
}}
"""
DEVICE_VALUES = f"""
// x (B, H, n, D), codebook (S, 256, 8), halves (S, 256) -> codes (B, H, n / 32, D).
// A thread finds the nearest centroid for one byte of the device's order, a threadgroup fills 32 words.
const int sub = 8;
VQ_SHARED(uint, found, 128);
const uint D = x_shape[3], M = D / 8u, books = halves_shape[0], C = 256u;
const uint thread = thread_index_in_threadgroup, first = threadgroup_position_in_grid.x * 128u;
const uint block = (first + thread) / (32u * M), r = first + thread - block * 32u * M;
const uint token = block * 32u + 16u * (r >> 2 & 1u) + 8u * (r >> 1 & 1u) + 2u * (r >> 4 & 3u) + (r & 1u);
const uint place = 4u * (r >> 7) + 2u * (r >> 3 & 1u) + (r >> 6 & 1u);
const uint own = token * M + place, book = books == 1u ? 0u : place;
{_NEAREST.replace("SOURCE", "float(x[own * uint(sub) + uint(j)])")}
found[thread] = finite ? code : 0u;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread < 32u) {{
  uint word = 0u;
  VQ_UNROLL
  for (uint i = 0u; i < 4u; ++i) word |= found[4u * thread + i] << (8u * i);
  codes[first / 4u + thread] = word;
}}
"""
DEVICE: dict[Side, str] = {"keys": DEVICE_KEYS, "values": DEVICE_VALUES}
