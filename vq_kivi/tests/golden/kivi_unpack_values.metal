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

template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float16_t* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float16_t* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint size = run_numbers[0]; const uint head_dim = run_numbers[1];
const uint rows = uint(codes_shape[0]) * uint(codes_shape[1]) * uint(codes_shape[2]), words = codes_shape[3];
const uint groups = scale_shape[3], D = head_dim, total = rows * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
const uint d = i % D, row = i / D;
const uint bit = d * uint(bits), place = row * words + bit / 32u, shift = bit % 32u;
uint q = codes[place] >> shift;
if (shift + uint(bits) > 32u) q |= codes[place + 1u] << (32u - shift);
q &= (1u << bits) - 1u;
const uint group = row * groups + d / size;
x[i] = vq_add(vq_mul(float(q), float(scale[group])), float(zero[group]));
}

}

template [[host_name("custom_kernel_kivi_unpack_values__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float")]] [[kernel]] decltype(custom_kernel_kivi_unpack_values__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float<float16_t, 2>) custom_kernel_kivi_unpack_values__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float<float16_t, 2>;

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float16_t_3_uint32_t_float16_t_float16_t_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float16_t* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float16_t* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float16_t_4_uint32_t_float16_t_float16_t_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float16_t* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float16_t* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float16_t_8_uint32_t_float16_t_float16_t_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float16_t* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float16_t* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float_2_uint32_t_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float_3_uint32_t_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float_4_uint32_t_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_values__float_8_uint32_t_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
