// The dialect on Metal: names that CUDA and the simulator need macros for.
#define VQ_SHARED(T, name, n) threadgroup T name[n]
#define VQ_SHARED_PTR(T) threadgroup T*
#define VQ_GLOBAL(T) const device T*
#define VQ_GLOBAL_OUT(T) device T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_FOR(i, from, to) for (uint i = (from); i < (to); ++i)
#define VQ_FN inline
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
template <typename U, typename T> inline const device U* vq_view(const device T* p) { return (const device U*)p; }
template <typename U, typename T> inline const constant U* vq_view(const constant T* p) { return (const constant U*)p; }
template <typename U, typename T> inline device U* vq_view(device T* p) { return (device U*)p; }
template <typename U, typename T> inline threadgroup U* vq_view(threadgroup T* p) { return (threadgroup U*)p; }
