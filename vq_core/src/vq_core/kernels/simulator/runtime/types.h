// Plain types of the dialect, and what the Python side and the compiled kernel hand each other.
// Nothing here or in the other headers needs a C or C++ library beyond these two headers of the compiler itself.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef uint64_t ulong;

struct uint3 { uint x, y, z; };

#define VQ_FN static inline
#define VQ_UNROLL
#define VQ_RARE VQ_FN
#define VQ_COLD __attribute__((noinline, cold))
#define VQ_SLOW_PATH __attribute__((noinline))

// A buffer of the launch. `data` and `owner` arrive as offsets from the start of the shared segment.
struct vq_buffer {
  char* data;
  uint* owner;      // outputs: 1 + the number of the thread that wrote each element, 0 = nobody yet
  int64_t bytes;
  int32_t granule;  // bytes of one element
  int32_t reserved;
};

enum { VQ_TEXT = 64 };

// What went wrong, in numbers; the Python side makes the sentence (messages.py has the same order of kinds).
struct vq_report {
  int32_t kind, op, line, other_op, other_line, buffer;
  uint lane, group[3], other_lane, other_group[3], missing, reserved;
  int64_t index, limit;
  char file[VQ_TEXT], other_file[VQ_TEXT], name[VQ_TEXT];
};

// The head of the shared segment; the table of buffers follows it.
struct vq_launch {
  uint threadgroups[3], threads[3];
  uint64_t seed, steps;
  // Where the run is, so that the parent can say it after a crash or a time-out.
  uint at_lane, at_group[3];
  int32_t at_line, buffers;
  vq_report report;
};

enum vq_kind {
  VQ_OK, VQ_OTHER_PLACE, VQ_NEVER_MET, VQ_OTHER_ITERATION, VQ_NOT_UNIFORM, VQ_NO_SUCH_LANE,
  VQ_READ_OUTSIDE, VQ_WRITE_OUTSIDE, VQ_STALE_OUTPUT, VQ_WRITTEN_TWICE, VQ_READ_OTHERS, VQ_MISALIGNED,
  VQ_SHARED_OUTSIDE, VQ_SHARED_UNWRITTEN, VQ_RACE_READ, VQ_RACE_WRITE, VQ_SHARED_SIZE, VQ_LOCAL_OUTSIDE, VQ_STACK_FULL,
  VQ_SHAPE_OUTSIDE, VQ_COPY_UNFINISHED, VQ_COPIES_MANY
};

enum vq_op {
  VQ_OP_NONE, VQ_OP_SHUFFLE, VQ_OP_SHUFFLE_XOR, VQ_OP_SHUFFLE_UP, VQ_OP_SHUFFLE_DOWN, VQ_OP_BROADCAST,
  VQ_OP_SUM, VQ_OP_MIN, VQ_OP_MAX, VQ_OP_PREFIX_INCLUSIVE, VQ_OP_PREFIX_EXCLUSIVE,
  VQ_OP_BALLOT, VQ_OP_ANY, VQ_OP_ALL, VQ_OP_MMA, VQ_OP_TRANSPOSE, VQ_OP_SIMD_BARRIER, VQ_OP_GROUP_BARRIER, VQ_OP_RETURNED
};

template <class T, class U> VQ_FN T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type keeps the size: both types have the same number of bytes");
  T out;
  __builtin_memcpy(&out, &value, sizeof out);
  return out;
}
