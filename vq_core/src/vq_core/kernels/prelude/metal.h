// The dialect on Metal: names that CUDA and the simulator need macros for.
#define VQ_SHARED(T, name, n) alignas(16) threadgroup T name[n]
#define VQ_SHARED_PTR(T) threadgroup T*
#define VQ_GLOBAL(T) const device T*
#define VQ_GLOBAL_OUT(T) device T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_LOCAL_PTR(T) thread T*
#define VQ_CONSTANT(T, name, n) constant T name[n]
#define VQ_FOR(i, from, to) for (uint i = (from); i < (to); ++i)
#define VQ_FOR_STEP(i, from, to, step) for (uint i = (from); i < (to); i += (step))
#define VQ_UNROLL _Pragma("clang loop unroll(full)")
#define VQ_FN inline
#define VQ_RARE __attribute__((noinline))
#if __METAL_VERSION__ < 310
typedef bfloat16_t bfloat;
#endif
// Not contracted: a product and a sum that must be what the reference computes.
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
// Not as on CUDA: subnormal floats are zero here.
inline float vq_fraction(uint bits) { return as_type<float>(bits | 0x3f800000u) - 1.0f; }
// Metal's vote is a type of its own; the dialect's is a uint.
inline uint vq_ballot(bool p) { return uint(metal::simd_vote::vote_t(metal::simd_ballot(p))); }
#define simd_ballot vq_ballot
inline float2 vq_float2(float x, float y) { return float2(x, y); }
inline float4 vq_float4(float x, float y, float z, float w) { return float4(x, y, z, w); }
inline half2 vq_half2(half x, half y) { return half2(x, y); }
inline half4 vq_half4(half x, half y, half z, half w) { return half4(x, y, z, w); }
inline uint2 vq_uint2(uint x, uint y) { return uint2(x, y); }
inline uint4 vq_uint4(uint x, uint y, uint z, uint w) { return uint4(x, y, z, w); }
inline int2 vq_int2(int x, int y) { return int2(x, y); }
inline int4 vq_int4(int x, int y, int z, int w) { return int4(x, y, z, w); }
template <typename U, typename T> inline const device U* vq_view(const device T* p) { return (const device U*)p; }
template <typename U, typename T> inline const constant U* vq_view(const constant T* p) { return (const constant U*)p; }
template <typename U, typename T> inline device U* vq_view(device T* p) { return (device U*)p; }
template <typename U, typename T> inline threadgroup U* vq_view(threadgroup T* p) { return (threadgroup U*)p; }
template <typename U, typename T> inline bool vq_aligned(const device T* p) { return reinterpret_cast<ulong>(p) % alignof(U) == 0; }
template <typename U, typename T> inline bool vq_aligned(const constant T* p) { return reinterpret_cast<ulong>(p) % alignof(U) == 0; }
