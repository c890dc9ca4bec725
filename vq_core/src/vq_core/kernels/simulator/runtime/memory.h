// Global memory: inputs give values (a write does not compile), outputs remember which thread wrote each element.
#pragma once
#include "scheduler.h"

// An index with the place where it was used. Floats are refused: the overloads leave them ambiguous.
#define VQ_HERE int line = __builtin_LINE(), const char* file = __builtin_FILE()
struct vq_index {
  int64_t value;
  int line;
  const char* file;
  vq_index(int n, VQ_HERE) : value(n), line(line), file(file) {}
  vq_index(uint n, VQ_HERE) : value(n), line(line), file(file) {}
  vq_index(long n, VQ_HERE) : value(n), line(line), file(file) {}
  vq_index(unsigned long n, VQ_HERE) : value(int64_t(n)), line(line), file(file) {}
  vq_index(long long n, VQ_HERE) : value(n), line(line), file(file) {}
  vq_index(unsigned long long n, VQ_HERE) : value(int64_t(n)), line(line), file(file) {}
};

VQ_COLD static vq_report& vq_bad_access(int kind, const vq_buffer* b, int64_t byte, size_t size, int line, const char* file) {
  vq_report& r = vq_error(kind, line, file);
  r.buffer = int(b - vq_buffers);
  r.index = byte >= 0 ? byte / int64_t(size) : -((int64_t(size) - 1 - byte) / int64_t(size));
  r.limit = b->bytes / int64_t(size);
  return r;
}
VQ_FN bool vq_outside(int64_t bytes, int64_t byte, size_t size) { return byte < 0 || byte > bytes - int64_t(size); }

// Shape of an input: x_shape[i], an int.
struct vq_shape {
  const vq_buffer* b;
  int operator[](vq_index i) const {
    const int64_t byte = i.value * 4;
    if (vq_outside(b->bytes, byte, 4)) {
      vq_bad_access(VQ_SHAPE_OUTSIDE, b, byte, 4, i.line, i.file);
      vq_stop();
    }
    return ((const int*)b->data)[i.value];
  }
};

template <class T> struct vq_in {  // const device T*
  const vq_buffer* b;
  int64_t at;
  // const T: assignment to a half or a vector that was read would otherwise compile, and do nothing.
  const T operator[](vq_index i) const {
    const int64_t byte = at + i.value * int64_t(sizeof(T));
    vq_now->at_line = i.line;
    if (vq_outside(b->bytes, byte, sizeof(T))) {
      vq_bad_access(VQ_READ_OUTSIDE, b, byte, sizeof(T), i.line, i.file);
      vq_stop();
    }
    if (byte % int64_t(alignof(T))) {
      vq_bad_access(VQ_MISALIGNED, b, byte, sizeof(T), i.line, i.file);
      vq_stop();
    }
    T value;
    __builtin_memcpy(&value, b->data + byte, sizeof value);
    return value;
  }
  vq_in operator+(vq_index n) const { return {b, at + n.value * int64_t(sizeof(T))}; }
};

VQ_COLD static void vq_bad_owner(int kind, const vq_buffer* b, int64_t byte, size_t size, uint owner, int line, const char* file) {
  vq_report& r = vq_bad_access(kind, b, byte, size, line, file);
  const uint group = owner ? (owner - 1) / vq_width : 0;
  r.other_lane = owner ? (owner - 1) % vq_width : 0;
  r.other_group[0] = group % vq_group_count.x;
  r.other_group[1] = group / vq_group_count.x % vq_group_count.y;
  r.other_group[2] = group / vq_group_count.x / vq_group_count.y;
  vq_stop();
}
VQ_SLOW_PATH static void vq_own(const vq_buffer* b, int64_t byte, size_t size, size_t align, bool write, int line, const char* file) {
  vq_now->at_line = line;
  if (vq_outside(b->bytes, byte, size)) {
    vq_bad_access(write ? VQ_WRITE_OUTSIDE : VQ_READ_OUTSIDE, b, byte, size, line, file);
    vq_stop();
  }
  if (byte % int64_t(align)) {
    vq_bad_access(VQ_MISALIGNED, b, byte, size, line, file);
    vq_stop();
  }
  const uint group = vq_group_at.x + vq_group_count.x * (vq_group_at.y + vq_group_count.y * vq_group_at.z);
  const uint me = group * vq_width + vq_me->tid + 1;
  for (int64_t k = byte / b->granule; k <= (byte + int64_t(size) - 1) / b->granule; ++k) {
    const uint owner = b->owner[k];
    if (!write && !owner) vq_bad_owner(VQ_STALE_OUTPUT, b, byte, size, owner, line, file);
    if (owner && owner != me) vq_bad_owner(write ? VQ_WRITTEN_TWICE : VQ_READ_OTHERS, b, byte, size, owner, line, file);
    b->owner[k] = me;
  }
}

// What an element of checked memory offers. `auto a = p[i]` would keep the place and not the value: such an a cannot be read.
#define VQ_ELEMENT(P)                                                                                           \
  operator T() const&& { return get(); }                                                                        \
  operator T() const& = delete; /* name the type: const float a = p[i]; */                                      \
  T operator=(T v) && { return put(v); }                                                                        \
  T operator=(const P& o) && { return put(o.get()); }                                                           \
  P(const P&) = default;                                                                                        \
  P(const decltype(P::m) m, int64_t byte, int line, const char* file) : m(m), byte(byte), line(line), file(file) {} \
  T operator+=(T v) && { return put(T(get() + v)); }                                                            \
  T operator-=(T v) && { return put(T(get() - v)); }                                                            \
  T operator*=(T v) && { return put(T(get() * v)); }                                                            \
  T operator/=(T v) && { return put(T(get() / v)); }                                                            \
  T operator|=(T v) && { return put(T(get() | v)); }                                                            \
  T operator&=(T v) && { return put(T(get() & v)); }                                                            \
  T operator^=(T v) && { return put(T(get() ^ v)); }

template <class T> struct vq_out_element {
  const vq_buffer* m;
  int64_t byte;
  int line;
  const char* file;
  VQ_ELEMENT(vq_out_element)
  T get() const {
    vq_own(m, byte, sizeof(T), alignof(T), false, line, file);
    T value;
    __builtin_memcpy(&value, m->data + byte, sizeof value);
    return value;
  }
  T put(T value) const {
    vq_own(m, byte, sizeof(T), alignof(T), true, line, file);
    __builtin_memcpy(m->data + byte, &value, sizeof value);
    return value;
  }
};
template <class T> struct vq_out {  // device T*
  const vq_buffer* b;
  int64_t at;
  vq_out_element<T> operator[](vq_index i) const { return {b, at + i.value * int64_t(sizeof(T)), i.line, i.file}; }
  vq_out operator+(vq_index n) const { return {b, at + n.value * int64_t(sizeof(T))}; }
};
#define VQ_GLOBAL(T) vq_in<T>
#define VQ_GLOBAL_OUT(T) vq_out<T>

template <class U, class T> VQ_FN vq_in<U> vq_view(vq_in<T> p) { return {p.b, p.at}; }
// Nothing is misaligned here: launches of odd seeds say that every input is, so that both ways of a kernel are run.
template <class U, class T> VQ_FN bool vq_aligned(vq_in<T> p) { return p.at % int64_t(alignof(U)) == 0 && vq_now->seed % 2 == 0; }
template <class U, class T> VQ_FN vq_out<U> vq_view(vq_out<T> p) {
  static_assert(sizeof(U) % sizeof(T) == 0, "vq_view of an output widens: ownership is kept for each declared element");
  return {p.b, p.at};
}
