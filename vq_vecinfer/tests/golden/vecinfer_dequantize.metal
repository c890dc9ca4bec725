#define VQ_UNROLL _Pragma("clang loop unroll(full)")

template <int sub>
[[kernel]] void custom_kernel_vecinfer_dequantize__2_uint32_t_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const constant int* codebook_shape [[buffer(3)]],
  const device uint32_t* run_numbers [[buffer(4)]],
  device float* y [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint bits = run_numbers[0]; const uint head_dim = run_numbers[1];
const uint M = head_dim / uint(sub), books = codebook_shape[0], C = 1u << bits;
const uint total = uint(codes_shape[0]) * uint(codes_shape[1]) * uint(codes_shape[2]) * 32u / bits;
const uint i = thread_position_in_grid.x;
if (i < total) {
const uint bit = i * bits, at = bit / 32u, shift = bit & 31u;
uint code = codes[at] >> shift;
if (shift + bits > 32u) code |= codes[at + 1u] << (32u - shift);
code = (code & (C - 1u)) + (books == 1u ? 0u : i % M * C);
VQ_UNROLL
for (int j = 0; j < sub; ++j) {
const float w = codebook[code * uint(sub) + uint(j)];
y[i * uint(sub) + uint(j)] = w;
}
}

}

template [[host_name("custom_kernel_vecinfer_dequantize__2_uint32_t_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_vecinfer_dequantize__2_uint32_t_float_uint32_t_float<2>) custom_kernel_vecinfer_dequantize__2_uint32_t_float_uint32_t_float<2>;

// another variant
template <int sub>
[[kernel]] void custom_kernel_vecinfer_dequantize__4_uint32_t_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const constant int* codebook_shape [[buffer(3)]],
  const device uint32_t* run_numbers [[buffer(4)]],
  device float* y [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <int sub>
[[kernel]] void custom_kernel_vecinfer_dequantize__8_uint32_t_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const constant int* codebook_shape [[buffer(3)]],
  const device uint32_t* run_numbers [[buffer(4)]],
  device float* y [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
