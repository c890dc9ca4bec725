// Lanes, their queue, and the two rendezvous: of a SIMD group and of a threadgroup.
// A lane runs until it reaches a collective, parks there, and goes on when the last of its group has come.
#pragma once
#include "fibers.h"

// One place of a collective in the text. A number for each, so that two on one line are two places.
struct vq_site { int id, line; const char* file; };
#define VQ_SITE vq_site{__COUNTER__, __LINE__, __FILE__}

struct vq_lane {
  void* stack;
  uint64_t* floor;  // lowest word of the stack
  uint tid, simd, lane, op;
  int line;
  const char* file;
  uint64_t trip;    // rounds of the loops around and calls of helpers on the way, mixed to one number
  uint3 in_group, in_grid;
  uint copies, copy_groups;  // asynchronous copies under way, groups of them committed
};
struct vq_meeting {  // a rendezvous of one SIMD group or of the threadgroup
  uint arrived, op, fences, first;
  int argument;
  vq_site site;
  uint64_t trip;
};
struct vq_simd_group : vq_meeting { uint parity; uint64_t slot[2][32]; };

static vq_lane vq_lanes[VQ_LANES], *vq_me;
static vq_simd_group vq_simd_groups[VQ_LANES / 32];
static vq_meeting vq_whole;
static ushort vq_queue[VQ_LANES];
static uint vq_head, vq_tail, vq_live, vq_width, vq_serial, vq_shared_bytes;
static uint64_t vq_random_state, vq_steps;
static uint3 vq_group_at, vq_group_count, vq_group_size, vq_grid_size;
static void* vq_main;
static vq_launch* vq_now;
static vq_buffer* vq_buffers;
static void (*vq_body)();

VQ_FN uint vq_random() {
  vq_random_state = vq_random_state * 6364136223846793005ull + 1442695040888963407ull;
  return uint(vq_random_state >> 33);
}
VQ_FN void vq_push(uint tid) { vq_queue[vq_tail++ & (VQ_LANES - 1)] = ushort(tid); }
VQ_COLD static void vq_copy_text(char* to, const char* from) {
  int i = 0;
  for (; from && from[i] && i < VQ_TEXT - 1; ++i) to[i] = from[i];
  to[i] = 0;
}
VQ_COLD static vq_report& vq_error(int kind, int line, const char* file) {
  vq_report& r = vq_now->report;
  r.kind = kind;
  r.line = line;
  vq_copy_text(r.file, file);
  r.lane = vq_me->tid;
  r.group[0] = vq_group_at.x;
  r.group[1] = vq_group_at.y;
  r.group[2] = vq_group_at.z;
  r.buffer = -1;
  return r;
}
VQ_COLD static void vq_stop() { void* lost; vq_switch(&lost, vq_main); }

// Nobody can run: name one waiter, and one lane that is not where the waiter's partners are.
VQ_COLD static void vq_never_met() {
  vq_lane* waiter = 0;
  for (uint i = 0; i < vq_width && !waiter; ++i)
    if (vq_lanes[i].op != VQ_OP_RETURNED && vq_lanes[i].op != VQ_OP_GROUP_BARRIER) waiter = &vq_lanes[i];
  for (uint i = 0; i < vq_width && !waiter; ++i)
    if (vq_lanes[i].op != VQ_OP_RETURNED) waiter = &vq_lanes[i];
  vq_report& r = vq_error(VQ_NEVER_MET, waiter->line, waiter->file);
  const bool whole = waiter->op == VQ_OP_GROUP_BARRIER;
  r.op = int(waiter->op);
  r.lane = waiter->tid;
  r.missing = 0;
  const uint from = whole ? 0 : waiter->simd * 32, to = whole ? vq_width : from + 32;
  for (uint i = from; i < to; ++i) {
    const vq_lane& other = vq_lanes[i];
    if (other.op == waiter->op && other.line == waiter->line) continue;
    if (!r.missing++) {
      r.other_op = int(other.op);
      r.other_line = other.line;
      r.other_lane = other.tid;
      vq_copy_text(r.other_file, other.file);
    }
  }
  vq_stop();
}
VQ_FN void vq_check_stack(int step) {
  for (int i = 0; i < VQ_CANARIES; i += step) {
    if (vq_me->floor[i] == VQ_CANARY) continue;
    vq_error(VQ_STACK_FULL, vq_me->line, vq_me->file);
    vq_stop();
  }
}
VQ_FN void vq_park() {
  vq_lane* me = vq_me;
  vq_check_stack(VQ_CANARIES / 4);
  if (vq_head == vq_tail) vq_never_met();
  vq_lane* next = &vq_lanes[vq_queue[vq_head++ & (VQ_LANES - 1)]];
  vq_me = next;
  vq_now->at_lane = next->tid;
  vq_switch(&me->stack, next->stack);
}
static void vq_enter() {
  vq_body();
  vq_check_stack(1);
  vq_me->op = VQ_OP_RETURNED;
  if (!--vq_live) vq_stop();
  vq_park();
}

