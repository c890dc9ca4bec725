#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_SHARED_PTR(T) threadgroup T*
#define VQ_GLOBAL(T) const device T*
#define VQ_GLOBAL_OUT(T) device T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_LOCAL_PTR(T) thread T*
#define VQ_CONSTANT(T, name, n) constant T name[n]
#define VQ_FOR(i, from, to) for (uint i = (from); i < (to); ++i)
#define VQ_FOR_STEP(i, from, to, step) for (uint i = (from); i < (to); i += (step))
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
#define VQ_FN inline
#if __METAL_VERSION__ < 310
typedef bfloat16_t bfloat;
#endif
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
inline float4 vq_float4(float x, float y, float z, float w) { return float4(x, y, z, w); }
inline half2 vq_half2(half x, half y) { return half2(x, y); }
inline half4 vq_half4(half x, half y, half z, half w) { return half4(x, y, z, w); }
inline uint2 vq_uint2(uint x, uint y) { return uint2(x, y); }
inline uint4 vq_uint4(uint x, uint y, uint z, uint w) { return uint4(x, y, z, w); }
inline int2 vq_int2(int x, int y) { return int2(x, y); }
inline int4 vq_int4(int x, int y, int z, int w) { return int4(x, y, z, w); }
template <typename U, typename T> inline const device U* vq_view(const device T* p) { return (const device U*)p; }
template <typename U, typename T> inline const constant U* vq_view(const constant T* p) { return (const constant U*)p; }
template <typename U, typename T> inline device U* vq_view(device T* p) { return (device U*)p; }
template <typename U, typename T> inline threadgroup U* vq_view(threadgroup T* p) { return (threadgroup U*)p; }
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
VQ_FN float kivi_code(float v, float step, float base, float levels) {
const bool usable = step > 0.0f && step < INFINITY;
const float q = rint(vq_div(vq_sub(v, base), usable ? step : 1.0f));
return usable && q > 0.0f ? (q < levels ? q : levels) : 0.0f;
}
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint size = run_numbers[0];
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, total = rows * groups;
const uint lanes = size / 4u, lane = thread_index_in_simdgroup, member = lane % lanes;
const uint unit = (threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup)
* (32u / lanes) + lane / lanes;
const uint u = min(unit, total - 1u);
const uint row = u / groups, channel = u % groups * size + member * 4u;
VQ_LOCAL(float, v, 4);
float low = INFINITY, high = -INFINITY;
uint bad = 0u;
for (uint k = 0u; k < 4u; ++k) {
const float w = float(x[row * D + min(channel + k, D - 1u)]);
v[k] = w;
bad |= w != w ? 1u : 0u;
low = min(low, w);
high = max(high, w);
}
for (uint o = lanes / 2u; o > 0u; o >>= 1) {
low = min(low, simd_shuffle_xor(low, o));
high = max(high, simd_shuffle_xor(high, o));
bad |= simd_shuffle_xor(bad, o);
}
const float levels = float((1u << bits) - 1u);
low = bad != 0u ? NAN : low == 0.0f ? 0.0f : low;
high = high == 0.0f ? 0.0f : high;
float step = bad != 0u ? NAN : vq_div(vq_sub(high, low), levels);
if (sizeof(M) == 2) {
step = kivi_rounded(step);
low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
step = kivi_rounded(step);
low = kivi_rounded(low);
}
for (uint k = 0u; k < 4u; ++k) {
const float w = v[k];
const float code = kivi_code(w, step, low, levels);
if (unit < total && channel + k < D) y[row * D + channel + k] = vq_add(vq_mul(code, step), low);
}

}

template [[host_name("custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float<float, float, 2>) custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float<float, float, 2>;

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float_float_3_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float_float_4_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float_float_8_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_2_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_3_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_4_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_8_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_2_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_3_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_4_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_8_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
