// Runs the threadgroups of one launch, one after another, in an order drawn from the seed.
#pragma once
#include "scheduler.h"

static uint vq_common_divisor(uint a, uint b) {
  while (b) {
    const uint t = a % b;
    a = b;
    b = t;
  }
  return a;
}
static void vq_start_lane(uint i, char* stacks) {
  vq_lane& w = vq_lanes[i];
  w.tid = i;
  w.simd = i / 32;
  w.lane = i % 32;
  w.op = VQ_OP_NONE;
  w.line = 0;
  w.file = 0;
  w.trip = 0;
  w.copies = w.copy_groups = 0;
  w.in_group = {i % vq_group_size.x, i / vq_group_size.x % vq_group_size.y, i / vq_group_size.x / vq_group_size.y};
  w.in_grid = {vq_group_at.x * vq_group_size.x + w.in_group.x, vq_group_at.y * vq_group_size.y + w.in_group.y,
               vq_group_at.z * vq_group_size.z + w.in_group.z};
  w.floor = (uint64_t*)(stacks + size_t(i) * VQ_STACK);
  for (int k = 0; k < VQ_CANARIES; ++k) w.floor[k] = VQ_CANARY;
  void** top = (void**)(stacks + size_t(i + 1) * VQ_STACK) - VQ_FRESH_WORDS;
  top[VQ_ENTRY_WORD] = (void*)vq_enter;
  w.stack = top;
  if (w.lane == 0) {
    vq_simd_groups[w.simd].arrived = 0;
    vq_simd_groups[w.simd].fences = 0;
  }
  vq_queue[i] = ushort(i);
}
static void vq_start_group(char* stacks) {
  ++vq_serial;
  vq_shared_bytes = 0;
  vq_whole.arrived = vq_whole.fences = 0;
  vq_live = vq_width;
  for (uint i = 0; i < vq_width; ++i) vq_start_lane(i, stacks);
  for (uint i = vq_width - 1; vq_now->seed && i; --i) {
    const uint j = vq_random() % (i + 1);
    const ushort swapped = vq_queue[i];
    vq_queue[i] = vq_queue[j];
    vq_queue[j] = swapped;
  }
  vq_head = 1;
  vq_tail = vq_width;
  vq_me = &vq_lanes[vq_queue[0]];
  vq_now->at_lane = vq_me->tid;
}
static int vq_run(char* segment, char* stacks, void (*body)()) {
  vq_launch* l = vq_now = (vq_launch*)segment;
  vq_buffers = (vq_buffer*)(segment + sizeof(vq_launch));
  for (int i = 0; i < l->buffers; ++i) {  // offsets become addresses
    vq_buffers[i].data = segment + (int64_t)vq_buffers[i].data;
    vq_buffers[i].owner = (uint*)(segment + (int64_t)vq_buffers[i].owner);
  }
  vq_body = body;
  vq_random_state = l->seed * 0x9e3779b97f4a7c15ull + 1;
  vq_steps = 0;
  vq_group_count = {l->threadgroups[0], l->threadgroups[1], l->threadgroups[2]};
  vq_group_size = {l->threads[0], l->threads[1], l->threads[2]};
  vq_grid_size = {vq_group_count.x * vq_group_size.x, vq_group_count.y * vq_group_size.y, vq_group_count.z * vq_group_size.z};
  vq_width = vq_group_size.x * vq_group_size.y * vq_group_size.z;
  const uint n = vq_group_count.x * vq_group_count.y * vq_group_count.z, start = l->seed ? vq_random() % n : 0;
  uint stride = l->seed ? vq_random() % n | 1u : 1;
  while (vq_common_divisor(stride, n) != 1) ++stride;
  for (uint k = 0; k < n && !l->report.kind; ++k) {
    const uint t = uint((uint64_t(k) * stride + start) % n);
    vq_group_at = {t % vq_group_count.x, t / vq_group_count.x % vq_group_count.y, t / vq_group_count.x / vq_group_count.y};
    l->at_group[0] = vq_group_at.x;
    l->at_group[1] = vq_group_at.y;
    l->at_group[2] = vq_group_at.z;
    vq_start_group(stacks);
    vq_switch(&vq_main, vq_me->stack);
  }
  l->steps = vq_steps;
  return l->report.kind;
}
#define VQ_ENTRY extern "C" __attribute__((visibility("default")))
