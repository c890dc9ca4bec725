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
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
VQ_FN float kivi_low(float a, float b) { return a != a ? a : (b < a || b != b ? b : a); }
VQ_RARE uint kivi_exact(float v, float base, float step, float levels) {
return uint(min(max(rint(vq_div(vq_sub(v, base), step)), 0.0f), levels));
}
VQ_FN float kivi_quotient(float v, float base, float inverse, float levels) {
return min(max(vq_mul(vq_sub(v, base), inverse), 0.0f), levels);
}
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float_float_2_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint size = run_numbers[0];
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, lanes = size / 16u, per = groups * lanes;
const uint i = thread_position_in_grid.x, total = rows * per;
const uint own = min(i, total - 1u);
const uint row = own / per, channel = (own - row * per) * 16u, member = own & (lanes - 1u), group = own / lanes;
const uint first = row * D + channel;
VQ_LOCAL(float, v, 16);
if (channel + 16u <= D) {
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) v[k] = float(x[first + k]);
} else {
for (uint k = 0u; k < 16u; ++k) v[k] = float(x[row * D + min(channel + k, D - 1u)]);
}
float low = INFINITY, high = -INFINITY;
bool bad = false;
VQ_UNROLL
for (uint k = 0u; k < 16u; ++k) {
const float w = v[k];
bad = bad || w != w;
low = min(low, w);
high = max(high, w);
}
low = bad ? NAN : low;
for (uint o = lanes / 2u; o > 0u; o >>= 1) {
low = kivi_low(low, simd_shuffle_xor(low, o));
high = max(high, simd_shuffle_xor(high, o));
}
low = low == 0.0f ? 0.0f : low;
high = high == 0.0f ? 0.0f : high;
const float levels = float((1u << bits) - 1u);
float step = vq_div(vq_sub(high, low), levels);
if (sizeof(M) == 2) {
step = kivi_rounded(step);
low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
step = kivi_rounded(step);
low = kivi_rounded(low);
}
const bool usable = step > 0.0f && step < INFINITY, tiny = usable && step < 1e-30f;
const float divisor = usable ? step : INFINITY, inverse = usable && !tiny ? vq_div(1.0f, step) : 0.0f;
const float near = tiny ? -1.0f : 0.5f - levels * 1e-6f;
const float whole = 12582912.0f;
VQ_LOCAL(uint, word, (bits + 1) / 2);
VQ_UNROLL
for (int k = 0; k < (bits + 1) / 2; ++k) word[k] = 0u;
bool unsure = false;
VQ_UNROLL
for (int t = 0; t < 16; ++t) {
const float w = v[t], quotient = kivi_quotient(w, low, inverse, levels), sum = vq_add(quotient, whole);
unsure = unsure || !(fabs(vq_sub(quotient, vq_sub(sum, whole))) < near);
const uint code = as_type<uint>(sum) & 255u;
const int at = t * bits;
word[at / 32] |= code << uint(at % 32);
if (at % 32 + bits > 32) word[at / 32 + 1] |= code >> uint(32 - at % 32);
}
if (unsure) {
VQ_UNROLL
for (int k = 0; k < (bits + 1) / 2; ++k) word[k] = 0u;
VQ_UNROLL
for (int t = 0; t < 16; ++t) {
const float w = v[t];
const uint code = kivi_exact(w, low, divisor, levels);
const int at = t * bits;
word[at / 32] |= code << uint(at % 32);
if (at % 32 + bits > 32) word[at / 32 + 1] |= code >> uint(32 - at % 32);
}
}
if (bits == 3) {
const uint mine = word[0], rest = word[1];
const uint next = simd_shuffle_xor(mine, 1u), half_words = i / 2u * 3u;
if (i < total && (member & 1u) == 0u) {
codes[half_words] = mine;
codes[half_words + 1u] = rest | next << 16u;
}
if (i < total && (member & 1u) == 1u) codes[half_words + 2u] = mine >> 16u | rest << 16u;
} else if (i < total) {
VQ_UNROLL
for (int k = 0; k < bits / 2; ++k) {
const uint one = word[k];
codes[i * uint(bits / 2) + uint(k)] = one;
}
}
if (i < total && member == 0u) {
scale[group] = M(step);
zero[group] = M(low);
}

}

template [[host_name("custom_kernel_kivi_pack_values__float_float_2_float_uint32_t_uint32_t_float_float")]] [[kernel]] decltype(custom_kernel_kivi_pack_values__float_float_2_float_uint32_t_uint32_t_float_float<float, float, 2>) custom_kernel_kivi_pack_values__float_float_2_float_uint32_t_uint32_t_float_float<float, float, 2>;

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float_float_3_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float_float_4_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float_float_8_float_uint32_t_uint32_t_float_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float16_t_float16_t_2_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float16_t_float16_t_3_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float16_t_float16_t_4_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__float16_t_float16_t_8_float16_t_uint32_t_uint32_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float16_t* scale [[buffer(4)]],
  device float16_t* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__bfloat16_t_float_2_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__bfloat16_t_float_3_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__bfloat16_t_float_4_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_pack_values__bfloat16_t_float_8_bfloat16_t_uint32_t_uint32_t_float_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device uint32_t* codes [[buffer(3)]],
  device float* scale [[buffer(4)]],
  device float* zero [[buffer(5)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
