"""The matrix skeleton's text: attention of a few queries on packed tokens by m16n8k16 tensor-core products.

A warp takes one KV head, ``UNIT`` blocks of 32 tokens a step, and all of up to 8 query rows of that head: the codes are
read once for all of them.  Scores are A = 16 tokens x 16 channels of codes by B = 16 channels x 8 query rows; sums are
A = 16 channels x 16 tokens by B = 16 tokens x 8 query rows, which the tile of scores becomes when it is turned.  Each
warp has a ring of steps in threadgroup memory, filled by asynchronous copies.  Running maxima are raised, and sums
shrunk, only when a score exceeds its maximum by 2^4.
"""

from __future__ import annotations

HEADROOM = 4.0

HEADER = """
// Two numbers of a pair of 16 bits each.
VQ_FN float2 matrix_floats(uint pair, half) {
  const half2 both = as_type<half2>(pair);
  return vq_float2(float(both.x), float(both.y));
}
VQ_FN float2 matrix_floats(uint pair, bfloat) {
  return vq_float2(as_type<float>(pair << 16), as_type<float>(pair & 0xffff0000u));
}
VQ_FN uint matrix_times(uint a, uint b) { return as_type<uint>(as_type<half2>(a) * as_type<half2>(b)); }
template <int N> VQ_FN void matrix_copy(VQ_SHARED_PTR(uint4) to, VQ_GLOBAL(uint4) from, uint lane) {
  // One address a side, and constants apart: a sum of uints would be an address of its own.
  VQ_SHARED_PTR(uint4) mine = to + lane;
  VQ_GLOBAL(uint4) theirs = from + lane;
  VQ_UNROLL
  for (int i = 0; i < N; i += 32)
    if (N % 32 == 0 || i + int(lane) < N) vq_copy_async(mine, theirs, i);
}
"""

SHARED = """
VQ_DYNAMIC(uint, ring);
VQ_SHARED(float, marks, WARPS * 16);
"""

COMMON = """
// q (B, Hq, L, D), rows (B, 8), fields (N, H, blocks of a page, ...)
// -> sums (B, H, splits, M, V), tops (B, H, splits, M, 2).
const uint lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup, g = lane / 4u, t = lane & 3u;
const uint rows_all = q_shape[0], Hq = q_shape[1], L = q_shape[2], H = FIRST_FIELD_shape[1], M = Hq / H * L;
const uint turn = threadgroup_position_in_grid.x, chunks = (M + 7u) / 8u;
const uint h = threadgroup_position_in_grid.y / chunks, m0 = (threadgroup_position_in_grid.y - h * chunks) * 8u;
const uint b = threadgroup_position_in_grid.z, held = min(M - m0, 8u);
"""

ACCUMULATORS = """
VQ_LOCAL(float4, acc, TILES);
VQ_LOCAL(float4, extra, 1);
VQ_UNROLL
for (uint i = 0u; i < TILES; ++i) acc[i] = vq_float4(0.0f, 0.0f, 0.0f, 0.0f);
extra[0] = vq_float4(0.0f, 0.0f, 0.0f, 0.0f);
float top0 = -1e30f, top1 = -1e30f;
"""

