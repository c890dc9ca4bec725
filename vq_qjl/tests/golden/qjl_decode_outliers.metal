#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
inline float vq_mul(float a, float b) {
#pragma METAL fp contract(off)
return a * b;
}

template <typename M, typename U>
[[kernel]] void custom_kernel_qjl_decode_outliers__float16_t_uint32_t_uint32_t_float16_t_uint32_t_float16_t_uint8_t_float_float_uint32_t_float(
  const device uint32_t* signs [[buffer(0)]],
  const constant int* signs_shape [[buffer(1)]],
  const device float16_t* weight [[buffer(2)]],
  const device uint32_t* outlier_signs [[buffer(3)]],
  const device float16_t* outlier_weight [[buffer(4)]],
  const device uint8_t* channels [[buffer(5)]],
  const device float* sketch [[buffer(6)]],
  const constant int* sketch_shape [[buffer(7)]],
  const device float* own_sketch [[buffer(8)]],
  const constant int* own_sketch_shape [[buffer(9)]],
  const device uint32_t* run_numbers [[buffer(10)]],
  device float* x [[buffer(11)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint unit = run_numbers[0]; const uint own_unit = run_numbers[1];
const uint rows = uint(signs_shape[0]) * uint(signs_shape[1]) * uint(signs_shape[2]);
const uint m = sketch_shape[0], D = sketch_shape[1], words = (m + 31u) / 32u;
const uint first = threadgroup_position_in_grid.x * 8u;
const uint d = threadgroup_position_in_grid.y * 128u + thread_index_in_threadgroup, channel = min(d, D - 1u);
VQ_LOCAL(float, sum, 8);
{
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) sum[t] = 0.0f;
for (uint w = 0u; w < words; ++w) {
VQ_LOCAL(uint, word, 8);
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
const uint row = min(first + t, rows - 1u);
if (sizeof(U) == 4) {
word[t] = uint(signs[row * words + w]);
} else {
uint bytes = 0u;
for (uint k = w * 4u; k < min(w * 4u + 4u, m / 8u); ++k) {
bytes |= uint(signs[row * (m / 8u) + k]) << (k % 4u * 8u);
}
word[t] = bytes;
}
}
for (uint b = 0u; b < min(32u, m - w * 32u); ++b) {
const float s = sketch[(w * 32u + b) * D + channel];
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) sum[t] += (word[t] >> b & 1u) != 0u ? s : -s;
}
}
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
const float one = float(weight[min(first + t, rows - 1u)]);
sum[t] = vq_mul(sum[t], vq_mul(one, as_type<float>(unit)));
}
}
const uint O = own_sketch_shape[1], width = own_sketch_shape[0], own_words = width / 32u, group = first / 32u;
uint place = O;
for (uint k = 0u; k < O; ++k) place = uint(channels[group * O + k]) == channel ? k : place;
if (place < O) {
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) sum[t] = 0.0f;
for (uint w = 0u; w < own_words; ++w) {
VQ_LOCAL(uint, word, 8);
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
const uint row = min(first + t, rows - 1u);
word[t] = outlier_signs[row * own_words + w];
}
for (uint b = 0u; b < min(32u, width - w * 32u); ++b) {
const float s = own_sketch[(w * 32u + b) * O + place];
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) sum[t] += (word[t] >> b & 1u) != 0u ? s : -s;
}
}
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
const float one = float(outlier_weight[min(first + t, rows - 1u)]);
sum[t] = vq_mul(sum[t], vq_mul(one, as_type<float>(own_unit)));
}
}
VQ_UNROLL
for (uint t = 0u; t < 8u; ++t) {
if (first + t < rows && d < D) x[(first + t) * D + d] = sum[t];
}

}

template [[host_name("custom_kernel_qjl_decode_outliers__float16_t_uint32_t_uint32_t_float16_t_uint32_t_float16_t_uint8_t_float_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_qjl_decode_outliers__float16_t_uint32_t_uint32_t_float16_t_uint32_t_float16_t_uint8_t_float_float_uint32_t_float<float16_t, uint32_t>) custom_kernel_qjl_decode_outliers__float16_t_uint32_t_uint32_t_float16_t_uint32_t_float16_t_uint8_t_float_float_uint32_t_float<float16_t, uint32_t>;

// another variant
template <typename M, typename U>
[[kernel]] void custom_kernel_qjl_decode_outliers__float16_t_uint8_t_uint8_t_float16_t_uint32_t_float16_t_uint8_t_float_float_uint32_t_float(
  const device uint8_t* signs [[buffer(0)]],
  const constant int* signs_shape [[buffer(1)]],
  const device float16_t* weight [[buffer(2)]],
  const device uint32_t* outlier_signs [[buffer(3)]],
  const device float16_t* outlier_weight [[buffer(4)]],
  const device uint8_t* channels [[buffer(5)]],
  const device float* sketch [[buffer(6)]],
  const constant int* sketch_shape [[buffer(7)]],
  const device float* own_sketch [[buffer(8)]],
  const constant int* own_sketch_shape [[buffer(9)]],
  const device uint32_t* run_numbers [[buffer(10)]],
  device float* x [[buffer(11)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename M, typename U>
[[kernel]] void custom_kernel_qjl_decode_outliers__float_uint32_t_uint32_t_float_uint32_t_float_uint8_t_float_float_uint32_t_float(
  const device uint32_t* signs [[buffer(0)]],
  const constant int* signs_shape [[buffer(1)]],
  const device float* weight [[buffer(2)]],
  const device uint32_t* outlier_signs [[buffer(3)]],
  const device float* outlier_weight [[buffer(4)]],
  const device uint8_t* channels [[buffer(5)]],
  const device float* sketch [[buffer(6)]],
  const constant int* sketch_shape [[buffer(7)]],
  const device float* own_sketch [[buffer(8)]],
  const constant int* own_sketch_shape [[buffer(9)]],
  const device uint32_t* run_numbers [[buffer(10)]],
  device float* x [[buffer(11)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename M, typename U>
[[kernel]] void custom_kernel_qjl_decode_outliers__float_uint8_t_uint8_t_float_uint32_t_float_uint8_t_float_float_uint32_t_float(
  const device uint8_t* signs [[buffer(0)]],
  const constant int* signs_shape [[buffer(1)]],
  const device float* weight [[buffer(2)]],
  const device uint32_t* outlier_signs [[buffer(3)]],
  const device float* outlier_weight [[buffer(4)]],
  const device uint8_t* channels [[buffer(5)]],
  const device float* sketch [[buffer(6)]],
  const constant int* sketch_shape [[buffer(7)]],
  const device float* own_sketch [[buffer(8)]],
  const constant int* own_sketch_shape [[buffer(9)]],
  const device uint32_t* run_numbers [[buffer(10)]],
  device float* x [[buffer(11)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
