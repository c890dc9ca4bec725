// The dialect on CUDA: Metal's names over CUDA's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif
#define VQ_SHARED(T, name, n) __shared__ T name[n]
#define VQ_SHARED_PTR(T) T*
#define VQ_GLOBAL(T) const T*
#define VQ_GLOBAL_OUT(T) T*
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_FOR(i, from, to) for (uint i = (from); i < (to); ++i)
#define VQ_FN __device__ __forceinline__
#define thread_position_in_threadgroup (threadIdx)
#define threadgroup_position_in_grid (blockIdx)
#define threadgroups_per_grid (gridDim)
#define threads_per_threadgroup (blockDim)
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)
#define simdgroups_per_threadgroup (blockDim.x * blockDim.y * blockDim.z / 32u)
#define thread_position_in_grid (make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z))
namespace mem_flags { enum flags { mem_none, mem_device, mem_threadgroup }; }
VQ_FN void threadgroup_barrier(mem_flags::flags) { __syncthreads(); }
VQ_FN void simdgroup_barrier(mem_flags::flags) { __syncwarp(); }
#define VQ_ALL 0xffffffffu
template <class T> VQ_FN T simd_shuffle(T v, ushort lane) { return __shfl_sync(VQ_ALL, v, lane); }
template <class T> VQ_FN T simd_shuffle_xor(T v, ushort mask) { return __shfl_xor_sync(VQ_ALL, v, mask); }
template <class T> VQ_FN T simd_shuffle_up(T v, ushort by) { return __shfl_up_sync(VQ_ALL, v, by); }
template <class T> VQ_FN T simd_shuffle_down(T v, ushort by) { return __shfl_down_sync(VQ_ALL, v, by); }
template <class T> VQ_FN T simd_broadcast(T v, ushort lane) { return __shfl_sync(VQ_ALL, v, lane); }
VQ_FN bool simd_any(bool p) { return __any_sync(VQ_ALL, p); }
VQ_FN bool simd_all(bool p) { return __all_sync(VQ_ALL, p); }
template <class T> VQ_FN T simd_sum(T v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(VQ_ALL, v, o);
  return v;
}
template <class T> VQ_FN T simd_max(T v) {
  for (int o = 16; o; o >>= 1) v = max(v, __shfl_xor_sync(VQ_ALL, v, o));
  return v;
}
template <class T> VQ_FN T simd_min(T v) {
  for (int o = 16; o; o >>= 1) v = min(v, __shfl_xor_sync(VQ_ALL, v, o));
  return v;
}
template <class T, class U> VQ_FN T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  T t;
  memcpy(&t, &u, sizeof(T));
  return t;
}
template <class T> VQ_FN T clamp(T v, T low, T high) { return min(max(v, low), high); }
VQ_FN uint popcount(uint v) { return __popc(v); }
// Not contracted: MLX passes NVRTC no --fmad=false, so a product in a statement of its own is not enough.
VQ_FN float vq_mul(float a, float b) { return __fmul_rn(a, b); }
VQ_FN float vq_add(float a, float b) { return __fadd_rn(a, b); }
VQ_FN float vq_sub(float a, float b) { return __fsub_rn(a, b); }
VQ_FN float vq_div(float a, float b) { return __fdiv_rn(a, b); }
template <class U, class T> VQ_FN const U* vq_view(const T* p) { return reinterpret_cast<const U*>(p); }
template <class U, class T> VQ_FN U* vq_view(T* p) { return reinterpret_cast<U*>(p); }
