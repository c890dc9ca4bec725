#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_LOCAL(T, name, n) T name[n]
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
inline float2 vq_float2(float x, float y) { return float2(x, y); }
VQ_FN float2 projection_parts(float v) {
const float scaled = v * 2048.0f, first = rint(scaled);
return vq_float2(first, rint((scaled - first) * 512.0f));
}
VQ_FN float projected(float high, float first_second, float second_first, float scale) {
const float low = first_second + second_first;
return vq_add(high * (scale * 2.384185791015625e-07f), low * (scale * 4.656612873077393e-10f));
}
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float_float_1_float_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint W = run_numbers[0]; const uint rows = run_numbers[1];
const uint D = x_shape[3], words = W * uint(bits) / 32u;
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
for (uint i = lane; i < D; i += 32u) {
const float2 parts = projection_parts(all[own + i]);
all[own + i] = parts.x;
low[own + i] = parts.y;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint j = lane; j < D; j += 32u) {
float whole = 0.0f, mixed = 0.0f, other = 0.0f;
for (uint i = 0u; i < D; ++i) {
const float a = all[own + i], b = low[own + i], f = turning[i * D + j], s = turning_low[i * D + j];
whole += a * f;
mixed += a * s;
other += b * f;
}
made[own + j] = projected(whole, mixed, other, 1.0f);
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = lane; i < D; i += 32u) {
const float w = made[own + i];
all[own + i] = w;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = lane; i < W; i += 32u) {
const float y = i < D ? vq_mul(all[own + i], root) : 0.0f;
uint first = 0u;
VQ_UNROLL
for (int k = 0; k < (1 << bits) - 1; ++k) first += y > tables[0 + k] ? 1u : 0u;
const float r = vq_sub(y, tables[16u + first]);
uint second = 0u;
VQ_UNROLL
for (int k = 0; k < (1 << bits) - 1; ++k) second += r > tables[32 + k] ? 1u : 0u;
all[own + i] = float(first | second << 8u);
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint o = lane; o < words; o += 32u) {
const uint begin = o * 32u / uint(bits);
uint word = 0u;
VQ_UNROLL
for (uint k = 0u; k < (31u + uint(bits)) / uint(bits) + 1u; ++k) {
const uint i = begin + k, at = i * uint(bits);
if (at < o * 32u + 32u && i < W) {
const uint w = uint(all[own + i]), q = w & 255u;
word |= at >= o * 32u ? q << (at - o * 32u) : q >> (o * 32u - at);
}
}
if (n < rows) codes[row * (words) + o] = word;
}
for (uint o = lane; o < words; o += 32u) {
const uint begin = o * 32u / uint(bits);
uint word = 0u;
VQ_UNROLL
for (uint k = 0u; k < (31u + uint(bits)) / uint(bits) + 1u; ++k) {
const uint i = begin + k, at = i * uint(bits);
if (at < o * 32u + 32u && i < W) {
const uint w = uint(all[own + i]), q = w >> 8u;
word |= at >= o * 32u ? q << (at - o * 32u) : q >> (o * 32u - at);
}
}
if (n < rows) rest[row * (words) + o] = word;
}
if (n < rows && lane == 0u) scale[row] = M(step);

}

template [[host_name("custom_kernel_turboquant_rvq_pack_haar__float_float_1_float_float_float_float_uint32_t_uint32_t_uint32_t_float")]] [[kernel]] decltype(custom_kernel_turboquant_rvq_pack_haar__float_float_1_float_float_float_float_uint32_t_uint32_t_uint32_t_float<float, float, 1>) custom_kernel_turboquant_rvq_pack_haar__float_float_1_float_float_float_float_uint32_t_uint32_t_uint32_t_float<float, float, 1>;

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float_float_2_float_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float_float_3_float_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float_float_4_float_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float16_t_float16_t_1_float16_t_float_float_float_uint32_t_uint32_t_uint32_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float16_t* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float16_t_float16_t_2_float16_t_float_float_float_uint32_t_uint32_t_uint32_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float16_t* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float16_t_float16_t_3_float16_t_float_float_float_uint32_t_uint32_t_uint32_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float16_t* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__float16_t_float16_t_4_float16_t_float_float_float_uint32_t_uint32_t_uint32_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float16_t* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__bfloat16_t_float_1_bfloat16_t_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__bfloat16_t_float_2_bfloat16_t_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__bfloat16_t_float_3_bfloat16_t_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_turboquant_rvq_pack_haar__bfloat16_t_float_4_bfloat16_t_float_float_float_uint32_t_uint32_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* turning [[buffer(2)]],
  const device float* turning_low [[buffer(3)]],
  const device float* tables [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  device uint32_t* rest [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
