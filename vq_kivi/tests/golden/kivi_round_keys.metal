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
float low = INFINITY, high = -INFINITY;
bool bad = false;
for (uint c = 0u; c < size; c += 32u) {
VQ_UNROLL
for (uint t = 0u; t < 32u; ++t) {
const float w = float(x[first + (c + t) * D]);
bad = bad || w != w;
low = min(low, w);
high = max(high, w);
}
}
low = bad ? NAN : low;
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
for (uint c = 0u; c < size; c += 32u) {
VQ_LOCAL(uint, q, 32);
bool unsure = false;
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const float w = float(x[first + (c + uint(t)) * D]), quotient = kivi_quotient(w, low, inverse, levels), sum = vq_add(quotient, whole);
unsure = unsure || !(fabs(vq_sub(quotient, vq_sub(sum, whole))) < near);
const uint code = as_type<uint>(sum) & 255u;
q[t] = code;
}
for (int t = 0; t < 32; ++t) {
uint code = q[t];
if (unsure) code = kivi_exact(float(x[first + (c + uint(t)) * D]), low, divisor, levels);
y[first + (c + uint(t)) * D] = vq_add(vq_mul(float(code), step), low);
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
