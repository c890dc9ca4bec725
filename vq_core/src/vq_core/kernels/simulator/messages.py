"""From the numbers of a report to a sentence that says what happened and what to do."""

from __future__ import annotations

from typing import Protocol

# In the order of vq_kind (runtime/types.h): (kind, what happened, what to do).
_SIMD_DIVERGED = (
    "All 32 lanes of a SIMD group must reach each shuffle, vote, reduction and barrier together: move it out of the "
    "condition, clamp indices instead of returning (min(i, total - 1u)), and guard only the writes with if"
)
_GROUP_DIVERGED = (
    "All threads of the threadgroup must reach each threadgroup_barrier: move it out of the condition or the loop that "
    "not all run, and guard only the reads and writes with if"
)
KINDS: tuple[tuple[str, str, str], ...] = (
    ("", "", ""),
    (
        "divergence",
        "{collective} in divergent flow: {who} calls {op} while lane {other_lane} and others of its group wait "
        "at {other_op}, {other_line}",
        "{diverged}",
    ),
    (
        "divergence",
        "{collective} in divergent flow: {who} waits at {op} for ever, because {missing} lane(s) never arrive; lane "
        "{other_lane} {other_at}",
        "{diverged}",
    ),
    (
        "divergence",
        "{collective} in divergent flow: {who} meets lane {other_lane} at {op} in another round of a loop, or through "
        "another call of a helper",
        "A continue, a break or an if that only some lanes take lets lanes of different rounds meet: {diverged_then}",
    ),
    (
        "not_uniform",
        "{who} calls {op} with {index} while lane {other_lane} calls it with {limit}",
        "The mask, delta, lane or flag of {op} is the same for all lanes; where each lane picks its own partner, use "
        "simd_shuffle",
    ),
    ("no_such_lane", "{who} asks {op} for lane, mask or delta {index}", "A SIMD group has lanes 0 to 31"),
    (
        "read_outside",
        "{who} reads {memory} {name}[{index}], which has {limit} elements{wrapped}",
        "Missing bound check: clamp the index, {name}[min(i, total - 1u)], or guard the read with if (i < total)",
    ),
    (
        "write_outside",
        "{who} writes {memory} {name}[{index}], which has {limit} elements{wrapped}",
        "Missing bound check: guard the write with if (i < total); the last threadgroup has threads to spare",
    ),
    (
        "stale_output",
        "{who} reads output {name}[{index}] before this thread has written it",
        "An output starts with whatever lay in its memory, not with zeros: keep the running value in a variable and "
        "write it once",
    ),
    (
        "written_twice",
        "{who} writes output {name}[{index}], which {other} has written",
        "Each element of an output has one writer: guard the write (if (lane == 0u)) or correct the index",
    ),
    (
        "read_others",
        "{who} reads output {name}[{index}], which {other} has written",
        "Threads see each other's outputs in no order: exchange the value by a shuffle or threadgroup memory",
    ),
    (
        "misaligned",
        "{who} touches {memory} {name} through a vq_view at an index that is not a multiple of the vector's "
        "size (element {index} of that size, rounded down)",
        "A vector of n elements starts at a multiple of n: vq_view<float4>(p + 4u * i)[0]",
    ),
    (
        "shared_outside",
        "{who} touches threadgroup memory {name}[{index}], which has {limit} elements{wrapped}",
        "Declare more in VQ_SHARED({name}) or guard the access with if",
    ),
    (
        "shared_unwritten",
        "{who} reads threadgroup memory {name}[{index}], which no thread of this threadgroup has written",
        "Threadgroup memory starts undefined: write every element that is read, then threadgroup_barrier, then read; "
        "if another lane writes it, a barrier is missing between the two",
    ),
    (
        "race",
        "{who} races: touches threadgroup memory {name}[{index}], which lane {other_lane} has read at {other_line}",
        "{race}",
    ),
    (
        "race",
        "{who} races: touches threadgroup memory {name}[{index}], which lane {other_lane} has written at {other_line}",
        "{race}",
    ),
    (
        "shared_size",
        "{who} declares {index} bytes of threadgroup memory up to {name}",
        "{limit} bytes are what every device has: declare less, or hold half instead of float",
    ),
    (
        "local_outside",
        "{who} indexes the private array or table {name}[{index}], which has {limit} elements{wrapped}",
        "Declare more in VQ_LOCAL or VQ_CONSTANT, or correct the index",
    ),
    (
        "stack_full",
        "{who} has used up its stack of 32 KiB",
        "Recursion is not in the dialect, and private arrays are kept in registers on a GPU: make them small",
    ),
    (
        "shape_outside",
        "{who} reads {name}[{index}], but the array has {limit} dimension(s){wrapped}",
        "Give the array the dimensions that the body expects, or read {name} below its _ndim",
    ),
    (
        "copy_unfinished",
        "{who} touches threadgroup memory {name}[{index}], into which lane {other_lane} has started a copy at "
        "{other_line} that it has not waited for",
        "vq_copy_commit closes a group of copies and vq_copy_wait<N> lets at most the newest N groups be under way; "
        "then a barrier, and then the copied bytes are there",
    ),
    (
        "copies_many",
        "{who} has more than {limit} copies into {name} under way",
        "Wait for older groups with vq_copy_wait before more are started",
    ),
)
_RACE = (
    "No barrier lies between the two accesses (or it is in a condition, or lacks mem_threadgroup): put "
    "threadgroup_barrier(mem_flags::mem_threadgroup) between them, or simdgroup_barrier within one SIMD group; a "
    "shuffle is no fence"
)
_OPS = (
    "nothing", "simd_shuffle", "simd_shuffle_xor", "simd_shuffle_up", "simd_shuffle_down", "simd_broadcast", "simd_sum",
    "simd_min", "simd_max", "simd_prefix_inclusive_sum", "simd_prefix_exclusive_sum", "simd_ballot", "simd_any",
    "simd_all", "vq_mma_m16n8k16", "vq_transpose_8x8", "simdgroup_barrier", "threadgroup_barrier", "its end",
)  # fmt: skip
_RETURNED = len(_OPS) - 1


