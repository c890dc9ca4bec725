"""The kernels' texts, in the dialect of docs/kernels/dialect.md."""

from __future__ import annotations

from vq_core.api import Side

NEAREST = """VQ_LOCAL(float, v, sub);
bool finite = true;
VQ_UNROLL
for (int j = 0; j < sub; ++j) {
  const float w = float(x[own * uint(sub) + uint(j)]);
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
"""

QUANTIZE = (
    """
// x (B, H, n, D), codebook (S, C, sub), halves (S, C) -> codes (B, H, words): one stream of bits for each head.
// A thread finds the nearest centroid of one sub-vector, a threadgroup those of 128 in a row, whose codes are 4 * bits
// whole words. All heads' codes are one stream, since those of a head fill whole words.
VQ_SHARED(uint, found, 128);
const uint D = x_shape[3], M = D / uint(sub), books = halves_shape[0], C = 1u << bits;
const uint total = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]) * M;
const uint thread = thread_index_in_threadgroup, first = threadgroup_position_in_grid.x * 128u;
const uint own = min(first + thread, total - 1u);  // spare threads repeat the last one's work
const uint book = books == 1u ? 0u : own % M;
"""
    + NEAREST
    + """found[thread] = first + thread < total && finite ? code : 0u;
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint words = total * bits / 32u, place = threadgroup_position_in_grid.x * 4u * bits + thread;
if (thread < 4u * bits && place < words) {
  uint word = 0u;
  const uint begin = thread * 32u;
  for (uint i = begin / bits; i < 128u && i * bits < begin + 32u; ++i) {
    const uint bit = i * bits;
    word |= bit >= begin ? found[i] << (bit - begin) : found[i] >> (begin - bit);
  }
  codes[place] = word;
}
"""
)

DEVICE_PLACES: dict[Side, str] = {
    "keys": "16u * (r >> 3 & 1u) + 8u * (r >> 2 & 1u) + (r >> 4 & 7u), place = 4u * (r >> 7) + (r & 3u);",
    "values": "16u * (r >> 2 & 1u) + 8u * (r >> 1 & 1u) + 2u * (r >> 4 & 3u) + (r & 1u), "
    "place = 4u * (r >> 7) + 2u * (r >> 3 & 1u) + (r >> 6 & 1u);",
}
"""Token and place of byte r of a block in device order."""


def _device(places: str) -> str:
    return (
        """
// x (B, H, n, D), codebook (S, 256, 8), halves (S, 256) -> codes (B, H, n / 32, D).
// A thread finds the nearest centroid for one byte of the device's order, a threadgroup fills 32 words.
const int sub = 8;
VQ_SHARED(uint, found, 128);
const uint D = x_shape[3], M = D / 8u, books = halves_shape[0], C = 256u;
const uint thread = thread_index_in_threadgroup, first = threadgroup_position_in_grid.x * 128u;
const uint block = (first + thread) / (32u * M), r = first + thread - block * 32u * M;
const uint token = block * 32u + """
        + places
        + """
const uint own = token * M + place, book = books == 1u ? 0u : place;
"""
        + NEAREST
        + """found[thread] = finite ? code : 0u;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread < 32u) {
  uint word = 0u;
  VQ_UNROLL
  for (uint i = 0u; i < 4u; ++i) word |= found[4u * thread + i] << (8u * i);
  codes[first / 4u + thread] = word;
}
"""
    )


DEVICE = {side: _device(places) for side, places in DEVICE_PLACES.items()}

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
