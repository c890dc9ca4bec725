#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_SHARED_PTR(T) threadgroup T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_CONSTANT(T, name, n) constant T name[n]
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
#define VQ_FN inline
inline float vq_mul(float a, float b) {
#pragma METAL fp contract(off)
return a * b;
}
inline float vq_add(float a, float b) {
#pragma METAL fp contract(off)
return a + b;
}
inline float vq_sub(float a, float b) {
#pragma METAL fp contract(off)
return a - b;
}
inline float vq_div(float a, float b) { return metal::precise::divide(a, b); }
inline uint vq_ballot(bool p) { return uint(metal::simd_vote::vote_t(metal::simd_ballot(p))); }
#define simd_ballot vq_ballot
inline float2 vq_float2(float x, float y) { return float2(x, y); }
VQ_FN float2 projection_parts(float v) {
const float scaled = v * 2048.0f, first = rint(scaled);
return vq_float2(first, rint((scaled - first) * 512.0f));
}
VQ_FN float projected(float high, float first_second, float second_first, float scale) {
const float low = first_second + second_first;
return vq_add(high * (scale * 2.384185791015625e-07f), low * (scale * 4.656612873077393e-10f));
}
VQ_CONSTANT(uint, HADAMARD_MINUS, 120) = {0u, 2954u, 1814u, 3628u, 3162u, 2230u, 366u, 732u, 1464u, 2928u, 1762u, 3524u, 0u, 649754u, 250934u, 501868u, 1003736u, 958898u, 869222u, 689870u, 331166u, 662332u, 276090u, 552180u, 55786u, 111572u, 223144u, 446288u, 892576u, 736578u, 424582u, 849164u, 2u, 178956971u, 51376328u, 161831534u, 205505312u, 110455226u, 16714892u, 173385446u, 66859568u, 156670874u, 267438272u, 89812586u, 264446732u, 90814886u, 252480572u, 94824086u, 204615932u, 110860886u, 13157372u, 175008086u, 52629488u, 163161434u, 210517952u, 115774826u, 36765452u, 194663846u, 147061808u, 241784474u, 0u, 1142u, 2284u, 474u, 948u, 1896u, 3792u, 3490u, 2886u, 1678u, 3356u, 2618u, 0u, 398822u, 797644u, 546714u, 44854u, 89708u, 179416u, 358832u, 717664u, 386754u, 773508u, 498442u, 996884u, 945194u, 841814u, 635054u, 221534u, 443068u, 886136u, 723698u, 2u, 178956971u, 51376328u, 161831534u, 205505312u, 110455226u, 16714892u, 173385446u, 66859568u, 156670874u, 267438272u, 89812586u, 264446732u, 90814886u, 252480572u, 94824086u, 204615932u, 110860886u, 13157372u, 175008086u, 52629488u, 163161434u, 210517952u, 115774826u, 36765452u, 194663846u, 147061808u, 241784474u};
VQ_FN void hadamard(VQ_SHARED_PTR(float) v, uint D, uint lane, bool transposed) {
const float norm = vq_div(1.0f, sqrt(float(D)));
const uint odd = D >> ctz(D), m = odd == 1u ? 1u : 4u * odd, run = D / m;
for (uint i = lane; i < D; i += 32u) v[i] = vq_mul(v[i], norm);
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint stride = 1u; stride < run; stride <<= 1) {
for (uint p = lane; p < D / 2u; p += 32u) {
const uint at = 2u * p - (p & (stride - 1u));
const float a = v[at], b = v[at + stride];
v[at] = a + b;
v[at + stride] = a - b;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
}
if (m > 1u) {
const uint table = (odd == 3u ? 0u : odd == 5u ? 12u : 32u) + (transposed ? 60u : 0u);
VQ_LOCAL(float, mixed, 16);
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
const uint i = r * 32u + lane;
if (i < D) {
const uint minus = HADAMARD_MINUS[table + i / run], place = i % run;
const float first = v[place];
float sum = minus & 1u ? -first : first;
for (uint j = 1u; j < m; ++j) {
const float w = v[j * run + place];
sum += minus >> j & 1u ? -w : w;
}
mixed[r] = sum;
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
if (r * 32u + lane < D) {
const float w = mixed[r];
v[r * 32u + lane] = w;
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
}
}
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__float_float_1_float_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float* scale [[buffer(11)]],
  device float* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint rows = run_numbers[0]; const uint W = run_numbers[1];
const uint D = x_shape[3], m = sketching_shape[1], words = W * uint(bits) / 32u;
VQ_SHARED(float, low, 2048);
VQ_SHARED(float, made, 2048);
VQ_SHARED(float, all, 2048);
const uint lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup * 512u;
const uint n = threadgroup_position_in_grid.x * 4u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u);
VQ_LOCAL(float, sum_terms, 16);
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) {
const uint i = k * 32u + lane;
const float w = i < D ? float(x[row * D + i]) : 0.0f;
sum_terms[k] = vq_mul(w, w);
if (i < D) all[own + i] = w;
}
VQ_UNROLL
for (uint h = 8u; h > 0u; h >>= 1) {
VQ_UNROLL
for (uint k = 0u; k < h; ++k) sum_terms[k] = vq_add(sum_terms[k], sum_terms[k + h]);
}
float sum = sum_terms[0];
VQ_UNROLL
for (uint h = 16u; h > 0u; h >>= 1) sum = vq_add(sum, simd_shuffle_xor(sum, h));
float step = sqrt(vq_div(sum, float(D)));
if (sizeof(M) == 2) step = float(half(step));
const float root = sqrt(float(D)), size = vq_mul(step, root);
const bool usable = size > 0.0f && size < INFINITY;
for (uint i = lane; i < D; i += 32u) {
const float w = all[own + i];
all[own + i] = usable ? vq_div(w, size) : 0.0f;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint k = 0u; k < uint(signs_shape[0]); ++k) {
for (uint i = lane; i < D; i += 32u) all[own + i] *= signs[k * D + i];
hadamard(all + own, D, lane, false);
}
const float unit = vq_div(1.0f, root);
VQ_LOCAL(float, left_terms, 16);
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) {
const uint i = k * 32u + lane;
left_terms[k] = 0.0f;
if (i < D) {
const float y = vq_mul(all[own + i], root);
uint first = 0u;
VQ_UNROLL
for (int k = 0; k < (1 << bits) - 1; ++k) first += y > tables[0 + k] ? 1u : 0u;
const float r = vq_sub(y, tables[16u + first]);
left_terms[k] = vq_mul(r, r);
all[own + i] = vq_mul(r, unit);
made[own + i] = float(first);
} else if (i < W) {
made[own + i] = 0.0f;
}
}
VQ_UNROLL
for (uint h = 8u; h > 0u; h >>= 1) {
VQ_UNROLL
for (uint k = 0u; k < h; ++k) left_terms[k] = vq_add(left_terms[k], left_terms[k + h]);
}
float left = left_terms[0];
VQ_UNROLL
for (uint h = 16u; h > 0u; h >>= 1) left = vq_add(left, simd_shuffle_xor(left, h));
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint o = lane; o < words; o += 32u) {
const uint begin = o * 32u / uint(bits);
uint word = 0u;
VQ_UNROLL
for (uint k = 0u; k < (31u + uint(bits)) / uint(bits) + 1u; ++k) {
const uint i = begin + k, at = i * uint(bits);
if (at < o * 32u + 32u && i < W) {
const uint w = uint(made[own + i]), q = w;
word |= at >= o * 32u ? q << (at - o * 32u) : q >> (o * 32u - at);
}
}
if (n < rows) codes[row * (words) + o] = word;
}
if (n < rows && lane == 0u) gap[row] = M(sqrt(vq_div(left, float(D))));
for (uint i = lane; i < D; i += 32u) {
const float2 parts = projection_parts(all[own + i]);
all[own + i] = parts.x;
low[own + i] = parts.y;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint j = lane; j < m; j += 32u) {
float whole = 0.0f, mixed = 0.0f, other = 0.0f;
for (uint i = 0u; i < D; ++i) {
const float a = all[own + i], b = low[own + i], f = sketching[i * m + j], s = sketching_low[i * m + j];
whole += a * f;
mixed += a * s;
other += b * f;
}
const uint word = simd_ballot(projected(whole, mixed, other, 1.0f) > 0.0f);
if (n < rows && lane == 0u) sketch[row * (m / 32u) + j / 32u] = word;
}
if (n < rows && lane == 0u) scale[row] = M(step);

}

