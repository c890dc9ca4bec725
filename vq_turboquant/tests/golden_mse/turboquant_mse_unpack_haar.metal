#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_LOCAL_PTR(T) thread T*
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
inline float2 vq_float2(float x, float y) { return float2(x, y); }
VQ_FN float2 projection_parts(float v) {
const float scaled = v * 2048.0f, first = rint(scaled);
return vq_float2(first, rint((scaled - first) * 512.0f));
}
VQ_FN float projected(float high, float first_second, float second_first, float scale) {
const float low = first_second + second_first;
return vq_add(high * (scale * 2.384185791015625e-07f), low * (scale * 4.656612873077393e-10f));
}
template <class M> VQ_FN float mse_stored(float v) {
if (sizeof(M) != 2) return v;
return float(half(v > 65504.0f && v < INFINITY ? 65504.0f : v));
}
VQ_FN float mse_fold(VQ_LOCAL_PTR(float) p) {
VQ_UNROLL
for (uint half_of = 8u; half_of > 0u; half_of /= 2u) {
VQ_UNROLL
for (uint r = 0u; r < half_of; ++r) p[r] = p[r] + p[r + half_of];
}
float sum = p[0];
VQ_UNROLL
for (uint o = 16u; o > 0u; o /= 2u) sum += simd_shuffle_xor(sum, ushort(o));
return sum;
}
template <typename M>
[[kernel]] void custom_kernel_turboquant_mse_unpack_haar__float16_t_uint32_t_float16_t_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const constant int& codes_ndim [[buffer(2)]],
  const device float16_t* scale [[buffer(3)]],
  const device float* table [[buffer(4)]],
  const device float* matrix [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device float* x [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint rows = run_numbers[0]; const uint bits = run_numbers[1]; const uint d = run_numbers[2];
VQ_SHARED(float, all, 2048);
VQ_SHARED(float, less, 2048);
const uint lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup * 512u;
const uint n = threadgroup_position_in_grid.x * 4u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u);
const uint words = uint(codes_shape[codes_ndim - 1]), mask = (1u << bits) - 1u;
for (uint i = lane; i < d; i += 32u) {
const uint bit = i * bits, at = row * words + bit / 32u, shift = bit % 32u;
uint code = codes[at] >> shift;
if (shift + bits > 32u) code |= codes[at + 1u] << (32u - shift);
const float unit = table[code & mask];
all[own + i] = unit;
}
for (uint i = lane; i < d; i += 32u) {
const float2 parts = projection_parts(all[own + i]);
all[own + i] = parts.x;
less[own + i] = parts.y;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
VQ_LOCAL(float, turned, 16);
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
const uint i = r * 32u + lane;
if (i < d) {
float high = 0.0f, first_second = 0.0f, second_first = 0.0f;
for (uint j = 0u; j < d; ++j) {
const float entry = matrix[j * d + i], a = all[own + j], b = less[own + j];
const float2 parts = projection_parts(entry);
high = fma(a, parts.x, high);
first_second = fma(a, parts.y, first_second);
second_first = fma(b, parts.x, second_first);
}
turned[r] = projected(high, first_second, second_first, 1.0f);
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
if (r * 32u + lane < d) {
const float one = turned[r];
all[own + r * 32u + lane] = one;
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
const float size = vq_mul(float(scale[row]), table[31]);
for (uint i = lane; n < rows && i < d; i += 32u) x[row * d + i] = vq_mul(all[own + i], size);

}

template [[host_name("custom_kernel_turboquant_mse_unpack_haar__float16_t_uint32_t_float16_t_float_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_turboquant_mse_unpack_haar__float16_t_uint32_t_float16_t_float_float_uint32_t_float<float16_t>) custom_kernel_turboquant_mse_unpack_haar__float16_t_uint32_t_float16_t_float_float_uint32_t_float<float16_t>;

// another variant
template <typename M>
[[kernel]] void custom_kernel_turboquant_mse_unpack_haar__float_uint32_t_float_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const constant int& codes_ndim [[buffer(2)]],
  const device float* scale [[buffer(3)]],
  const device float* table [[buffer(4)]],
  const device float* matrix [[buffer(5)]],
  const device uint32_t* run_numbers [[buffer(6)]],
  device float* x [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
