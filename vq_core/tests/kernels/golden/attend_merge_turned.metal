#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_SHARED_PTR(T) threadgroup T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_LOCAL_PTR(T) thread T*
#define VQ_CONSTANT(T, name, n) constant T name[n]
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
#define VQ_FN inline
inline float vq_mul(float a, float b) {
#pragma METAL fp contract(off)
return a * b;
}
inline float vq_div(float a, float b) { return metal::precise::divide(a, b); }
VQ_CONSTANT(uint, HADAMARD_MINUS, 120) = {0u, 2954u, 1814u, 3628u, 3162u, 2230u, 366u, 732u, 1464u, 2928u, 1762u, 3524u, 0u, 649754u, 250934u, 501868u, 1003736u, 958898u, 869222u, 689870u, 331166u, 662332u, 276090u, 552180u, 55786u, 111572u, 223144u, 446288u, 892576u, 736578u, 424582u, 849164u, 2u, 178956971u, 51376328u, 161831534u, 205505312u, 110455226u, 16714892u, 173385446u, 66859568u, 156670874u, 267438272u, 89812586u, 264446732u, 90814886u, 252480572u, 94824086u, 204615932u, 110860886u, 13157372u, 175008086u, 52629488u, 163161434u, 210517952u, 115774826u, 36765452u, 194663846u, 147061808u, 241784474u, 0u, 1142u, 2284u, 474u, 948u, 1896u, 3792u, 3490u, 2886u, 1678u, 3356u, 2618u, 0u, 398822u, 797644u, 546714u, 44854u, 89708u, 179416u, 358832u, 717664u, 386754u, 773508u, 498442u, 996884u, 945194u, 841814u, 635054u, 221534u, 443068u, 886136u, 723698u, 2u, 178956971u, 51376328u, 161831534u, 205505312u, 110455226u, 16714892u, 173385446u, 66859568u, 156670874u, 267438272u, 89812586u, 264446732u, 90814886u, 252480572u, 94824086u, 204615932u, 110860886u, 13157372u, 175008086u, 52629488u, 163161434u, 210517952u, 115774826u, 36765452u, 194663846u, 147061808u, 241784474u};
VQ_FN void hadamard_held(VQ_LOCAL_PTR(float) v, VQ_SHARED_PTR(float) room, uint D, uint lane, bool transposed) {
const float norm = vq_div(1.0f, sqrt(float(D)));
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) v[r] = vq_mul(v[r], norm);
if (D >= 32u && (D & (D - 1u)) == 0u) {
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) {
if (r * 32u < D) {
VQ_UNROLL
for (uint o = 1u; o < 32u; o <<= 1) {
const float mine = v[r], other = simd_shuffle_xor(mine, ushort(o));
v[r] = (lane & o) != 0u ? other - mine : mine + other;
}
}
}
VQ_UNROLL
for (uint o = 1u; o < 8u; o <<= 1) {
if (o * 32u < D) {
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) {
if ((r & o) == 0u && r * 32u < D) {
const float a = v[r], b = v[r + o];
v[r] = a + b;
v[r + o] = a - b;
}
}
}
}
return;
}
const uint odd = D >> ctz(D), m = odd == 1u ? 1u : 4u * odd, run = D / m;
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r)
if (r * 32u + lane < D) room[r * 32u + lane] = v[r];
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint stride = 1u; stride < run; stride <<= 1) {
for (uint p = lane; p < D / 2u; p += 32u) {
const uint at = 2u * p - (p & (stride - 1u));
const float a = room[at], b = room[at + stride];
room[at] = a + b;
room[at + stride] = a - b;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
}
const uint table = (odd == 3u ? 0u : odd == 5u ? 12u : 32u) + (transposed ? 60u : 0u);
for (uint i = lane; i < D; i += 32u) {
const uint minus = m > 1u ? uint(HADAMARD_MINUS[table + i / run]) : 0u, place = i % run;
const float first = room[place];
float sum = minus & 1u ? -first : first;
for (uint j = 1u; j < m; ++j) {
const float w = room[j * run + place];
sum += minus >> j & 1u ? -w : w;
}
room[256u + i] = sum;
}
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r)
if (r * 32u + lane < D) v[r] = room[256u + r * 32u + lane];
simdgroup_barrier(mem_flags::mem_threadgroup);
}
template <typename T>
[[kernel]] void custom_kernel_attend_merge_turned__float16_t_float_float_float_float_uint32_t_float16_t(
  const device float* sums [[buffer(0)]],
  const constant int* sums_shape [[buffer(1)]],
  const device float* tops [[buffer(2)]],
  const device float* logits [[buffer(3)]],
  const device float* signs [[buffer(4)]],
  const constant int* signs_shape [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device float16_t* out [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint query_length = run_numbers[0]; const uint with_logits = run_numbers[1]; const uint exact_splits = run_numbers[2]; const uint D = run_numbers[3];
VQ_SHARED(float, plain, 256);
VQ_SHARED(float, room, 512);
VQ_SHARED(float, others, 512);
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
for (uint c0 = 0u; c0 < D; c0 += 128u) {
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
if (run == 0u && c < D) {
plain[c] = exact / whole;
room[c] = packed / whole;
}
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (sg == 0u) {
const uint rounds = signs_shape[0];
VQ_LOCAL(float, ahead, 8);
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r)
if (r * 32u < D) ahead[r] = signs[(true ? rounds - 1u : 0u) * D + min(r * 32u + lane, D - 1u)];
VQ_LOCAL(float, v, 8);
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) v[r] = r * 32u + lane < D ? float(room[r * 32u + lane]) : 0.0f;
for (uint k = 0u; k < rounds; ++k) {
VQ_LOCAL(float, by, 8);
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) by[r] = r * 32u < D ? float(ahead[r]) : 0.0f;
if (k + 1u < rounds) {
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r)
if (r * 32u < D) ahead[r] = signs[(true ? rounds - 2u - k : k + 1u) * D + min(r * 32u + lane, D - 1u)];
}
if (!(true)) { VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) v[r] *= by[r]; }
hadamard_held(v, room, D, lane, true);
if (true) { VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) v[r] *= by[r]; }
}
VQ_UNROLL
for (uint r = 0u; r < 8u; ++r) {
const uint i = r * 32u + lane;
if (i < D) out[n * D + i] = T(plain[i] + v[r]);
}
}

}

template [[host_name("custom_kernel_attend_merge_turned__float16_t_float_float_float_float_uint32_t_float16_t")]] [[kernel]] decltype(custom_kernel_attend_merge_turned__float16_t_float_float_float_float_uint32_t_float16_t<float16_t>) custom_kernel_attend_merge_turned__float16_t_float_float_float_float_uint32_t_float16_t<float16_t>;

// another variant
template <typename T>
[[kernel]] void custom_kernel_attend_merge_turned__bfloat16_t_float_float_float_float_uint32_t_bfloat16_t(
  const device float* sums [[buffer(0)]],
  const constant int* sums_shape [[buffer(1)]],
  const device float* tops [[buffer(2)]],
  const device float* logits [[buffer(3)]],
  const device float* signs [[buffer(4)]],
  const constant int* signs_shape [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device bfloat16_t* out [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T>
[[kernel]] void custom_kernel_attend_merge_turned__float_float_float_float_float_uint32_t_float(
  const device float* sums [[buffer(0)]],
  const constant int* sums_shape [[buffer(1)]],
  const device float* tops [[buffer(2)]],
  const device float* logits [[buffer(3)]],
  const device float* signs [[buffer(4)]],
  const constant int* signs_shape [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device float* out [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
