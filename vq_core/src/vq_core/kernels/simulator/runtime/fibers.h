// One lane = one fiber: a stack, and a switch that saves what the calling convention makes the callee save.
#pragma once
#include "types.h"

extern "C" __attribute__((visibility("hidden"))) void vq_switch(void** save, void* to);

#define VQ_QUOTE_(x) #x
#define VQ_QUOTE(x) VQ_QUOTE_(x)
#define VQ_SWITCH VQ_QUOTE(__USER_LABEL_PREFIX__) "vq_switch"

#if defined(__x86_64__)
asm(".text\n.p2align 4\n" VQ_SWITCH ":\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
// Where the first entry's address lies on a fresh stack, and how many words such a stack starts with (keeps 16-byte alignment).
enum { VQ_ENTRY_WORD = 6, VQ_FRESH_WORDS = 8 };
#elif defined(__aarch64__)
asm(".text\n.p2align 4\n" VQ_SWITCH ":\n"
    "sub sp,sp,#160\n"
    "stp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\n"
    "stp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\n"
    "mov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\n"
    "ldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\n"
    "add sp,sp,#160\nret\n");
enum { VQ_ENTRY_WORD = 11, VQ_FRESH_WORDS = 20 };
#else
#error "vq simulator: no context switch for this processor (x86-64 and aarch64 are known)"
#endif

enum {
  VQ_LANES = 1024,
  VQ_STACK = 32768 + 320,  // not a power of two: the tops of the stacks fall into different cache sets
};
// The lowest words of a stack hold this; a frame may step over some of them, hardly over all.
enum { VQ_CANARIES = 40 };
static const uint64_t VQ_CANARY = 0x5afe57ac5afe57acull;
