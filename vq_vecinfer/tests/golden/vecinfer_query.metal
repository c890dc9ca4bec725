#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_SHARED_PTR(T) threadgroup T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_CONSTANT(T, name, n) constant T name[n]
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
#define VQ_FN inline
inline float vq_mul(float a, float b) {
#pragma METAL fp contract(off)
return a * b;
}
inline float vq_div(float a, float b) { return metal::precise::divide(a, b); }
VQ_CONSTANT(uint, HADAMARD_MINUS, 120) = {0u, 2954u, 1814u, 3628u, 3162u, 2230u, 366u, 732u, 1464u, 2928u, 1762u, 3524u, 0u, 649754u, 250934u, 501868u, 1003736u, 958898u, 869222u, 689870u, 331166u, 662332u, 276090u, 552180u, 55786u, 111572u, 223144u, 446288u, 892576u, 736578u, 424582u, 849164u, 2u, 178956971u, 51376328u, 161831534u, 205505312u, 110455226u, 16714892u, 173385446u, 66859568u, 156670874u, 267438272u, 89812586u, 264446732u, 90814886u, 252480572u, 94824086u, 204615932u, 110860886u, 13157372u, 175008086u, 52629488u, 163161434u, 210517952u, 115774826u, 36765452u, 194663846u, 147061808u, 241784474u, 0u, 1142u, 2284u, 474u, 948u, 1896u, 3792u, 3490u, 2886u, 1678u, 3356u, 2618u, 0u, 398822u, 797644u, 546714u, 44854u, 89708u, 179416u, 358832u, 717664u, 386754u, 773508u, 498442u, 996884u, 945194u, 841814u, 635054u, 221534u, 443068u, 886136u, 723698u, 2u, 178956971u, 51376328u, 161831534u, 205505312u, 110455226u, 16714892u, 173385446u, 66859568u, 156670874u, 267438272u, 89812586u, 264446732u, 90814886u, 252480572u, 94824086u, 204615932u, 110860886u, 13157372u, 175008086u, 52629488u, 163161434u, 210517952u, 115774826u, 36765452u, 194663846u, 147061808u, 241784474u};
VQ_FN void hadamard(VQ_SHARED_PTR(float) v, uint D, uint lane, bool transposed) {
const float norm = vq_div(1.0f, sqrt(float(D)));
const uint odd = D >> ctz(D), m = odd == 1u ? 1u : 4u * odd, run = D / m;
for (uint i = lane; i < D; i += 32u) v[i] = vq_mul(v[i], norm);
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint stride = 1u; stride < run; stride <<= 1) {
for (uint p = lane; p < D / 2u; p += 32u) {
const uint at = 2u * p - (p & (stride - 1u));
const float a = v[at], b = v[at + stride];
v[at] = a + b;
v[at + stride] = a - b;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
}
if (m > 1u) {
const uint table = (odd == 3u ? 0u : odd == 5u ? 12u : 32u) + (transposed ? 60u : 0u);
VQ_LOCAL(float, mixed, 16);
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
const uint i = r * 32u + lane;
if (i < D) {
const uint minus = HADAMARD_MINUS[table + i / run], place = i % run;
const float first = v[place];
float sum = minus & 1u ? -first : first;
for (uint j = 1u; j < m; ++j) {
const float w = v[j * run + place];
sum += minus >> j & 1u ? -w : w;
}
mixed[r] = sum;
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
VQ_UNROLL
for (uint r = 0u; r < 16u; ++r) {
if (r * 32u + lane < D) {
const float w = mixed[r];
v[r * 32u + lane] = w;
}
}
simdgroup_barrier(mem_flags::mem_threadgroup);
}
}
template <typename T>
[[kernel]] void custom_kernel_vecinfer_query__float_float_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* smooth [[buffer(2)]],
  const constant int* smooth_shape [[buffer(3)]],
  const device uint32_t* run_numbers [[buffer(4)]],
  device float* y [[buffer(5)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint L = run_numbers[0]; const uint factor = run_numbers[1];
VQ_SHARED(float, all, 2048);
const uint D = x_shape[3], lane = thread_index_in_simdgroup, rows = uint(x_shape[0]) * uint(x_shape[1]) * L;
const uint n = threadgroup_position_in_grid.x * 4u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u), own = simdgroup_index_in_threadgroup * 512u;
const uint head = row / L % uint(x_shape[1]) / (uint(x_shape[1]) / uint(smooth_shape[0]));
for (uint i = lane; i < D; i += 32u) all[own + i] = vq_mul(float(x[row * D + i]), smooth[head * D + i]);
hadamard(all + own, D, lane, false);
for (uint i = lane; n < rows && i < D; i += 32u) y[row * D + i] = vq_mul(all[own + i], as_type<float>(factor));

}

template [[host_name("custom_kernel_vecinfer_query__float_float_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_vecinfer_query__float_float_float_uint32_t_float<float>) custom_kernel_vecinfer_query__float_float_float_uint32_t_float<float>;

// another variant
template <typename T>
[[kernel]] void custom_kernel_vecinfer_query__float16_t_float16_t_float_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* smooth [[buffer(2)]],
  const constant int* smooth_shape [[buffer(3)]],
  const device uint32_t* run_numbers [[buffer(4)]],
  device float* y [[buffer(5)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T>
[[kernel]] void custom_kernel_vecinfer_query__bfloat16_t_bfloat16_t_float_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* smooth [[buffer(2)]],
  const constant int* smooth_shape [[buffer(3)]],
  const device uint32_t* run_numbers [[buffer(4)]],
  device float* y [[buffer(5)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
