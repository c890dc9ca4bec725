// half, bfloat, arithmetic that is never contracted, and the functions whose results are exact on every machine.
#pragma once
#include "types.h"

// An empty asm hides a value from the optimiser: nothing is contracted across it.
VQ_FN float vq_opaque(float x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}
VQ_FN float vq_mul(float a, float b) { return vq_opaque(a * b); }
VQ_FN float vq_add(float a, float b) { return vq_opaque(vq_opaque(a) + vq_opaque(b)); }
VQ_FN float vq_sub(float a, float b) { return vq_opaque(vq_opaque(a) - vq_opaque(b)); }
VQ_FN float vq_div(float a, float b) { return vq_opaque(a) / vq_opaque(b); }  // to nearest, under fast math too
VQ_FN float vq_fraction(uint bits) { return vq_opaque(as_type<float>(bits | 0x3f800000u)) - vq_opaque(1.0f); }
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

// Conversions in integers, so that any compiler and processor gives the same bits; to nearest, ties to even.
VQ_FN ushort vq_half_bits(float f) {
  const uint all = as_type<uint>(f), sign = (all >> 16) & 0x8000u;
  uint u = all & 0x7fffffffu;
  if (u > 0x7f800000u) return ushort(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (u >= 0x477ff000u) return ushort(sign | 0x7c00u);
  if (u < 0x38800000u)  // subnormal: a float in [0.5, 1) counts in the same units of 2^-24
    return ushort(sign | (as_type<uint>(vq_opaque(as_type<float>(u)) + 0.5f) - 0x3f000000u));
  u += 0xfffu + ((u >> 13) & 1u);
  return ushort(sign | ((u - 0x38000000u) >> 13));
}
VQ_FN float vq_half_value(ushort v) {
  const uint h = v & 0x7fffu, sign = uint(v & 0x8000u) << 16;
  if (h >= 0x7c00u) return as_type<float>(sign | 0x7f800000u | ((h & 0x3ffu) << 13));
  if (h >= 0x400u) return as_type<float>(sign | ((h << 13) + 0x38000000u));
  return as_type<float>(sign | as_type<uint>(vq_opaque(float(h)) * 0x1p-24f));
}
VQ_FN ushort vq_bfloat_bits(float f) {
  const uint u = as_type<uint>(f);
  return f != f ? ushort((u >> 16) | 64u) : ushort((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

struct half {
  ushort bits;
  half() = default;
  explicit half(float f) : bits(vq_half_bits(f)) {}
  operator float() const { return vq_half_value(bits); }
};
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float f) : bits(vq_bfloat_bits(f)) {}
  operator float() const { return as_type<float>(uint(bits) << 16); }
};
typedef half float16_t;
typedef bfloat bfloat16_t;

// Both types round after every operator.
#define VQ_SHORT_FLOAT_OPERATOR(T, op)                                          \
  VQ_FN T operator op(T a, T b) { return T(vq_opaque(float(a) op float(b))); } \
  VQ_FN T& operator op##=(T& a, T b) { return a = a op b; }
#define VQ_SHORT_FLOAT(T)                                                       \
  VQ_SHORT_FLOAT_OPERATOR(T, +) VQ_SHORT_FLOAT_OPERATOR(T, -)                   \
  VQ_SHORT_FLOAT_OPERATOR(T, *) VQ_SHORT_FLOAT_OPERATOR(T, /)                   \
  VQ_FN T operator-(T a) {                                                      \
    a.bits ^= 0x8000u;                                                          \
    return a;                                                                   \
  }
VQ_SHORT_FLOAT(half)
VQ_SHORT_FLOAT(bfloat)

// Functions with one exact result: rounding to integers, comparison, sign, square root.
VQ_FN float rint(float x) { return __builtin_rintf(vq_opaque(x)); }
VQ_FN float floor(float x) { return __builtin_floorf(vq_opaque(x)); }
VQ_FN float ceil(float x) { return __builtin_ceilf(vq_opaque(x)); }
VQ_FN float trunc(float x) { return __builtin_truncf(vq_opaque(x)); }
VQ_FN float fabs(float x) { return __builtin_fabsf(x); }
VQ_FN float copysign(float x, float y) { return __builtin_copysignf(x, y); }
VQ_FN float round(float x) {  // halves away from zero; the largest float below 0.5 keeps 0.49999997 from becoming 1
  return trunc(vq_opaque(x) + copysign(0x1.fffffep-2f, x));
}
VQ_FN float sqrt(float x) { return __builtin_sqrtf(x); }
VQ_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
VQ_FN bool isnan(float x) { return x != x; }
VQ_FN bool isinf(float x) { return fabs(x) == __builtin_inff(); }
// min and max take the number where the other is NaN. Which zero of two they return is promised nowhere.
VQ_FN float min(float a, float b) { return (a < b || b != b) ? a : b; }
VQ_FN float max(float a, float b) { return (a > b || b != b) ? a : b; }
VQ_FN half min(half a, half b) { return half(min(float(a), float(b))); }
VQ_FN half max(half a, half b) { return half(max(float(a), float(b))); }
VQ_FN bfloat min(bfloat a, bfloat b) { return bfloat(min(float(a), float(b))); }
VQ_FN bfloat max(bfloat a, bfloat b) { return bfloat(max(float(a), float(b))); }
VQ_FN int min(int a, int b) { return a < b ? a : b; }
VQ_FN int max(int a, int b) { return a > b ? a : b; }
VQ_FN uint min(uint a, uint b) { return a < b ? a : b; }
VQ_FN uint max(uint a, uint b) { return a > b ? a : b; }
VQ_FN int abs(int x) { return x < 0 ? -x : x; }
VQ_FN float abs(float x) { return fabs(x); }
template <class T> VQ_FN T clamp(T x, T low, T high) { return min(max(x, low), high); }

// Bits.
VQ_FN uint popcount(uint x) { return uint(__builtin_popcount(x)); }
VQ_FN uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
VQ_FN uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
VQ_FN uint extract_bits(uint x, uint offset, uint bits) { return bits < 32u ? (x >> offset) & ((1u << bits) - 1u) : x >> offset; }
VQ_FN uint reverse_bits(uint x) {
  x = (x & 0x55555555u) << 1 | (x >> 1 & 0x55555555u);
  x = (x & 0x33333333u) << 2 | (x >> 2 & 0x33333333u);
  x = (x & 0x0f0f0f0fu) << 4 | (x >> 4 & 0x0f0f0f0fu);
  return __builtin_bswap32(x);
}

// half with one rounding: product and sum in double, the sum rounded to odd so that rounding it again to half is right.
VQ_FN half fma(half a, half b, half c) {
  const double product = double(float(a)) * double(float(b)), addend = double(float(c));
  const double sum = product + addend, shifted = sum - product;
  const double lost = (product - (sum - shifted)) + (addend - shifted);
  uint64_t bits = as_type<uint64_t>(sum);
  if (lost != 0 && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  const double odd = as_type<double>(bits);
  const float narrow = float(odd);
  uint word = as_type<uint>(narrow);
  if (double(narrow) != odd && narrow - narrow == 0.0f && !(word & 1u)) word += (double(narrow) < odd) == (odd > 0) ? 1u : -1u;
  return half(as_type<float>(word));
}
