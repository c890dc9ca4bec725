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
template <typename U, typename T> inline const device U* vq_view(const device T* p) { return (const device U*)p; }
template <typename U, typename T> inline const constant U* vq_view(const constant T* p) { return (const constant U*)p; }
template <typename U, typename T> inline device U* vq_view(device T* p) { return (device U*)p; }
template <typename U, typename T> inline threadgroup U* vq_view(threadgroup T* p) { return (threadgroup U*)p; }
template <typename U, typename T> inline bool vq_aligned(const device T* p) { return reinterpret_cast<ulong>(p) % alignof(U) == 0; }
template <typename U, typename T> inline bool vq_aligned(const constant T* p) { return reinterpret_cast<ulong>(p) % alignof(U) == 0; }
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
[[kernel]] void custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
const uint size = run_numbers[0];
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, lanes = size / 32u, per = groups * lanes;
const uint i = thread_position_in_grid.x, total = rows * per;
const uint own = min(i, total - 1u);
const uint row = own / per, channel = (own - row * per) * 32u, member = own & (lanes - 1u), group = own / lanes;
const uint first = row * D + channel;
VQ_LOCAL(float, v, 32);
const uint wide = 16u / uint(sizeof(T));
if (channel + 32u <= D && first % wide == 0u && vq_aligned<kivi_run<T>>(x)) {
VQ_UNROLL
for (uint k = 0u; k < 32u / wide; ++k) {
const kivi_run<T> some = vq_view<kivi_run<T>>(x)[first / wide + k];
VQ_UNROLL
for (uint j = 0u; j < wide; ++j) v[k * wide + j] = float(some.v[j]);
}
} else {
VQ_UNROLL
for (uint k = 0u; k < 32u; ++k) v[k] = float(x[row * D + min(channel + k, D - 1u)]);
}
float low = INFINITY, high = -INFINITY;
bool bad = false;
VQ_UNROLL
for (uint k = 0u; k < 32u; ++k) {
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
if (!exact) {
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const float w = v[t], sum = vq_add(kivi_quotient(w, low, step, inverse), whole);
const uint code = as_type<uint>(sum) & 255u;
if (i < total && channel + uint(t) < D) y[first + uint(t)] = vq_add(vq_mul(float(code), step), low);
}
} else {
VQ_UNROLL
for (int t = 0; t < 32; ++t) {
const float w = v[t];
const uint code = kivi_exact(w, low, divisor, levels);
if (i < total && channel + uint(t) < D) y[first + uint(t)] = vq_add(vq_mul(float(code), step), low);
}
}

}

template [[host_name("custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float")]] [[kernel]] decltype(custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float<float, float, 2>) custom_kernel_kivi_round_values__float_float_2_float_uint32_t_float<float, float, 2>;

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float_float_3_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float_float_4_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float_float_8_float_uint32_t_float(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_2_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_3_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_4_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__float16_t_float16_t_8_float16_t_uint32_t_float(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_2_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_3_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_4_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])

// another variant
template <typename T, typename M, int bits>
[[kernel]] void custom_kernel_kivi_round_values__bfloat16_t_float_8_bfloat16_t_uint32_t_float(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* run_numbers [[buffer(2)]],
  device float* y [[buffer(3)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]])
