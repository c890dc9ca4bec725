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

template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_keys__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float16_t* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float16_t* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint size = run_numbers[0]; const uint head_dim = run_numbers[1];
const uint heads = uint(codes_shape[0]) * uint(codes_shape[1]), D = codes_shape[2], words = codes_shape[3];
const uint parts = words / uint(bits), groups = scale_shape[3], total = heads * parts * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
const uint above = i / D, d = i - above * D, h = above / parts, part = above - h * parts;
const uint row = h * D + d, group = row * groups + part / (parts / groups), place = row * words + part * uint(bits);
const float step = float(scale[group]), base = float(zero[group]);
VQ_LOCAL(uint, word, bits);
VQ_UNROLL
for (int k = 0; k < bits; ++k) word[k] = codes[place + uint(k)];
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const int at = t * bits;
uint q = uint(word[at / 32]) >> uint(at % 32);
if (at % 32 + bits > 32) q |= uint(word[at / 32 + 1]) << uint(32 - at % 32);
q &= (1u << bits) - 1u;
x[(above * 32u + uint(t)) * D + d] = vq_add(vq_mul(float(q), step), base);
}
}

}

template [[host_name("custom_kernel_kivi_unpack_keys__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float")]] [[kernel]] decltype(custom_kernel_kivi_unpack_keys__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float<float16_t, 2>) custom_kernel_kivi_unpack_keys__float16_t_2_uint32_t_float16_t_float16_t_uint32_t_float<float16_t, 2>;

// another variant
template <typename M, int bits>
[[kernel]] void custom_kernel_kivi_unpack_keys__float16_t_3_uint32_t_float16_t_float16_t_uint32_t_float(
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
[[kernel]] void custom_kernel_kivi_unpack_keys__float16_t_4_uint32_t_float16_t_float16_t_uint32_t_float(
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
[[kernel]] void custom_kernel_kivi_unpack_keys__float16_t_8_uint32_t_float16_t_float16_t_uint32_t_float(
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
[[kernel]] void custom_kernel_kivi_unpack_keys__float_2_uint32_t_float_float_uint32_t_float(
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
[[kernel]] void custom_kernel_kivi_unpack_keys__float_3_uint32_t_float_float_uint32_t_float(
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
[[kernel]] void custom_kernel_kivi_unpack_keys__float_4_uint32_t_float_float_uint32_t_float(
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
[[kernel]] void custom_kernel_kivi_unpack_keys__float_8_uint32_t_float_float_uint32_t_float(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float* scale [[buffer(2)]],
  const constant int* scale_shape [[buffer(3)]],
  const device float* zero [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device float* x [[buffer(6)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
