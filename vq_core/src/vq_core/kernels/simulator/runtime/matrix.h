// What CUDA has from sm_80 on and Metal has not: products of 16 x 16 and 16 x 8 tiles, turning an 8 x 8 tile, and copies
// that run while the lane goes on.
#pragma once
#include "collectives.h"
#include "shared_memory.h"
#include "vectors.h"

#define vq_mma_m16n8k16(...) vq_simd_mma(VQ_SITE, __VA_ARGS__)
#define vq_transpose_8x8(...) vq_simd_transpose(VQ_SITE, __VA_ARGS__)

VQ_FN float vq_low(uint pair, half) { return vq_half_value(ushort(pair & 0xffffu)); }
VQ_FN float vq_high(uint pair, half) { return vq_half_value(ushort(pair >> 16)); }
VQ_FN float vq_low(uint pair, bfloat) { return as_type<float>(pair << 16); }
VQ_FN float vq_high(uint pair, bfloat) { return as_type<float>(pair & 0xffff0000u); }
VQ_FN uint vq_half_pair(float low, float high) { return uint(vq_half_bits(low)) | uint(vq_half_bits(high)) << 16; }
VQ_FN uint vq_bfloat_pair(float low, float high) { return uint(vq_bfloat_bits(low)) | uint(vq_bfloat_bits(high)) << 16; }
// Four bytes out of eight; from 8 on a nibble asks for the sign of a byte, eight times.
VQ_FN uint vq_permute(uint a, uint b, uint selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint found = 0;
  for (uint i = 0; i < 4; ++i) {
    const uint nibble = selector >> (4 * i) & 15u, one = uint(bytes >> (8 * (nibble & 7u))) & 255u;
    found |= (nibble < 8 ? one : one >> 7 ? 255u : 0u) << (8 * i);
  }
  return found;
}
VQ_FN float vq_exp2_fast(float x) { return x < -126.0f ? 0.0f : exp2(x); }

// Of each SIMD group the numbers of two products: nobody comes to a third before all have read the first.
struct vq_tile { float a[16][16], b[16][8]; };
static vq_tile vq_tiles[VQ_LANES / 32][2];

// Lane 4 g + t gives of A (16 x 16) rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9; of B (16 x 8) those rows of
// column g; it has of C (16 x 8) rows g and g + 8, columns 2 t and 2 t + 1.
template <class T = half>
VQ_FN float4 vq_simd_mma(vq_site site, float4 c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, T = T(0.0f)) {
  const uint g = vq_me->lane >> 2, t = vq_me->lane & 3u, k = 2 * t;
  vq_tile& tile = vq_tiles[vq_me->simd][vq_simd_groups[vq_me->simd].parity];
  const uint a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  for (uint i = 0; i < 4; ++i) {
    float* at = &tile.a[g + 8 * (i & 1u)][k + 8 * (i >> 1)];
    at[0] = vq_low(a[i], T(0.0f));
    at[1] = vq_high(a[i], T(0.0f));
  }
  for (uint i = 0; i < 2; ++i) {
    tile.b[k + 8 * i][g] = vq_low(b[i], T(0.0f));
    tile.b[k + 8 * i + 1][g] = vq_high(b[i], T(0.0f));
  }
  vq_meet(VQ_OP_MMA, 0, 0, site);
  // Products of 16-bit numbers are exact in a float; the order of the sums is nobody's promise, so the seed draws it.
  const uint twist = uint(vq_now->seed * 5) & 15u;
  float sums[4] = {c.x, c.y, c.z, c.w};
  for (uint i = 0; i < 4; ++i)
    for (uint j = 0; j < 16; ++j) sums[i] += tile.a[g + 8 * (i >> 1)][j ^ twist] * tile.b[j ^ twist][k + (i & 1u)];
  return float4{sums[0], sums[1], sums[2], sums[3]};
}
// Row g, columns 2 t and 2 t + 1 of the turned tile, from the same of the tile.
VQ_FN uint vq_simd_transpose(vq_site site, uint pair) {
  const uint g = vq_me->lane >> 2, t = vq_me->lane & 3u, shift = 16 * (g & 1u);
  const uint64_t* slots = vq_meet(VQ_OP_TRANSPOSE, 0, pair, site);
  const uint low = uint(slots[8 * t + g / 2]) >> shift, high = uint(slots[8 * t + 4 + g / 2]) >> shift;
  return (low & 0xffffu) | high << 16;
}

// Copies under way. The copied bytes are there, and may be touched, once their lane has waited for them; for other
// lanes a barrier must follow the wait.
enum { VQ_COPIES = 256 };
struct vq_copy { const vq_shared_memory* m; int64_t byte; uint group; uint64_t data[2]; };
static vq_copy vq_copies[VQ_LANES][VQ_COPIES];

template <class T> VQ_FN void vq_copy_async(vq_shared_ptr<T> to, vq_in<T> from, int at = 0, VQ_HERE) {
  static_assert(sizeof(T) == 16, "vq_copy_async moves 16 bytes: vq_view<uint4> of both");
  const T value = from[vq_index(at, line, file)];
  to.at += 16 * int64_t(at);
  vq_touch_shared(to.m, to.at, 16, 16, true, line, file);
  if (vq_me->copies == VQ_COPIES) {
    vq_report& r = vq_error(VQ_COPIES_MANY, line, file);
    r.limit = VQ_COPIES;
    vq_copy_text(r.name, to.m->name);
    vq_stop();
  }
  vq_copy& copy = vq_copies[vq_me->tid][vq_me->copies++];
  copy = {to.m, to.at, vq_me->copy_groups, {0, 0}};
  __builtin_memcpy(copy.data, &value, 16);
  __builtin_memset(to.m->data + to.at, 0xff, 16);
  for (int64_t k = to.at / to.m->granule; k <= (to.at + 15) / to.m->granule; ++k) to.m->cells[k].pending = true;
}
VQ_FN void vq_copy_commit() { ++vq_me->copy_groups; }
template <int N> VQ_FN void vq_copy_wait(VQ_HERE) {
  uint kept = 0;
  for (uint i = 0; i < vq_me->copies; ++i) {
    vq_copy& copy = vq_copies[vq_me->tid][i];
    if (copy.group + N >= vq_me->copy_groups) {  // of the newest N groups, or of none yet
      vq_copies[vq_me->tid][kept++] = copy;
      continue;
    }
    __builtin_memcpy(copy.m->data + copy.byte, copy.data, 16);
    for (int64_t k = copy.byte / copy.m->granule; k <= (copy.byte + 15) / copy.m->granule; ++k) {
      copy.m->cells[k].pending = false;
      copy.m->cells[k].written = {vq_me->tid, vq_whole.fences, vq_simd_groups[vq_me->simd].fences, line};
    }
  }
  (void)file;
  vq_me->copies = kept;
}

// The kernel's own amount of threadgroup memory, beyond what every device has.
template <class T, int N> VQ_FN vq_shared_ptr<T> vq_bind_dynamic(vq_shared_store<T, N>& s, const char* name) {
  if (s.memory.serial != vq_serial) s.memory = {(char*)s.data, s.cells, int64_t(sizeof s.data), int(sizeof(T)), vq_serial, name};
  return {&s.memory, 0};
}
#define VQ_DYNAMIC(T, name)                                                           \
  (void)vq_kernel_body;                                                               \
  alignas(16) static vq_shared_store<T, vq_dynamic_bytes / int(sizeof(T))> name##_dynamic_store; \
  const vq_shared_ptr<T> name = vq_bind_dynamic(name##_dynamic_store, #name)
