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
template <typename T, typename M>
[[kernel]] void custom_kernel_turboquant_prod_pack_sketch__float_float_float_float_float_float_uint32_t_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* sketching [[buffer(2)]],
  const constant int* sketching_shape [[buffer(3)]],
  const device float* sketching_low [[buffer(4)]],
  const device float* tables [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device uint32_t* sketch [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint rows = run_numbers[0];
const uint D = x_shape[3], m = sketching_shape[1];
VQ_SHARED(float, low, 2048);
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

template [[host_name("custom_kernel_turboquant_prod_pack_sketch__float_float_float_float_float_float_uint32_t_uint32_t_float")]] [[kernel]] decltype(custom_kernel_turboquant_prod_pack_sketch__float_float_float_float_float_float_uint32_t_uint32_t_float<float, float>) custom_kernel_turboquant_prod_pack_sketch__float_float_float_float_float_float_uint32_t_uint32_t_float<float, float>;

// another variant
template <typename T, typename M>
[[kernel]] void custom_kernel_turboquant_prod_pack_sketch__float16_t_float16_t_float16_t_float_float_float_uint32_t_uint32_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* sketching [[buffer(2)]],
  const constant int* sketching_shape [[buffer(3)]],
  const device float* sketching_low [[buffer(4)]],
  const device float* tables [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device uint32_t* sketch [[buffer(7)]],
  device float16_t* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M>
[[kernel]] void custom_kernel_turboquant_prod_pack_sketch__bfloat16_t_float_bfloat16_t_float_float_float_uint32_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* sketching [[buffer(2)]],
  const constant int* sketching_shape [[buffer(3)]],
  const device float* sketching_low [[buffer(4)]],
  const device float* tables [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device uint32_t* sketch [[buffer(7)]],
  device float* scale [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
