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
template <typename M>
[[kernel]] void custom_kernel_turboquant_prod_unpack_sketch__float16_t_uint32_t_float16_t_float_float_float_uint32_t_float(
  const device uint32_t* sketch [[buffer(0)]],
  const device float16_t* scale [[buffer(1)]],
  const device float* sketching [[buffer(2)]],
  const constant int* sketching_shape [[buffer(3)]],
  const device float* sketching_low [[buffer(4)]],
  const device float* tables [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device float* x [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint head_dim = run_numbers[0]; const uint rows = run_numbers[1];
const uint D = head_dim, m = sketching_shape[0];
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
all[own + i] = vq_mul(vq_mul(back, factor), unit);
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = lane; n < rows && i < D; i += 32u) x[row * D + i] = vq_mul(all[own + i], size);

}

template [[host_name("custom_kernel_turboquant_prod_unpack_sketch__float16_t_uint32_t_float16_t_float_float_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_turboquant_prod_unpack_sketch__float16_t_uint32_t_float16_t_float_float_float_uint32_t_float<float16_t>) custom_kernel_turboquant_prod_unpack_sketch__float16_t_uint32_t_float16_t_float_float_float_uint32_t_float<float16_t>;

// another variant
template <typename M>
[[kernel]] void custom_kernel_turboquant_prod_unpack_sketch__float_uint32_t_float_float_float_float_uint32_t_float(
  const device uint32_t* sketch [[buffer(0)]],
  const device float* scale [[buffer(1)]],
  const device float* sketching [[buffer(2)]],
  const constant int* sketching_shape [[buffer(3)]],
  const device float* sketching_low [[buffer(4)]],
  const device float* tables [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device float* x [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
