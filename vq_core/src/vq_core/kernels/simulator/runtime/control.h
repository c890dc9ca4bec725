// Loops that hold collectives, and private arrays.
#pragma once
#include "memory.h"
#include "scheduler.h"

// Lanes that meet at a collective must have made the same number of rounds of each loop around it, and have come through
// the same calls of helpers. instrument.py puts these marks into the text; VQ_FOR brings its own.
struct vq_rounds {
  uint64_t outer, round;
  bool once;
  vq_rounds() : outer(vq_me->trip), round(0), once(true) {}
  ~vq_rounds() { vq_me->trip = outer; }
  vq_rounds(const vq_rounds&) = delete;
  bool next() {
    vq_me->trip = (outer + ++round) * 0x9e3779b97f4a7c15ull;
    return true;
  }
};
struct vq_call {
  uint64_t outer;
  vq_call(vq_site site) : outer(vq_me->trip) { vq_me->trip = (outer + uint64_t(site.id) + 1) * 0xd1342543de82ef95ull; }
  ~vq_call() { vq_me->trip = outer; }
  vq_call(const vq_call&) = delete;
};
#define VQ_FOR_STEP(i, from, to, step)                                                        \
  for (vq_rounds i##_rounds; i##_rounds.once; i##_rounds.once = false)                        \
    for (uint i = (from); i##_rounds.next() && i < uint(to); i += (step))
#define VQ_FOR(i, from, to) VQ_FOR_STEP(i, from, to, 1u)

VQ_FN void vq_check_local(const vq_index& i, int64_t size, const char* name) {
  if (uint64_t(i.value) < uint64_t(size)) return;
  vq_report& r = vq_error(VQ_LOCAL_OUTSIDE, i.line, i.file);
  r.index = i.value;
  r.limit = size;
  vq_copy_text(r.name, name);
  vq_stop();
}
// Private arrays: bounds are checked; elements start as all ones (a NaN, or the largest number), which shows in results.
template <class T> struct vq_local_ptr {
  T* data;
  int64_t size;
  const char* name;
  T& operator[](vq_index i) const {
    vq_check_local(i, size, name);
    return data[i.value];
  }
};
template <class T, int N> struct vq_local {
  T data[N];
  const char* name;
  explicit vq_local(const char* text) : name(text) { __builtin_memset((void*)data, 0xff, sizeof data); }
  vq_local(const vq_local&) = delete;
  T& operator[](vq_index i) { return vq_local_ptr<T>{data, N, name}[i]; }
  operator vq_local_ptr<T>() { return {data, N, name}; }
};
#define VQ_LOCAL(T, name, n) vq_local<T, int(n)> name(#name)
#define VQ_LOCAL_PTR(T) vq_local_ptr<T>
// A table of constants, in the header: VQ_CONSTANT(float, LEVELS, 4) = {-1.5f, -0.5f, 0.5f, 1.5f};
#define VQ_CONSTANT(T, name, n)                 \
  struct name##_constant {                      \
    T data[n];                                  \
    const T operator[](vq_index i) const {      \
      vq_check_local(i, int64_t(n), #name);     \
      return data[i.value];                     \
    }                                           \
  };                                            \
  static const name##_constant name
