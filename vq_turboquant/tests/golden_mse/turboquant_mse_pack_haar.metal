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
template <typename T, typename M>
[[kernel]] void custom_kernel_turboquant_mse_pack_haar__float_float16_t_float_uint32_t_float_float_uint32_t_uint32_t_float16_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const constant int& x_ndim [[buffer(2)]],
  const device uint32_t* channels [[buffer(3)]],
  const constant int* channels_shape [[buffer(4)]],
  const device float* table [[buffer(5)]],
  const device float* matrix [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  device float16_t* scale [[buffer(9)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint rows = run_numbers[0]; const uint bits = run_numbers[1]; const uint words = run_numbers[2]; const uint mode = run_numbers[3];
VQ_SHARED(float, all, 2048);
VQ_SHARED(float, less, 2048);
const uint lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup * 512u;
const uint n = threadgroup_position_in_grid.x * 4u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u);
const uint D = uint(x_shape[x_ndim - 1]), d = channels_shape[0];
const float span = table[31];
VQ_LOCAL(float, p, 16);
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
const uint i = r * 32u + lane;
p[r] = 0.0f;
if (i < d) {
const uint channel = channels[i];
const float v = float(x[row * D + channel]);
all[own + i] = v;
p[r] = vq_mul(v, v);
}
}
const float norm = sqrt(mse_fold(p)), raw = mse_stored<M>(vq_div(norm, span));
const float asked = mode == 0u ? vq_mul(raw, span) : norm, divisor = asked > 0.0f ? asked : 1.0f;
for (uint i = lane; i < d; i += 32u) all[own + i] = vq_div(all[own + i], divisor);
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
const uint levels = 1u << bits;
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
const uint i = r * 32u + lane;
p[r] = 0.0f;
if (i < d) {
const float y = all[own + i];
uint code = 0u;
for (uint e = 0u; e + 1u < levels; ++e) code += y > table[16u + e] ? 1u : 0u;
const float unit = table[code];
p[r] = vq_mul(mode == 1u ? unit : y, unit);
all[own + i] = float(code);
}
}
const float sum = mse_fold(p), shrunk = mode == 1u ? sqrt(sum) : sum;
const float found = shrunk > 0.0f ? vq_div(norm, vq_mul(shrunk, span)) : norm;
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint w = lane; n < rows && w < words; w += 32u) {
const uint begin = w * 32u, first = begin / bits;
uint word = 0u;
for (uint code = first; code < d && code * bits < begin + 32u; ++code) {
const uint q = uint(all[own + code]), at = code * bits;
word |= at >= begin ? q << (at - begin) : q >> (begin - at);
}
codes[row * words + w] = word;
}
if (n < rows && lane == 0u) scale[row] = M(mode == 0u ? raw : mse_stored<M>(found));

}

template [[host_name("custom_kernel_turboquant_mse_pack_haar__float_float16_t_float_uint32_t_float_float_uint32_t_uint32_t_float16_t")]] [[kernel]] decltype(custom_kernel_turboquant_mse_pack_haar__float_float16_t_float_uint32_t_float_float_uint32_t_uint32_t_float16_t<float, float16_t>) custom_kernel_turboquant_mse_pack_haar__float_float16_t_float_uint32_t_float_float_uint32_t_uint32_t_float16_t<float, float16_t>;

// another variant
template <typename T, typename M>
[[kernel]] void custom_kernel_turboquant_mse_pack_haar__float_float_float_uint32_t_float_float_uint32_t_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const constant int& x_ndim [[buffer(2)]],
  const device uint32_t* channels [[buffer(3)]],
  const constant int* channels_shape [[buffer(4)]],
  const device float* table [[buffer(5)]],
  const device float* matrix [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  device float* scale [[buffer(9)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M>
[[kernel]] void custom_kernel_turboquant_mse_pack_haar__float16_t_float16_t_float16_t_uint32_t_float_float_uint32_t_uint32_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const constant int& x_ndim [[buffer(2)]],
  const device uint32_t* channels [[buffer(3)]],
  const constant int* channels_shape [[buffer(4)]],
  const device float* table [[buffer(5)]],
  const device float* matrix [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  device float16_t* scale [[buffer(9)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M>
[[kernel]] void custom_kernel_turboquant_mse_pack_haar__bfloat16_t_float_bfloat16_t_uint32_t_float_float_uint32_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const constant int& x_ndim [[buffer(2)]],
  const device uint32_t* channels [[buffer(3)]],
  const constant int* channels_shape [[buffer(4)]],
  const device float* table [[buffer(5)]],
  const device float* matrix [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  device float* scale [[buffer(9)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
