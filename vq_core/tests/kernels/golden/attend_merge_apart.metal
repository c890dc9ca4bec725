#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_UNROLL _Pragma("clang loop unroll(full)")

[[kernel]] void custom_kernel_attend_merge_apart_float_float_float_uint32_t_float_float(
  const device float* sums [[buffer(0)]],
  const constant int* sums_shape [[buffer(1)]],
  const device float* tops [[buffer(2)]],
  const device float* logits [[buffer(3)]],
  const device uint32_t* run_numbers [[buffer(4)]],
  device float* plain [[buffer(5)]],
  device float* stored [[buffer(6)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint query_length = run_numbers[0]; const uint with_logits = run_numbers[1]; const uint exact_splits = run_numbers[2]; const uint D = run_numbers[3]; const uint width = run_numbers[4]; VQ_SHARED(float, others, 512);
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
for (uint o = 1u; o < 32u; o <<= 1) weight += simd_shuffle_xor(weight, ushort(o));
if (lane == 0u) marks[16u + sg] = weight;
threadgroup_barrier(mem_flags::mem_threadgroup);
float whole = extra;
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) whole += marks[16u + k];
whole = whole == 0.0f ? 1.0f : whole;
for (uint c0 = 0u; c0 < W; c0 += 128u) {
const uint c = c0 + column;
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
if (run == 0u && c < D) plain[n * D + c] = exact / whole;
if (run == 0u && c < width) stored[n * width + c] = packed / whole;
}

}
