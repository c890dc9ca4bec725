#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
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

template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__float_2_float_float_float_uint32_t_uint32_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint bits = run_numbers[0];
VQ_SHARED(uint, found, 128);
const uint D = x_shape[3], M = D / uint(sub), books = halves_shape[0], C = 1u << bits;
const uint total = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]) * M;
const uint thread = thread_index_in_threadgroup, first = threadgroup_position_in_grid.x * 128u;
const uint own = min(first + thread, total - 1u);
const uint book = books == 1u ? 0u : own % M;
VQ_LOCAL(float, v, sub);
bool finite = true;
VQ_UNROLL
for (int j = 0; j < sub; ++j) {
const float w = float(x[own * uint(sub) + uint(j)]);
finite = finite && fabs(w) < INFINITY;
v[j] = min(max(w, -1e30f), 1e30f);
}
float best = -INFINITY;
uint code = 0u;
for (uint c = 0u; c < C; ++c) {
const uint at = book * C + c;
float sum = -halves[at];
VQ_UNROLL
for (int j = 0; j < sub; ++j) sum = vq_add(sum, vq_mul(v[j], codebook[at * uint(sub) + uint(j)]));
if (sum > best) {
best = sum;
code = c;
}
}
found[thread] = first + thread < total && finite ? code : 0u;
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint words = total * bits / 32u, place = threadgroup_position_in_grid.x * 4u * bits + thread;
if (thread < 4u * bits && place < words) {
uint word = 0u;
const uint begin = thread * 32u;
for (uint i = begin / bits; i < 128u && i * bits < begin + 32u; ++i) {
const uint bit = i * bits;
word |= bit >= begin ? found[i] << (bit - begin) : found[i] >> (begin - bit);
}
codes[place] = word;
}

}

template [[host_name("custom_kernel_vecinfer_quantize__float_2_float_float_float_uint32_t_uint32_t")]] [[kernel]] decltype(custom_kernel_vecinfer_quantize__float_2_float_float_float_uint32_t_uint32_t<float, 2>) custom_kernel_vecinfer_quantize__float_2_float_float_float_uint32_t_uint32_t<float, 2>;

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__float_4_float_float_float_uint32_t_uint32_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__float_8_float_float_float_uint32_t_uint32_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__float16_t_2_float16_t_float_float_uint32_t_uint32_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__float16_t_4_float16_t_float_float_uint32_t_uint32_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__float16_t_8_float16_t_float_float_uint32_t_uint32_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__bfloat16_t_2_bfloat16_t_float_float_uint32_t_uint32_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__bfloat16_t_4_bfloat16_t_float_float_uint32_t_uint32_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize__bfloat16_t_8_bfloat16_t_float_float_uint32_t_uint32_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* codebook [[buffer(2)]],
  const device float* halves [[buffer(3)]],
  const constant int* halves_shape [[buffer(4)]],
  const device uint32_t* run_numbers [[buffer(5)]],
  device uint32_t* codes [[buffer(6)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
