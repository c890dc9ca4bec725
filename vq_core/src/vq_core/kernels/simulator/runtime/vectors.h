// Vectors: members, constructors by helper functions, and the operators of half2. Loads and stores through vq_view.
#pragma once
#include "numbers.h"

#define VQ_VECTOR2(V, T)                   \
  struct alignas(2 * sizeof(T)) V { T x, y; }; \
  VQ_FN V vq_##V(T x, T y) { return V{x, y}; }
#define VQ_VECTOR4(V, T)                         \
  struct alignas(4 * sizeof(T)) V { T x, y, z, w; }; \
  VQ_FN V vq_##V(T x, T y, T z, T w) { return V{x, y, z, w}; }
VQ_VECTOR2(float2, float)
VQ_VECTOR4(float4, float)
VQ_VECTOR2(half2, half)
VQ_VECTOR4(half4, half)
VQ_VECTOR2(uint2, uint)
VQ_VECTOR4(uint4, uint)
VQ_VECTOR2(int2, int)
VQ_VECTOR4(int4, int)

VQ_FN half2 operator+(half2 a, half2 b) { return half2{a.x + b.x, a.y + b.y}; }
VQ_FN half2 operator-(half2 a, half2 b) { return half2{a.x - b.x, a.y - b.y}; }
VQ_FN half2 operator*(half2 a, half2 b) { return half2{a.x * b.x, a.y * b.y}; }
VQ_FN half2 fma(half2 a, half2 b, half2 c) { return half2{fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)}; }
