// exp, log and their relatives. A GPU's last bits are its own, so parity through these is a tolerance, never bits.
// Computed in double and rounded once: at most one unit in the last place from the true value.
#pragma once
#include "numbers.h"

static const double VQ_LN2 = 0x1.62e42fefa39efp-1, VQ_LOG2E = 0x1.71547652b82fep+0;
static const double VQ_HALF_PI_HIGH = 0x1.921fb544p+0, VQ_HALF_PI_LOW = 0x1.0b4611a626331p-34;

VQ_FN double vq_power_of_two(int64_t n) { return as_type<double>(uint64_t(n + 1023) << 52); }
static double vq_exp2_wide(double x) {
  if (x != x) return x;
  if (x >= 1000) return __builtin_inf();
  if (x <= -1000) return 0;
  const int64_t n = int64_t(x < 0 ? x - 0.5 : x + 0.5);
  const double r = (x - double(n)) * VQ_LN2;
  double term = 1, sum = 1;
  for (int i = 1; i < 14; ++i) sum += term *= r / i;
  return sum * vq_power_of_two(n);
}
static double vq_log2_wide(double x) {
  if (x != x || x < 0) return __builtin_nan("");
  if (x == 0) return -__builtin_inf();
  if (x == __builtin_inf()) return x;
  const uint64_t bits = as_type<uint64_t>(x);
  int64_t n = int64_t(bits >> 52) - 1023;
  double m = as_type<double>((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.4142135623730951) m *= 0.5, ++n;
  const double t = (m - 1) / (m + 1), square = t * t;
  double power = t, sum = 0;
  for (int i = 1; i < 24; i += 2, power *= square) sum += power / i;
  return 2 * sum * VQ_LOG2E + double(n);
}
// Sine (quarter = 0) and cosine (quarter = 1). Arguments beyond a million lose digits, as they do in fast GPU code.
static float vq_sine(float x, int64_t quarter) {
  if (x - x != 0.0f) return x - x;
  const double turns = double(x) / (VQ_HALF_PI_HIGH + VQ_HALF_PI_LOW);
  const int64_t n = int64_t(turns < 0 ? turns - 0.5 : turns + 0.5);
  const double r = (double(x) - double(n) * VQ_HALF_PI_HIGH) - double(n) * VQ_HALF_PI_LOW;
  const int64_t q = (n + quarter) & 3;
  double term = q & 1 ? 1 : r, sum = term;
  for (int i = q & 1 ? 1 : 2; i < 20; i += 2) sum += term *= -r * r / (i * (i + 1));
  return float(q & 2 ? -sum : sum);
}
VQ_FN float exp(float x) { return float(vq_exp2_wide(double(x) * VQ_LOG2E)); }
VQ_FN float exp2(float x) { return float(vq_exp2_wide(double(x))); }
VQ_FN float log(float x) { return float(vq_log2_wide(double(x)) * VQ_LN2); }
VQ_FN float log2(float x) { return float(vq_log2_wide(double(x))); }
VQ_FN float sin(float x) { return vq_sine(x, 0); }
VQ_FN float cos(float x) { return vq_sine(x, 1); }
VQ_FN float rsqrt(float x) { return float(1.0 / __builtin_sqrt(double(x))); }
VQ_FN float tanh(float x) {
  const double a = double(fabs(x)), e = vq_exp2_wide(-2 * a * VQ_LOG2E);
  const double t = a < 1e-4 ? a : (1 - e) / (1 + e);
  return copysign(float(t), x);
}
VQ_FN float pow(float x, float y) {  // x > 0, as on the GPUs
  return y == 0.0f ? 1.0f : float(vq_exp2_wide(double(y) * vq_log2_wide(double(x))));
}
