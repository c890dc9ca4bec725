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
template <typename U, typename T> inline const device U* vq_view(const device T* p) { return (const device U*)p; }
template <typename U, typename T> inline const constant U* vq_view(const constant T* p) { return (const constant U*)p; }
template <typename U, typename T> inline device U* vq_view(device T* p) { return (device U*)p; }
template <typename U, typename T> inline threadgroup U* vq_view(threadgroup T* p) { return (threadgroup U*)p; }
VQ_FN float2 projection_parts(float v) {
const float scaled = v * 2048.0f, first = rint(scaled);
return vq_float2(first, rint((scaled - first) * 512.0f));
}
VQ_FN float projected(float high, float first_second, float second_first, float scale) {
const float low = first_second + second_first;
return vq_add(high * (scale * 2.384185791015625e-07f), low * (scale * 4.656612873077393e-10f));
}
template <typename T, typename M, typename U>
[[kernel]] void custom_kernel_qjl_encode__float_float_uint32_t_float_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* columns [[buffer(2)]],
  const constant int* columns_shape [[buffer(3)]],
  device uint32_t* signs [[buffer(4)]],
  device float* weight [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
VQ_SHARED(float, parts, 512);
VQ_SHARED(float, norms, 8);
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3], m = columns_shape[1];
const uint thread = thread_index_in_threadgroup, lane = thread & 31u, member = thread / 32u, words = (m + 31u) / 32u;
const uint first = threadgroup_position_in_grid.x * 8u;
const uint word = threadgroup_position_in_grid.y * 4u + member, own = min(word * 32u + lane, m - 1u);
for (uint k = member; k < 8u; k += 4u) {
const uint row = min(first + k, rows - 1u);
float square = 0.0f;
{
VQ_LOCAL(float, v, 16);
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) {
const uint i = k * 32u + lane;
float one = 0.0f;
if (i < D) one = float(x[row * D + i]);
v[k] = vq_mul(one, one);
}
VQ_UNROLL
for (uint k = 0u; k < 8u; ++k) v[k] = vq_add(v[k], v[k + 8u]);
VQ_UNROLL
for (uint k = 0u; k < 4u; ++k) v[k] = vq_add(v[k], v[k + 4u]);
VQ_UNROLL
for (uint k = 0u; k < 2u; ++k) v[k] = vq_add(v[k], v[k + 2u]);
VQ_UNROLL
for (uint k = 0u; k < 1u; ++k) v[k] = vq_add(v[k], v[k + 1u]);
square = v[0];
}
VQ_UNROLL
for (uint o = 16u; o > 0u; o >>= 1) square = vq_add(square, simd_shuffle_xor(square, o));
if (lane == 0u) {
norms[k] = square > 8.271806125530277e-25f ? sqrt(square) : 1.0f;
if (threadgroup_position_in_grid.y == 0u && first + k < rows) weight[row] = M(square <= 8.271806125530277e-25f ? 0.0f : sqrt(vq_div(square, float(D))));
}
}
VQ_LOCAL(float, high, 8);
VQ_LOCAL(float, low, 8);
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
high[t] = 0.0f;
low[t] = 0.0f;
}
for (uint c0 = 0u; c0 < D; c0 += 32u) {
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint k = thread; k < 256u; k += 128u) {
const uint token = k / 32u, c = c0 + (k & 31u), i = min(c, D - 1u);
const float2 two = projection_parts(vq_div(float(x[min(first + token, rows - 1u) * D + i]), norms[token]));
parts[2u * k] = c < D ? two.x : 0.0f;
parts[2u * k + 1u] = c < D ? two.y : 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (word < words) {
for (uint j = 0u; j < 32u; j += 2u) {
const float s = columns[min(c0 + j, D - 1u) * m + own];
const float next = columns[min(c0 + j + 1u, D - 1u) * m + own];
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
const float4 four = vq_view<float4>(parts)[t * 16u + j / 2u];
high[t] += four.x * s + four.z * next;
low[t] += four.y * s + four.w * next;
}
}
}
}
uint kept = 0u;
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
const bool up = high[t] * 512.0f + low[t] > 0.0f;
const uint found = simd_ballot(up);
kept = lane == t ? found : kept;
}
if (lane < 8u && first + lane < rows && word < words) {
const uint row = first + lane;
if (sizeof(U) == 4) {
signs[row * words + word] = U(kept);
} else {
for (uint k = word * 4u; k < min(word * 4u + 4u, m / 8u); ++k) {
signs[row * (m / 8u) + k] = U(kept >> (k % 4u * 8u) & 255u);
}
}
}

}

template [[host_name("custom_kernel_qjl_encode__float_float_uint32_t_float_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_qjl_encode__float_float_uint32_t_float_float_uint32_t_float<float, float, uint32_t>) custom_kernel_qjl_encode__float_float_uint32_t_float_float_uint32_t_float<float, float, uint32_t>;

// another variant
template <typename T, typename M, typename U>
[[kernel]] void custom_kernel_qjl_encode__float_float_uint8_t_float_float_uint8_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* columns [[buffer(2)]],
  const constant int* columns_shape [[buffer(3)]],
  device uint8_t* signs [[buffer(4)]],
  device float* weight [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, typename U>
[[kernel]] void custom_kernel_qjl_encode__float16_t_float16_t_uint32_t_float16_t_float_uint32_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* columns [[buffer(2)]],
  const constant int* columns_shape [[buffer(3)]],
  device uint32_t* signs [[buffer(4)]],
  device float16_t* weight [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, typename U>
[[kernel]] void custom_kernel_qjl_encode__float16_t_float16_t_uint8_t_float16_t_float_uint8_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* columns [[buffer(2)]],
  const constant int* columns_shape [[buffer(3)]],
  device uint8_t* signs [[buffer(4)]],
  device float16_t* weight [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, typename U>
[[kernel]] void custom_kernel_qjl_encode__bfloat16_t_float_uint32_t_bfloat16_t_float_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* columns [[buffer(2)]],
  const constant int* columns_shape [[buffer(3)]],
  device uint32_t* signs [[buffer(4)]],
  device float* weight [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, typename U>
[[kernel]] void custom_kernel_qjl_encode__bfloat16_t_float_uint8_t_bfloat16_t_float_uint8_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* columns [[buffer(2)]],
  const constant int* columns_shape [[buffer(3)]],
  device uint8_t* signs [[buffer(4)]],
  device float* weight [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
