inline float vq_mul(float a, float b) {
#pragma METAL fp contract(off)
return a * b;
}
inline float vq_add(float a, float b) {
#pragma METAL fp contract(off)
return a + b;
}

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