PACKED = """
// The first copies are under way before anything else is read.
const int packed = rows[b * 8u], window = rows[b * 8u + 2u];
const int hidden = max(rows[b * 8u + 4u] - rows[b * 8u + 1u], 0);
const uint begin = uint(hidden) / STEP, steps = (uint(packed) + STEP - 1u) / STEP;
const uint part = split - exact_splits, parts = splits - exact_splits;
// A threadgroup that had exact tokens first takes fewer steps, so that all end together.
const uint count = steps > begin ? steps - begin : 0u, per = (count + exact_splits * folded + parts - 1u) / parts;
const uint cut = min(folded, per), low = begin + min(part * per - min(part, exact_splits) * cut, count);
const uint high = min(steps, low + per - (part < exact_splits ? cut : 0u));
VQ_SHARED_PTR(uint4) own = vq_view<uint4>(ring) + warp * (STAGES * STEP_SIZE);
uint next = low + warp, fill = 0u;
VQ_UNROLL
for (uint i = 0u; i + 1u < STAGES; ++i) {
  if (next < high) {
    VQ_SHARED_PTR(uint4) to = own + fill * STEP_SIZE;
    LOAD
  }
  vq_copy_commit();
  next += WARPS;
  fill = fill + 1u == STAGES ? 0u : fill + 1u;
}
KEEP
VQ_LOCAL(uint, query, STORED_PAIRS);
float back = 1.0f;
{OWN
  // The lane's part of query row g: channels 8 p + 2 t and the next, as halves below 1 with the power of two apart.
  const uint m = m0 + min(g, held - 1u), group = m / L;
  const uint first = (((b * Hq + h * (Hq / H) + group) * L + (m - group * L)) * STORED + 2u * t) / 2u;
  float highest = 0.0f;
  VQ_UNROLL
  for (uint p = 0u; p < STORED_PAIRS; ++p) {
    READ
    highest = max(highest, max(fabs(both.x), fabs(both.y)));
  }
  highest = max(highest, simd_shuffle_xor(highest, 1u));
  highest = max(highest, simd_shuffle_xor(highest, 2u));
  // Not below 2^-119: what divides by it is folded once more, and infinity times a query of zeros is not zero.
  const uint power = min(max(as_type<uint>(highest) >> 23, 8u), 252u);
  const float down = as_type<float>((253u - power) << 23);
  back = as_type<float>((power + 1u) << 23);
  VQ_UNROLL
  for (uint p = 0u; p < STORED_PAIRS; ++p) {
    const float2 both = AGAIN;
    const float by = down * matrix_fold(p);
    query[p] = vq_half_pair(both.x * by, both.y * by);
  }
}
const float scale = as_type<float>(scale_bits) * KEY_SCALE;
const float scale0 = scale * simd_shuffle(back, 8u * t), scale1 = scale * simd_shuffle(back, 8u * t + 4u);
// Of a row's packed tokens a query sees `hidden` to `end`, all of its lane's two columns those below `least`.
const int after = causal != 0u ? window - int(L) + 1 : int(L);
const uint row0 = min(m0 + 2u * t, M - 1u), row1 = min(m0 + 2u * t + 1u, M - 1u);
const int end0 = min(packed, packed + after + int(row0 - row0 / L * L));
const int end1 = min(packed, packed + after + int(row1 - row1 / L * L)), least = min(packed, packed + after);
uint slot = 0u;
for (uint step = low + warp; step < high; step += WARPS) {
  if (next < high) {
    VQ_SHARED_PTR(uint4) to = own + fill * STEP_SIZE;
    LOAD
  }
  vq_copy_commit();
  next += WARPS;
  fill = fill + 1u == STAGES ? 0u : fill + 1u;
  vq_copy_wait<int(STAGES) - 1>();
  simdgroup_barrier(mem_flags::mem_threadgroup);
  VQ_SHARED_PTR(uint) mine = ring + (warp * STAGES + slot) * (STEP_SIZE * 4u);
  slot = slot + 1u == STAGES ? 0u : slot + 1u;
  if (step * STEP + STEP > uint(packed)) {
    // What lies in blocks past the last token may be NaN, and zero times that is not zero.
    const uint filled = (uint(packed) - step * STEP + 31u) / 32u;
    CLEAR
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  VQ_LOCAL(float4, c, 2 * UNIT);
  VQ_LOCAL(uint, p, 4 * UNIT);
  matrix_scores(KEYS_STEP, lane, query, c);
  float most0 = -INFINITY, most1 = -INFINITY;
  const int token = int(step * STEP);
  if (token < hidden || token + int(STEP) > least) {
    VQ_UNROLL
    for (uint i = 0u; i < 2u * UNIT; ++i) {
      const int one = token + int(16u * i + g), two = one + 8;
      c[i] = vq_float4(
          one < hidden || one >= end0 ? -INFINITY : c[i].x, one < hidden || one >= end1 ? -INFINITY : c[i].y,
          two < hidden || two >= end0 ? -INFINITY : c[i].z, two < hidden || two >= end1 ? -INFINITY : c[i].w);
    }
  }
  VQ_UNROLL
  for (uint i = 0u; i < 2u * UNIT; ++i) {
    most0 = max(most0, max(c[i].x, c[i].z));
    most1 = max(most1, max(c[i].y, c[i].w));
  }
  most0 *= scale0;
  most1 *= scale1;
  if (simd_any(most0 > top0 + HEADROOM || most1 > top1 + HEADROOM)) {
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
  }
  VQ_UNROLL
  for (uint i = 0u; i < 2u * UNIT; ++i) {
    const float w0 = vq_exp2_fast(fma(c[i].x, scale0, -top0)), w1 = vq_exp2_fast(fma(c[i].y, scale1, -top1));
    const float w2 = vq_exp2_fast(fma(c[i].z, scale0, -top0)), w3 = vq_exp2_fast(fma(c[i].w, scale1, -top1));
    p[2u * i] = vq_transpose_8x8(vq_half_pair(w0, w1));
    p[2u * i + 1u] = vq_transpose_8x8(vq_half_pair(w2, w3));
  }
  matrix_values(VALUES_STEP, lane, p, acc, extra);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
vq_copy_wait<0>();
matrix_finish(VALUES_LANE, acc, extra);
"""

