// The dialect on CUDA: Metal's names over CUDA's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long long ulong;
typedef __nv_bfloat16 bfloat;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif
#define VQ_SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define VQ_SHARED_PTR(T) T*
#define VQ_GLOBAL(T) const T*
#define VQ_GLOBAL_OUT(T) T*
#define VQ_DYNAMIC(T, name) extern __shared__ __align__(16) T name[]
#define VQ_LOCAL(T, name, n) T name[n]
#define VQ_LOCAL_PTR(T) T*
#define VQ_CONSTANT(T, name, n) __constant__ T name[n]
#define VQ_FOR(i, from, to) for (uint i = (from); i < (to); ++i)
#define VQ_FOR_STEP(i, from, to, step) for (uint i = (from); i < (to); i += (step))
#define VQ_UNROLL _Pragma("unroll")
#define VQ_FN __device__ __forceinline__
#define VQ_RARE __device__ __noinline__
#define thread_position_in_threadgroup (threadIdx)
#define threadgroup_position_in_grid (blockIdx)
#define threadgroups_per_grid (make_uint3(gridDim.x, gridDim.y, gridDim.z))
#define threads_per_threadgroup (make_uint3(blockDim.x, blockDim.y, blockDim.z))
#define threads_per_grid (make_uint3(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z))
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)
#define simdgroups_per_threadgroup (blockDim.x * blockDim.y * blockDim.z / 32u)
#define threads_per_simdgroup 32u
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
VQ_FN uint simd_ballot(bool p) { return __ballot_sync(VQ_ALL, p); }
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
template <class T> VQ_FN T simd_prefix_inclusive_sum(T v) {
  const uint lane = thread_index_in_simdgroup;
  for (uint o = 1; o < 32u; o <<= 1) {
    const T below = __shfl_up_sync(VQ_ALL, v, o);
    if (lane >= o) v += below;
  }
  return v;
}
template <class T> VQ_FN T simd_prefix_exclusive_sum(T v) {
  const T below = __shfl_up_sync(VQ_ALL, simd_prefix_inclusive_sum(v), 1);
  return thread_index_in_simdgroup ? below : T(0);
}
template <class T, class U> VQ_FN T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  T t;
  memcpy(&t, &u, sizeof(T));
  return t;
}
template <class T> VQ_FN T clamp(T v, T low, T high) { return min(max(v, low), high); }
VQ_FN uint popcount(uint v) { return __popc(v); }
VQ_FN uint clz(uint v) { return __clz(int(v)); }
VQ_FN uint ctz(uint v) { return v ? __ffs(int(v)) - 1 : 32u; }
VQ_FN uint reverse_bits(uint v) { return __brev(v); }
VQ_FN uint extract_bits(uint v, uint offset, uint bits) { return bits < 32u ? (v >> offset) & ((1u << bits) - 1u) : v >> offset; }
// Not contracted: MLX passes NVRTC no --fmad=false, so a product in a statement of its own is not enough.
VQ_FN float vq_mul(float a, float b) { return __fmul_rn(a, b); }
VQ_FN float vq_add(float a, float b) { return __fadd_rn(a, b); }
VQ_FN float vq_sub(float a, float b) { return __fsub_rn(a, b); }
VQ_FN float vq_div(float a, float b) { return __fdiv_rn(a, b); }
// A small number's bits are a subnormal float; these GPUs multiply those exactly, and as fast as any.
VQ_FN float vq_fraction(uint bits) { return __fmul_rn(__uint_as_float(bits), 8.507059173023462e37f); }
struct __align__(8) half4 { half x, y, z, w; };
VQ_FN float2 vq_float2(float x, float y) { return make_float2(x, y); }
VQ_FN float4 vq_float4(float x, float y, float z, float w) { return make_float4(x, y, z, w); }
VQ_FN half2 vq_half2(half x, half y) { return __halves2half2(x, y); }
VQ_FN half4 vq_half4(half x, half y, half z, half w) { return half4{x, y, z, w}; }
VQ_FN uint2 vq_uint2(uint x, uint y) { return make_uint2(x, y); }
VQ_FN uint4 vq_uint4(uint x, uint y, uint z, uint w) { return make_uint4(x, y, z, w); }
VQ_FN int2 vq_int2(int x, int y) { return make_int2(x, y); }
VQ_FN int4 vq_int4(int x, int y, int z, int w) { return make_int4(x, y, z, w); }
VQ_FN half2 fma(half2 a, half2 b, half2 c) { return __hfma2(a, b, c); }
template <class U, class T> VQ_FN const U* vq_view(const T* p) { return reinterpret_cast<const U*>(p); }
template <class U, class T> VQ_FN U* vq_view(T* p) { return reinterpret_cast<U*>(p); }
template <class U, class T> VQ_FN bool vq_aligned(const T* p) { return reinterpret_cast<ulong>(p) % alignof(U) == 0; }
// From sm_80 on; Metal has nothing like them.
VQ_FN float4 vq_mma_m16n8k16(float4 c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  return c;
}
VQ_FN float4 vq_mma_m16n8k16(float4 c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, half) {
  return vq_mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
}
VQ_FN float4 vq_mma_m16n8k16(float4 c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, bfloat) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  return c;
}
VQ_FN uint vq_transpose_8x8(uint pair) {
  uint turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(turned) : "r"(pair));
  return turned;
}
VQ_FN uint vq_permute(uint a, uint b, uint selector) {
  uint found;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(found) : "r"(a), "r"(b), "r"(selector));
  return found;
}
VQ_FN uint vq_half_pair(float low, float high) {
  uint pair;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
VQ_FN uint vq_bfloat_pair(float low, float high) {
  uint pair;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
VQ_FN float vq_exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
VQ_FN void vq_copy_async(uint4* to, const uint4* from, int at = 0) {
  const uint place = uint(__cvta_generic_to_shared(to)) + 16u * uint(at);
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(place), "l"(from + at) : "memory");
}
VQ_FN void vq_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> VQ_FN void vq_copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
