// Threadgroup memory. Each cell keeps its last write and who has read it since, so that a race is seen whatever the
// order in which the lanes happened to run: two accesses are ordered by the same thread, by a threadgroup barrier, or,
// inside a SIMD group, by a simdgroup barrier.
#pragma once
#include "memory.h"

enum { VQ_SHARED_MAX = 32768 };

struct vq_touch { uint tid, fences, simd_fences; int line; };
struct vq_cell {
  uint serial;       // of the threadgroup that wrote it: nothing has to be cleared
  vq_touch written;
  // Readers since that write and since the last threadgroup barrier: which SIMD groups; of the first one the latest
  // reader after its last simdgroup barrier, and another such reader; of a further one any reader.
  uint simd_groups;
  vq_touch first, second, elsewhere;
  bool two;
  bool pending;      // the target of an asynchronous copy that nobody has waited for
};
struct vq_shared_memory {
  char* data;
  vq_cell* cells;
  int64_t bytes;
  int granule;
  uint serial;
  const char* name;
};

VQ_FN bool vq_ordered(const vq_touch& t) {
  return t.tid == vq_me->tid || t.fences < vq_whole.fences ||
         (t.tid / 32 == vq_me->simd && t.simd_fences < vq_simd_groups[vq_me->simd].fences);
}
VQ_COLD static void vq_bad_shared(int kind, const vq_shared_memory* m, int64_t byte, const vq_touch* other, int line, const char* file) {
  vq_report& r = vq_error(kind, line, file);
  r.index = byte >= 0 ? byte / m->granule : -((m->granule - 1 - byte) / m->granule);
  r.limit = m->bytes / m->granule;
  vq_copy_text(r.name, m->name);
  if (other) {
    r.other_lane = other->tid;
    r.other_line = other->line;
  }
  vq_stop();
}
VQ_FN const vq_touch* vq_racing_reader(const vq_cell* c) {
  const vq_touch* readers[3] = {&c->first, &c->second, &c->elsewhere};
  const bool valid[3] = {c->simd_groups != 0, c->two, (c->simd_groups & (c->simd_groups - 1)) != 0};
  for (int k = 0; k < 3; ++k)
    if (valid[k] && !vq_ordered(*readers[k])) return readers[k];
  return 0;
}
VQ_FN void vq_note_reader(vq_cell* c, const vq_touch& me) {
  const uint mine = 1u << vq_me->simd;
  if (!c->simd_groups || c->first.fences < me.fences) {  // the first since the write or since a threadgroup barrier
    c->simd_groups = mine;
    c->first = me;
    c->two = false;
  } else if (c->first.tid / 32 != vq_me->simd) {
    c->simd_groups |= mine;
    c->elsewhere = me;
  } else if (c->first.simd_fences < me.simd_fences) {
    c->first = me;
    c->two = false;
  } else if (c->first.tid != me.tid) {
    c->second = me;
    c->two = true;
  }
}
VQ_SLOW_PATH static void vq_touch_shared(const vq_shared_memory* m, int64_t byte, size_t size, size_t align, bool write, int line, const char* file) {
  vq_now->at_line = line;
  if (vq_outside(m->bytes, byte, size)) vq_bad_shared(VQ_SHARED_OUTSIDE, m, byte, 0, line, file);
  if (byte % int64_t(align)) vq_bad_shared(VQ_MISALIGNED, m, byte, 0, line, file);
  const vq_touch me = {vq_me->tid, vq_whole.fences, vq_simd_groups[vq_me->simd].fences, line};
  vq_cell *c = m->cells + byte / m->granule, *last = m->cells + (byte + int64_t(size) - 1) / m->granule;
  for (; c <= last; ++c) {
    const bool fresh = c->serial != vq_serial;
    if (fresh && !write) vq_bad_shared(VQ_SHARED_UNWRITTEN, m, byte, 0, line, file);
    if (!fresh && c->pending) vq_bad_shared(VQ_COPY_UNFINISHED, m, byte, &c->written, line, file);
    if (!fresh && !vq_ordered(c->written)) vq_bad_shared(VQ_RACE_WRITE, m, byte, &c->written, line, file);
    if (!write) {
      vq_note_reader(c, me);
      continue;
    }
    if (const vq_touch* reader = fresh ? 0 : vq_racing_reader(c)) vq_bad_shared(VQ_RACE_READ, m, byte, reader, line, file);
    c->serial = vq_serial;
    c->written = me;
    c->simd_groups = 0;
    c->two = c->pending = false;
  }
}

template <class T> struct vq_shared_element {
  const vq_shared_memory* m;
  int64_t byte;
  int line;
  const char* file;
  VQ_ELEMENT(vq_shared_element)
  T get() const {
    vq_touch_shared(m, byte, sizeof(T), alignof(T), false, line, file);
    T value;
    __builtin_memcpy(&value, m->data + byte, sizeof value);
    return value;
  }
  T put(T value) const {
    vq_touch_shared(m, byte, sizeof(T), alignof(T), true, line, file);
    __builtin_memcpy(m->data + byte, &value, sizeof value);
    return value;
  }
};
template <class T> struct vq_shared_ptr {  // threadgroup T*
  const vq_shared_memory* m;
  int64_t at;
  vq_shared_element<T> operator[](vq_index i) const { return {m, at + i.value * int64_t(sizeof(T)), i.line, i.file}; }
  vq_shared_ptr operator+(vq_index n) const { return {m, at + n.value * int64_t(sizeof(T))}; }
};
template <class T, int N> struct vq_shared_store {
  T data[N];
  vq_cell cells[N];
  vq_shared_memory memory;
};
template <class T, int N> VQ_FN vq_shared_ptr<T> vq_bind_shared(vq_shared_store<T, N>& s, const char* name, VQ_HERE) {
  if (s.memory.serial != vq_serial) {
    s.memory = {(char*)s.data, s.cells, int64_t(sizeof s.data), int(sizeof(T)), vq_serial, name};
    vq_shared_bytes += uint(sizeof s.data);
    if (vq_shared_bytes > VQ_SHARED_MAX) {
      vq_report& r = vq_error(VQ_SHARED_SIZE, line, file);
      r.index = vq_shared_bytes;
      r.limit = VQ_SHARED_MAX;
      vq_copy_text(r.name, name);
      vq_stop();
    }
  }
  return {&s.memory, 0};
}
// vq_kernel_body is a local of every body: threadgroup memory is declared there and nowhere else, as Metal wants it.
#define VQ_SHARED(T, name, n)                              \
  (void)vq_kernel_body;                                    \
  static vq_shared_store<T, int(n)> name##_shared_store;   \
  const vq_shared_ptr<T> name = vq_bind_shared(name##_shared_store, #name)
#define VQ_SHARED_PTR(T) vq_shared_ptr<T>
template <class U, class T> VQ_FN vq_shared_ptr<U> vq_view(vq_shared_ptr<T> p) {
  static_assert(sizeof(U) % sizeof(T) == 0, "vq_view of threadgroup memory widens: races are kept for each declared element");
  return {p.m, p.at};
}