PLAIN = {
    "OWN": "",
    "READ": """const uint pair = vq_view<uint>(q)[first + 4u * p];
    query[p] = pair;
    const float2 both = matrix_floats(pair, Q(0.0f));""",
    "AGAIN": "matrix_floats(query[p], Q(0.0f))",
}
"""Queries as the model gives them."""
PREPARED = {
    "OWN": "",
    "READ": "const float2 both = vq_view<float2>(prepared)[first + 4u * p];",
    "AGAIN": "vq_view<float2>(prepared)[first + 4u * p]",
}
"""In the basis that the keys are stored in."""

MIX = """
// The warps' sums become one: a row of 8 queries a warp, padded so that no two lanes meet in a bank.
threadgroup_barrier(mem_flags::mem_threadgroup);
VQ_SHARED_PTR(float) mixed = vq_view<float>(ring) + warp * (8u * (V + 4u));
VQ_UNROLL
for (uint i = 0u; i < TILES; ++i) {
  const uint at = 2u * t * (V + 4u) + (CHANNEL), after = at + (NEXT);
  const float4 one = acc[i];
  if (2u * t < held) {
    mixed[at] = one.x;
    mixed[after] = one.z;
  }
  if (2u * t + 1u < held) {
    mixed[at + V + 4u] = one.y;
    mixed[after + V + 4u] = one.w;
  }
}
if (g == 0u) {
  marks[warp * 16u + 2u * t] = top0;
  marks[warp * 16u + 2u * t + 1u] = top1;
  marks[warp * 16u + 8u + 2u * t] = extra[0].z;
  marks[warp * 16u + 9u + 2u * t] = extra[0].w;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint whole = ((b * H + h) * splits + split) * M + m0;
for (uint e = thread_index_in_threadgroup; e < held * V; e += WARPS * 32u) {
  const uint n = e / V;
  float top = -1e30f, weight = 0.0f, sum = 0.0f;
  VQ_UNROLL
  for (uint w = 0u; w < WARPS; ++w) top = max(top, float(marks[w * 16u + n]));
  VQ_UNROLL
  for (uint w = 0u; w < WARPS; ++w) {
    const float share = vq_exp2_fast(float(marks[w * 16u + n]) - top);
    weight += share * float(marks[w * 16u + 8u + n]);
    sum += share * float(vq_view<float>(ring)[w * (8u * (V + 4u)) + n * (V + 4u) + (e - n * V)]);
  }
  sums[whole * V + e] = sum;
  if (e == n * V) {
    tops[(whole + n) * 2u] = top;
    tops[(whole + n) * 2u + 1u] = weight;
  }
}
"""


def kept(constants: dict[str, dict[str, int]], at: int, threads: int) -> tuple[dict[str, str], int]:
    """The names that put constants into threadgroup memory and hand them on.

    Args:
        constants: Of each side, by its letter, their sizes in words.
        at: The first free word.
        threads: Of a threadgroup.

    Returns:
        The names, and the words of all threadgroup memory.
    """
    words = {"KEYS_STEP": "mine", "VALUES_STEP": "mine", "VALUES_LANE": "lane"}
    lines = []
    for side, sizes in constants.items():
        if sizes and side == "k":
            words["KEYS_STEP"] = f"ring + {at}u, mine"
        elif sizes:
            words |= {"VALUES_STEP": f"ring + {at}u, mine", "VALUES_LANE": f"ring + {at}u, lane"}
        for name, size in sizes.items():
            lines += [
                f"for (uint i = thread_index_in_threadgroup; i < {size // 4}u; i += {threads}u)",
                f"  vq_view<uint4>(ring)[{at // 4}u + i] = vq_view<uint4>({side}_{name})[i];",
            ]
            at += size
    if lines:
        lines.append("threadgroup_barrier(mem_flags::mem_threadgroup);")
    return words | {"KEEP": "\n".join(lines)}, at
