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
inline float vq_add(float a, float b) {
#pragma METAL fp contract(off)
return a + b;
}
inline float vq_sub(float a, float b) {
#pragma METAL fp contract(off)
return a - b;
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
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__float_2_float_float_float_float_float_uint32_t_uint32_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint bits = run_numbers[0]; const uint centred = run_numbers[1];
VQ_SHARED(float, all, 1024);
VQ_SHARED(uint, found, 256);
const uint D = x_shape[3], M = D / uint(sub), books = halves_shape[0], C = 1u << bits;
const uint heads = x_shape[1], n = x_shape[2], rows = uint(x_shape[0]) * heads * n;
const uint block = 32u >> min(uint(ctz(M * bits)), 5u), tokens = block * max(1u, 128u / (block * M));
const uint thread = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint first = threadgroup_position_in_grid.x * tokens;
for (uint t = simdgroup_index_in_threadgroup; t < tokens; t += 4u) {
const uint row = min(first + t, rows - 1u), pair = row / n;
for (uint i = lane; i < D; i += 32u) all[t * D + i] = vq_mul(float(x[row * D + i]), inverse[pair % heads * D + i]);
hadamard(all + t * D, D, lane, false);
if (centred != 0u) {
for (uint i = lane; i < D; i += 32u) all[t * D + i] = vq_sub(all[t * D + i], mean[pair * D + i]);
}
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint own = thread; own < tokens * M; own += 128u) {
const uint book = books == 1u ? 0u : own % M;
VQ_LOCAL(float, v, sub);
bool finite = true;
VQ_UNROLL
for (int j = 0; j < sub; ++j) {
const float w = all[own * uint(sub) + uint(j)];
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
found[own] = first * M + own < rows * M && finite ? code : 0u;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint words = rows * M * bits / 32u, mine = tokens * M * bits / 32u;
for (uint k = thread; k < mine; k += 128u) {
const uint begin = k * 32u, place = threadgroup_position_in_grid.x * mine + k;
uint word = 0u;
for (uint i = begin / bits; i < tokens * M && i * bits < begin + 32u; ++i) {
const uint bit = i * bits;
word |= bit >= begin ? found[i] << (bit - begin) : found[i] >> (begin - bit);
}
if (place < words) codes[place] = word;
}

}

template [[host_name("custom_kernel_vecinfer_quantize_keys__float_2_float_float_float_float_float_uint32_t_uint32_t")]] [[kernel]] decltype(custom_kernel_vecinfer_quantize_keys__float_2_float_float_float_float_float_uint32_t_uint32_t<float, 2>) custom_kernel_vecinfer_quantize_keys__float_2_float_float_float_float_float_uint32_t_uint32_t<float, 2>;

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__float_4_float_float_float_float_float_uint32_t_uint32_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__float_8_float_float_float_float_float_uint32_t_uint32_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__float16_t_2_float16_t_float_float_float_float_uint32_t_uint32_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__float16_t_4_float16_t_float_float_float_float_uint32_t_uint32_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__float16_t_8_float16_t_float_float_float_float_uint32_t_uint32_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__bfloat16_t_2_bfloat16_t_float_float_float_float_uint32_t_uint32_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__bfloat16_t_4_bfloat16_t_float_float_float_float_uint32_t_uint32_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, int sub>
[[kernel]] void custom_kernel_vecinfer_quantize_keys__bfloat16_t_8_bfloat16_t_float_float_float_float_uint32_t_uint32_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float* inverse [[buffer(2)]],
  const device float* mean [[buffer(3)]],
  const device float* codebook [[buffer(4)]],
  const device float* halves [[buffer(5)]],
  const constant int* halves_shape [[buffer(6)]],
  const device uint32_t* run_numbers [[buffer(7)]],
  device uint32_t* codes [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
