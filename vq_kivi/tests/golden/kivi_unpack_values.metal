#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
inline float vq_mul(float a, float b) {
#pragma METAL fp contract(off)
return a * b;
}
inline float vq_add(float a, float b) {
#pragma METAL fp contract(off)
return a + b;
}
inline float4 vq_float4(float x, float y, float z, float w) { return float4(x, y, z, w); }
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
const uint groups = scale_shape[3], D = head_dim, across = (D + 3u) / 4u;
const uint i = thread_position_in_grid.x;
if (i < rows * across) {
const uint row = i / across, d = (i - row * across) * 4u, group = row * groups + d / size;
const uint bit = d * uint(bits), place = row * words + bit / 32u, shift = bit % 32u;
const float step = float(scale[group]), base = float(zero[group]);
uint four = codes[place] >> shift;
if (shift + uint(4 * bits) > 32u) four |= codes[place + 1u] << (32u - shift);
VQ_LOCAL(float, v, 4);
VQ_UNROLL
for (int k = 0; k < 4; ++k) {
const uint q = four >> uint(k * bits) & ((1u << bits) - 1u);
v[k] = vq_add(vq_mul(float(q), step), base);
}
if (D % 4u == 0u) {
const float4 all = vq_float4(v[0], v[1], v[2], v[3]);
vq_view<float4>(x)[i] = all;
} else {
for (uint k = 0u; k < min(D - d, 4u); ++k) x[row * D + d + k] = v[k];
}
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