class Report(Protocol):
    """What a message is made of: the fields of ``vq_report``."""

    kind: int
    op: int
    line: int
    other_op: int
    other_line: int
    buffer: int
    lane: int
    group: tuple[int, int, int]
    other_lane: int
    other_group: tuple[int, int, int]
    missing: int
    index: int
    limit: int
    file: str
    other_file: str
    name: str


def place(file: str, line: int) -> str:
    """``line 12`` or ``header line 3``."""
    return f"header line {line}" if file.endswith(" header") else f"line {line}"


def sentence(report: Report, buffer: str, memory: str) -> tuple[str, str]:
    """Kind and text (what happened, then what to do) of a report. ``buffer`` names the array it points to."""
    kind, happened, todo = KINDS[report.kind]
    op = _OPS[report.op]
    barrier = "barrier" in op or "barrier" in _OPS[report.other_op]
    fields = {
        "op": op,
        "other_op": _OPS[report.other_op],
        "other_line": place(report.other_file, report.other_line),
        "other_lane": report.other_lane,
        "other_at": _whereabouts(report),
        "other": f"lane {report.other_lane} of threadgroup {report.other_group}",
        "missing": report.missing,
        "index": report.index,
        "limit": report.limit,
        "name": buffer or report.name,
        "memory": memory,
        "collective": "barrier" if barrier else "shuffle (or vote, or reduction)",
        "who": f"lane {report.lane} of threadgroup {report.group}",
        "diverged_then": "reach each barrier in each round, and guard only the reads and writes with if"
        if barrier
        else "reach each shuffle in each round, and guard only what is done with its result",
        "diverged": _GROUP_DIVERGED if barrier else _SIMD_DIVERGED,
        "race": _RACE,
        # A uint that went below zero is a number just below 2^32.
        "wrapped": " (an unsigned index that went below zero?)" if 2**31 <= report.index < 2**32 else "",
    }
    return kind, f"{happened.format(**fields)}. {todo.format(**fields)}."


def _whereabouts(report: Report) -> str:
    if report.other_op == _RETURNED:
        return "has returned"
    if report.other_op == 0:
        return "has not come to any of them"
    return f"waits at {_OPS[report.other_op]}, {place(report.other_file, report.other_line)}"