template [[host_name("custom_kernel_turboquant_prod_pack_hadamard__float_float_1_float_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float")]] [[kernel]] decltype(custom_kernel_turboquant_prod_pack_hadamard__float_float_1_float_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float<float, float, 1>) custom_kernel_turboquant_prod_pack_hadamard__float_float_1_float_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float<float, float, 1>;

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__float_float_2_float_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float* scale [[buffer(11)]],
  device float* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__float_float_3_float_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float* scale [[buffer(11)]],
  device float* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__float16_t_float16_t_1_float16_t_float_float_float_float_uint32_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float16_t* scale [[buffer(11)]],
  device float16_t* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__float16_t_float16_t_2_float16_t_float_float_float_float_uint32_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float16_t* scale [[buffer(11)]],
  device float16_t* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__float16_t_float16_t_3_float16_t_float_float_float_float_uint32_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float16_t* scale [[buffer(11)]],
  device float16_t* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__bfloat16_t_float_1_bfloat16_t_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float* scale [[buffer(11)]],
  device float* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__bfloat16_t_float_2_bfloat16_t_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float* scale [[buffer(11)]],
  device float* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_pack_hadamard__bfloat16_t_float_3_bfloat16_t_float_float_float_float_uint32_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* signs [[buffer(2)]],
  const constant int* signs_shape [[buffer(3)]],
  const device float* sketching [[buffer(4)]],
  const constant int* sketching_shape [[buffer(5)]],
  const device float* sketching_low [[buffer(6)]],
  const device float* tables [[buffer(7)]],
  const device uint32_t* run_numbers [[buffer(8)]],
  device uint32_t* codes [[buffer(9)]],
  device uint32_t* sketch [[buffer(10)]],
  device float* scale [[buffer(11)]],
  device float* gap [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
