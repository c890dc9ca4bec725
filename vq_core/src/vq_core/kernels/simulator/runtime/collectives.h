// Barriers, shuffles, votes and reductions. Macros, so that each place in the text has its own number and line.
#pragma once
#include "numbers.h"
#include "scheduler.h"

namespace mem_flags { enum f { mem_none = 0, mem_device = 1, mem_threadgroup = 2 }; }

#define threadgroup_barrier(...) vq_meet_all(((__VA_ARGS__) & mem_flags::mem_threadgroup) != 0, VQ_SITE)
#define simdgroup_barrier(...) \
  ((void)vq_meet(VQ_OP_SIMD_BARRIER, 0, ((__VA_ARGS__) & mem_flags::mem_threadgroup) != 0, VQ_SITE))
#define simd_shuffle(...) vq_simd_shuffle(VQ_SITE, __VA_ARGS__)
#define simd_shuffle_xor(...) vq_simd_shuffle_xor(VQ_SITE, __VA_ARGS__)
#define simd_shuffle_up(...) vq_simd_shuffle_up(VQ_SITE, __VA_ARGS__)
#define simd_shuffle_down(...) vq_simd_shuffle_down(VQ_SITE, __VA_ARGS__)
#define simd_broadcast(...) vq_simd_broadcast(VQ_SITE, __VA_ARGS__)
#define simd_ballot(...) vq_simd_ballot(VQ_OP_BALLOT, VQ_SITE, __VA_ARGS__)
#define simd_any(...) (vq_simd_ballot(VQ_OP_ANY, VQ_SITE, __VA_ARGS__) != 0u)
#define simd_all(...) (vq_simd_ballot(VQ_OP_ALL, VQ_SITE, __VA_ARGS__) == ~0u)
#define simd_sum(...) vq_simd_sum(VQ_SITE, __VA_ARGS__)
#define simd_min(...) vq_simd_min(VQ_SITE, __VA_ARGS__)
#define simd_max(...) vq_simd_max(VQ_SITE, __VA_ARGS__)
#define simd_prefix_inclusive_sum(...) vq_simd_prefix(VQ_OP_PREFIX_INCLUSIVE, VQ_SITE, __VA_ARGS__)
#define simd_prefix_exclusive_sum(...) vq_simd_prefix(VQ_OP_PREFIX_EXCLUSIVE, VQ_SITE, __VA_ARGS__)

template <class T> struct vq_exchangeable { enum { value = 0 }; };
template <> struct vq_exchangeable<float> { enum { value = 1 }; };
template <> struct vq_exchangeable<half> { enum { value = 1 }; };
template <> struct vq_exchangeable<bfloat> { enum { value = 1 }; };
template <> struct vq_exchangeable<int> { enum { value = 1 }; };
template <> struct vq_exchangeable<uint> { enum { value = 1 }; };
template <> struct vq_exchangeable<short> { enum { value = 1 }; };
template <> struct vq_exchangeable<ushort> { enum { value = 1 }; };

template <class T> VQ_FN uint64_t vq_box(T value) {
  static_assert(vq_exchangeable<T>::value,
                "lanes exchange float, half, bfloat, int, uint, short or ushort: name the type in a variable first "
                "(const float a = buffer[i];), send a vector by its members and a bool as uint");
  uint64_t box = 0;
  __builtin_memcpy(&box, &value, sizeof value);
  return box;
}
template <class T> VQ_FN T vq_unbox(uint64_t box) {
  T value;
  __builtin_memcpy(&value, &box, sizeof value);
  return value;
}
VQ_COLD static void vq_no_such_lane(uint op, int64_t lane, const vq_site& site) {
  vq_report& r = vq_error(VQ_NO_SUCH_LANE, site.line, site.file);
  r.op = int(op);
  r.index = lane;
  vq_stop();
}
VQ_FN void vq_check_lane(uint op, uint lane, const vq_site& site) {
  if (lane >= 32) vq_no_such_lane(op, lane, site);
}

template <class T> VQ_FN T vq_simd_shuffle(vq_site site, T value, uint lane) {
  vq_check_lane(VQ_OP_SHUFFLE, lane, site);
  return vq_unbox<T>(vq_meet(VQ_OP_SHUFFLE, 0, vq_box(value), site)[lane]);
}
template <class T> VQ_FN T vq_simd_shuffle_xor(vq_site site, T value, uint mask) {
  vq_check_lane(VQ_OP_SHUFFLE_XOR, mask, site);
  return vq_unbox<T>(vq_meet(VQ_OP_SHUFFLE_XOR, int(mask), vq_box(value), site)[vq_me->lane ^ mask]);
}
// Up and down do not wrap: a lane without a partner keeps its own value, on Metal as on CUDA.
template <class T> VQ_FN T vq_simd_shuffle_up(vq_site site, T value, uint delta) {
  vq_check_lane(VQ_OP_SHUFFLE_UP, delta, site);
  const uint64_t* slots = vq_meet(VQ_OP_SHUFFLE_UP, int(delta), vq_box(value), site);
  return vq_me->lane < delta ? value : vq_unbox<T>(slots[vq_me->lane - delta]);
}
template <class T> VQ_FN T vq_simd_shuffle_down(vq_site site, T value, uint delta) {
  vq_check_lane(VQ_OP_SHUFFLE_DOWN, delta, site);
  const uint64_t* slots = vq_meet(VQ_OP_SHUFFLE_DOWN, int(delta), vq_box(value), site);
  return vq_me->lane + delta > 31u ? value : vq_unbox<T>(slots[vq_me->lane + delta]);
}
template <class T> VQ_FN T vq_simd_broadcast(vq_site site, T value, uint lane) {
  vq_check_lane(VQ_OP_BROADCAST, lane, site);
  return vq_unbox<T>(vq_meet(VQ_OP_BROADCAST, int(lane), vq_box(value), site)[lane]);
}
VQ_FN uint vq_simd_ballot(uint op, vq_site site, bool vote) {
  const uint64_t* slots = vq_meet(op, 0, vote, site);
  uint votes = 0;
  for (int i = 0; i < 32; ++i) votes |= uint(slots[i]) << i;
  return votes;
}

// The languages promise no order of a reduction. The seed draws one, so code that relies on an order is found out.
#define VQ_REDUCTION(name, op, expression)                                \
  template <class T> VQ_FN T name(vq_site site, T value) {                \
    const uint64_t* slots = vq_meet(op, 0, vq_box(value), site);          \
    const uint twist = uint(vq_now->seed * 7 + 3) & 31u;                  \
    T a = vq_unbox<T>(slots[twist]);                                      \
    for (uint i = 1; i < 32; ++i) {                                       \
      const T b = vq_unbox<T>(slots[i ^ twist]);                          \
      a = T(expression);                                                  \
    }                                                                     \
    return a;                                                             \
  }
VQ_REDUCTION(vq_simd_sum, VQ_OP_SUM, a + b)
VQ_REDUCTION(vq_simd_min, VQ_OP_MIN, b < a ? b : a)
VQ_REDUCTION(vq_simd_max, VQ_OP_MAX, b > a ? b : a)

template <class T> VQ_FN T vq_simd_prefix(uint op, vq_site site, T value) {
  const uint64_t* slots = vq_meet(op, 0, vq_box(value), site);
  const uint count = vq_me->lane + (op == VQ_OP_PREFIX_INCLUSIVE);
  T sum = T(0);
  for (uint i = 0; i < count; ++i) sum = T(sum + vq_unbox<T>(slots[i]));
  return sum;
}
