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
[[kernel]] void custom_kernel_kivi_round_keys__float_float_2_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint size = run_numbers[0];
const uint D = x_shape[3], total = uint(x_shape[0]) * uint(x_shape[1]) * (uint(x_shape[2]) / size) * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
const uint above = i / D, first = above * size * D + (i - above * D);
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
for (uint c = 0u; c < size; c += 32u) {
VQ_UNROLL
for (uint t = 0u; t < 32u; ++t) v[t] = float(x[first + (c + t) * D]);
if (!exact) {
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const float w = v[t], sum = vq_add(kivi_quotient(w, low, step, inverse), whole);
const uint code = as_type<uint>(sum) & 255u;
y[first + (c + uint(t)) * D] = vq_add(vq_mul(float(code), step), low);
}
} else {
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const float w = v[t];
const uint code = kivi_exact(w, low, divisor, levels);
y[first + (c + uint(t)) * D] = vq_add(vq_mul(float(code), step), low);
}
}
}
}

}

template [[host_name("custom_kernel_kivi_round_keys__float_float_2_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_kivi_round_keys__float_float_2_float_uint32_t_float<float, float, 2>) custom_kernel_kivi_round_keys__float_float_2_float_uint32_t_float<float, float, 2>;

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__float_float_3_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__float_float_4_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__float_float_8_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__float16_t_float16_t_2_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__float16_t_float16_t_3_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__float16_t_float16_t_4_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__float16_t_float16_t_8_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__bfloat16_t_float_2_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__bfloat16_t_float_3_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__bfloat16_t_float_4_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_keys__bfloat16_t_float_8_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
