#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_FN inline
inline float vq_mul(float a, float b) {
#pragma METAL fp contract(off)
return a * b;
}
inline float vq_add(float a, float b) {
#pragma METAL fp contract(off)
return a + b;
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
VQ_FN uint turboquant_code(uint low, uint high, uint shift, uint bits) {
const uint q = shift + bits > 32u ? low >> shift | high << (32u - shift) : low >> shift;
return q & ((1u << bits) - 1u);
}
template <typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_unpack_haar__float16_t_1_uint32_t_uint32_t_float16_t_float16_t_float_float_float_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device uint32_t* sketch [[buffer(2)]],
  const device float16_t* scale [[buffer(3)]],
  const device float16_t* gap [[buffer(4)]],
  const device float* turning [[buffer(5)]],
  const device float* turning_low [[buffer(6)]],
  const device float* sketching [[buffer(7)]],
  const constant int* sketching_shape [[buffer(8)]],
  const device float* sketching_low [[buffer(9)]],
  const device float* tables [[buffer(10)]],
  const device uint32_t* run_numbers [[buffer(11)]],
  device float* x [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint head_dim = run_numbers[0]; const uint rows = run_numbers[1];
const uint D = head_dim, m = sketching_shape[0], words = codes_shape[3];
VQ_SHARED(float, low, 2048);
VQ_SHARED(float, made, 2048);
VQ_SHARED(float, all, 2048);
const uint lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup * 512u;
const uint n = threadgroup_position_in_grid.x * 4u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u);
const float root = sqrt(float(D)), unit = vq_div(1.0f, root), size = vq_mul(float(scale[row]), root);
const float factor = tables[32], part = tables[33] * 0.00048828125f;
for (uint i = lane; i < D; i += 32u) {
float high = 0.0f, low_part = 0.0f;
for (uint o = 0u; o < m / 32u; ++o) {
const uint word = sketch[row * (m / 32u) + o];
for (uint k = 0u; k < 32u; ++k) {
const float f = sketching[(o * 32u + k) * D + i], s = sketching_low[(o * 32u + k) * D + i];
high += (word >> k & 1u) != 0u ? f : -f;
low_part += (word >> k & 1u) != 0u ? s : -s;
}
}
const float back = vq_add(vq_mul(high, part), vq_mul(low_part, part * 0.001953125f));
const uint which = turboquant_code(codes[row * words + i * uint(bits) / 32u], codes[row * words + min(i * uint(bits) / 32u + 1u, words - 1u)], i * uint(bits) % 32u, uint(bits));
all[own + i] = vq_mul(vq_add(tables[16u + which], vq_mul(vq_mul(float(gap[row]), factor), back)), unit);
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
for (uint i = lane; n < rows && i < D; i += 32u) x[row * D + i] = vq_mul(all[own + i], size);

}

template [[host_name("custom_kernel_turboquant_prod_unpack_haar__float16_t_1_uint32_t_uint32_t_float16_t_float16_t_float_float_float_float_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_turboquant_prod_unpack_haar__float16_t_1_uint32_t_uint32_t_float16_t_float16_t_float_float_float_float_float_uint32_t_float<float16_t, 1>) custom_kernel_turboquant_prod_unpack_haar__float16_t_1_uint32_t_uint32_t_float16_t_float16_t_float_float_float_float_float_uint32_t_float<float16_t, 1>;

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_unpack_haar__float16_t_2_uint32_t_uint32_t_float16_t_float16_t_float_float_float_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device uint32_t* sketch [[buffer(2)]],
  const device float16_t* scale [[buffer(3)]],
  const device float16_t* gap [[buffer(4)]],
  const device float* turning [[buffer(5)]],
  const device float* turning_low [[buffer(6)]],
  const device float* sketching [[buffer(7)]],
  const constant int* sketching_shape [[buffer(8)]],
  const device float* sketching_low [[buffer(9)]],
  const device float* tables [[buffer(10)]],
  const device uint32_t* run_numbers [[buffer(11)]],
  device float* x [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_unpack_haar__float16_t_3_uint32_t_uint32_t_float16_t_float16_t_float_float_float_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device uint32_t* sketch [[buffer(2)]],
  const device float16_t* scale [[buffer(3)]],
  const device float16_t* gap [[buffer(4)]],
  const device float* turning [[buffer(5)]],
  const device float* turning_low [[buffer(6)]],
  const device float* sketching [[buffer(7)]],
  const constant int* sketching_shape [[buffer(8)]],
  const device float* sketching_low [[buffer(9)]],
  const device float* tables [[buffer(10)]],
  const device uint32_t* run_numbers [[buffer(11)]],
  device float* x [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_unpack_haar__float_1_uint32_t_uint32_t_float_float_float_float_float_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device uint32_t* sketch [[buffer(2)]],
  const device float* scale [[buffer(3)]],
  const device float* gap [[buffer(4)]],
  const device float* turning [[buffer(5)]],
  const device float* turning_low [[buffer(6)]],
  const device float* sketching [[buffer(7)]],
  const constant int* sketching_shape [[buffer(8)]],
  const device float* sketching_low [[buffer(9)]],
  const device float* tables [[buffer(10)]],
  const device uint32_t* run_numbers [[buffer(11)]],
  device float* x [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_unpack_haar__float_2_uint32_t_uint32_t_float_float_float_float_float_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device uint32_t* sketch [[buffer(2)]],
  const device float* scale [[buffer(3)]],
  const device float* gap [[buffer(4)]],
  const device float* turning [[buffer(5)]],
  const device float* turning_low [[buffer(6)]],
  const device float* sketching [[buffer(7)]],
  const constant int* sketching_shape [[buffer(8)]],
  const device float* sketching_low [[buffer(9)]],
  const device float* tables [[buffer(10)]],
  const device uint32_t* run_numbers [[buffer(11)]],
  device float* x [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_turboquant_prod_unpack_haar__float_3_uint32_t_uint32_t_float_float_float_float_float_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device uint32_t* sketch [[buffer(2)]],
  const device float* scale [[buffer(3)]],
  const device float* gap [[buffer(4)]],
  const device float* turning [[buffer(5)]],
  const device float* turning_low [[buffer(6)]],
  const device float* sketching [[buffer(7)]],
  const constant int* sketching_shape [[buffer(8)]],
  const device float* sketching_low [[buffer(9)]],
  const device float* tables [[buffer(10)]],
  const device uint32_t* run_numbers [[buffer(11)]],
  device float* x [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