VQ_COLD static void vq_diverged(int kind, const vq_meeting& m, uint op, int argument, const vq_site& site) {
  vq_report& r = vq_error(kind, site.line, site.file);
  r.op = int(op);
  r.other_op = int(m.op);
  r.other_line = m.site.line;
  r.other_lane = m.first;
  vq_copy_text(r.other_file, m.site.file);
  r.index = argument;
  r.limit = m.argument;
  vq_stop();
}
// The first to come sets what the meeting is about; the others must have come for the same.
VQ_FN void vq_join(vq_meeting& m, uint op, int argument, const vq_site& site) {
  vq_lane* me = vq_me;
  vq_now->at_line = site.line;
  ++vq_steps;
  if (!m.arrived) {
    m.op = op;
    m.site = site;
    m.trip = me->trip;
    m.argument = argument;
    m.first = me->tid;
    return;
  }
  if (m.op != op || m.site.id != site.id) vq_diverged(VQ_OTHER_PLACE, m, op, argument, site);
  if (m.trip != me->trip) vq_diverged(VQ_OTHER_ITERATION, m, op, argument, site);
  if (m.argument != argument) vq_diverged(VQ_NOT_UNIFORM, m, op, argument, site);
}
VQ_FN void vq_wait(uint op, const vq_site& site) {
  vq_lane* me = vq_me;
  me->op = op;
  me->line = site.line;
  me->file = site.file;
  vq_park();
  me->op = VQ_OP_NONE;
}
// Returns the 32 values. Two slot buffers suffice: nobody meets again twice before all have read the first.
VQ_SLOW_PATH static const uint64_t* vq_meet(uint op, int argument, uint64_t value, vq_site site) {
  vq_lane* me = vq_me;
  vq_simd_group& g = vq_simd_groups[me->simd];
  vq_join(g, op, argument, site);
  uint64_t* slots = g.slot[g.parity];
  slots[me->lane] = value;
  if (++g.arrived < 32) {
    vq_wait(op, site);
    return slots;
  }
  g.arrived = 0;
  g.parity ^= 1;
  if (op == VQ_OP_SIMD_BARRIER) g.fences += uint(value);
  const uint twist = vq_random() & 31u, base = me->simd * 32;
  for (uint i = 0; i < 32; ++i)
    if ((i ^ twist) != me->lane) vq_push(base + (i ^ twist));
  return slots;
}
VQ_SLOW_PATH static void vq_meet_all(bool fence, vq_site site) {
  vq_join(vq_whole, VQ_OP_GROUP_BARRIER, fence, site);
  if (++vq_whole.arrived < vq_width) {
    vq_wait(VQ_OP_GROUP_BARRIER, site);
    return;
  }
  vq_whole.arrived = 0;
  vq_whole.fences += fence;
  uint i = vq_random() % vq_width;
  for (uint n = 0; n < vq_width; ++n, i = i + 1 == vq_width ? 0 : i + 1)
    if (i != vq_me->tid) vq_push(i);
}
