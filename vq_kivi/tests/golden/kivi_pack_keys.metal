#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
#define VQ_FN inline
#define VQ_RARE __attribute__((noinline))
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
template <class T> struct alignas(16) kivi_run { T v[16 / sizeof(T)]; };
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
VQ_FN float kivi_low(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
VQ_RARE uint kivi_exact(float v, float base, float step, float levels) {
return uint(min(max(rint(vq_div(vq_sub(v, base), step)), 0.0f), levels));
}
VQ_FN float kivi_quotient(float v, float base, float step, float inverse) {
const float d = vq_sub(v, base), product = vq_mul(d, inverse);
return fma(fma(-product, step, d), inverse, product);
}
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float_float_2_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
const uint size = run_numbers[0];
VQ_SHARED(uint, tile, 512 * bits + 32);
VQ_SHARED(float, steps, 128);
VQ_SHARED(float, lows, 128);
const uint n = x_shape[2], D = x_shape[3];
const uint groups = n / size, across = (D + 31u) / 32u, along = (groups + 3u) / 4u;
const uint b = threadgroup_position_in_grid.x, above = b / across, h = above / along;
const uint d0 = (b - above * across) * 32u, g0 = (above - h * along) * 4u;
const uint thread = thread_index_in_threadgroup, lane = thread & 31u, member = thread / 32u;
const uint first = (h * n + min(g0 + member, groups - 1u) * size) * D + min(d0 + lane, D - 1u);
VQ_LOCAL(float, v, 32);
float low = INFINITY, high = -INFINITY;
bool bad = false;
for (uint c = 0u; c < size; c += 32u) {
VQ_UNROLL
for (uint t = 0u; t < 32u; ++t) v[t] = float(x[first + (c + t) * D]);
VQ_UNROLL
for (uint t = 0u; t < 32u; ++t) {
const float w = v[t];
bad = bad || w != w;
low = min(low, w);
high = max(high, w);
}
}
low = bad ? NAN : low;
low = low == 0.0f ? 0.0f : low;
high = high == 0.0f ? 0.0f : high;
const float levels = float((1u << bits) - 1u), lowest = low;
float step = vq_div(vq_sub(high, low), levels);
if (sizeof(M) == 2) {
step = kivi_rounded(step);
low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
step = kivi_rounded(step);
low = kivi_rounded(low);
}
const bool flat = step == 0.0f;
const float divisor = step > 0.0f && step < INFINITY ? step : INFINITY, inverse = flat ? 0.0f : vq_div(1.0f, step);
const bool inside = low <= lowest && vq_mul(vq_sub(high, low), inverse) < levels + 0.25f;
const bool exact = !(flat || (step > 1e-20f && step < 1e20f && inside));
const float whole = 12582912.0f;
const uint words = size * uint(bits) / 32u, stride = 4u * words + 1u;
for (uint c = size; c > 0u;) {
c -= 32u;
if (c + 32u < size) {
VQ_UNROLL
for (uint t = 0u; t < 32u; ++t) v[t] = float(x[first + (c + t) * D]);
}
VQ_LOCAL(uint, word, bits);
VQ_UNROLL
for (int k = 0; k < bits; ++k) word[k] = 0u;
if (!exact) {
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const float w = v[t], sum = vq_add(kivi_quotient(w, low, step, inverse), whole);
const uint code = as_type<uint>(sum) & 255u;
const int at = t * bits;
word[at / 32] |= code << uint(at % 32);
if (at % 32 + bits > 32) word[at / 32 + 1] |= code >> uint(32 - at % 32);
}
} else {
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const float w = v[t];
const uint code = kivi_exact(w, low, divisor, levels);
const int at = t * bits;
word[at / 32] |= code << uint(at % 32);
if (at % 32 + bits > 32) word[at / 32 + 1] |= code >> uint(32 - at % 32);
}
}
VQ_UNROLL
for (int k = 0; k < bits; ++k) {
const uint one = word[k];
tile[lane * stride + member * words + c / 32u * uint(bits) + uint(k)] = one;
}
}
steps[lane * 4u + member] = step;
lows[lane * 4u + member] = low;
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint turned = thread / 4u, d = d0 + turned, part = thread & 3u, run = min(groups - g0, 4u);
if (d < D) {
const uint place = (h * D + d) * groups + g0;
for (uint k = part; k < run * words; k += 4u) codes[place * words + k] = tile[turned * stride + k];
if (part < run) {
const float kept = steps[thread], base = lows[thread];
scale[place + part] = M(kept);
zero[place + part] = M(base);
}
}

}

template [[host_name("custom_kernel_kivi_pack_keys__float_float_2_float_uint32_t_uint32_t_float_float")]] [[kernel]] decltype(custom_kernel_kivi_pack_keys__float_float_2_float_uint32_t_uint32_t_float_float<float, float, 2>) custom_kernel_kivi_pack_keys__float_float_2_float_uint32_t_uint32_t_float_float<float, float, 2>;

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float_float_3_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float_float_4_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float_float_8_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float16_t_float16_t_2_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float16_t_float16_t_3_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float16_t_float16_t_4_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__float16_t_float16_t_8_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__bfloat16_t_float_2_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__bfloat16_t_float_3_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__bfloat16_t_float_4_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_keys__bfloat16_t_float_8_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]])
