"""The GPU's own clock: durations of kernels as CUPTI records them, through PyTorch's profiler.

Calls are chained: each call's queries are made from the fresh ones and the result of the call before by one marker
kernel, so that no two calls overlap.  The marker is counted, which shows whether records were lost, and left out of the
sums.  Gaps between kernels are not in them either: this clock tells what kernels cost, not what a user waits for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.kernels.kernel import Case, Kernel, Output

MARKER = "vq_bench_chain"
CALLS = 16
"""Chained calls of one profile."""
PASSES = 6
"""Profiles of each arm, in turn."""
CODES = ("attend", "custom_kernel_matrix_")
"""In the names of the kernels that read packed codes in attention; those that merge partial results are none."""
MERGING = ("merge", "combine")

Event = tuple[str, float]
"""Name and seconds of one kernel."""


def _marker_reference(fresh: mx.array, previous: mx.array, **rest: Any) -> tuple[mx.array, ...]:
    return ((fresh.astype(mx.float32) + 0 * previous.astype(mx.float32)).astype(fresh.dtype),)


def _marker_cases() -> Iterator[Case]:
    for dtype in ("float16", "bfloat16", "float32"):
        x = (mx.arange(70) - 35).astype(getattr(mx, dtype)).reshape(1, 7, 1, 10)
        yield Case((x, x + 1), {"count": x.size}, dtype)


marker = Kernel(
    name=MARKER,
    body="""
    const uint i = thread_position_in_grid.x;
    if (i < count) chained[i] = T(float(fresh[i]) + 0.0f * float(previous[i]));
    """,
    inputs={"fresh": "T", "previous": "T"},
    outputs={"chained": Output("T", lambda call: call.shapes["fresh"])},
    parameters={"T": ("float16", "bfloat16", "float32")},
    numbers=("count",),
    threads=lambda call: (128, 1, 1),
    threadgroups=lambda call: (-(-math.prod(call.shapes["fresh"]) // 128), 1, 1),
    equals=_marker_reference,
    cases=_marker_cases,
)
"""``fresh``, once ``previous`` is there."""


def unavailable() -> str:
    """Why this process has no such clock; empty where it has one."""
    if mx.default_device() == mx.cpu:
        return f"the default device is {mx.default_device()}: there are no GPU kernels to time"
    if not mx.cuda.is_available():
        return "CUPTI times NVIDIA GPUs only"
    try:
        import torch
        import torch.profiler
    except ImportError as error:
        return f"PyTorch, whose profiler reads CUPTI, cannot be imported: {error}"
    return "" if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def record_kernels(work: Callable[[], Any]) -> list[Event]:
    """Kernels that ``work`` ran; what it returns is evaluated inside."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1, device="cuda")  # CUPTI needs a context of PyTorch's
    mx.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        mx.eval(work())
        mx.synchronize()
    found = []
    for event in seen.events():
        took = event.device_time if hasattr(event, "device_time") else event.cuda_time
        if took > 0 and not event.name.startswith(("Memcpy", "Memset")):
            found.append((event.name, took * 1e-6))
    return found


@attrs.frozen
class KernelTimes:
    """Seconds of GPU time a call.

    Attributes:
        totals: Sum of all kernels, of each profile.
        codes: Sum of the kernels that read packed codes, of each profile; 0 where none is named so.
        kernels: Median seconds a call of each kernel, by its name.
        lost: Why the figures must not be used; empty where nothing was lost.
    """

    totals: Sequence[float]
    codes: Sequence[float]
    kernels: Mapping[str, float]
    lost: str = ""

    @property
    def total(self) -> float:
        """Median."""
        return statistics.median(self.totals)

    @property
    def noise(self) -> float:
        """Profiles with even numbers against those with odd ones, larger median over smaller, minus 1."""
        a, b = (statistics.median(half) for half in (self.totals[::2], self.totals[1::2] or self.totals))
        return max(a, b) / min(a, b) - 1 if min(a, b) > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        codes = statistics.median(self.codes)
        return {
            "median": self.total,
            "min": min(self.totals),
            "max": max(self.totals),
            "passes": len(self.totals),
            "noise_floor": round(self.noise, 4),
            "codes_pass": codes or None,
            "kernels": dict(sorted(self.kernels.items(), key=lambda entry: -entry[1])),
            "lost": self.lost,
        }


def kernel_times(
    arms: Mapping[str, Callable[[Any], mx.array]], chained: Callable[[Any, mx.array], Any], items: Sequence[Any], *,
    passes: int = PASSES, calls: int = CALLS, record: Callable[[Callable[[], Any]], list[Event]] | None = None,
) -> dict[str, KernelTimes]:  # fmt: skip
    """Time arms kernel by kernel, in turn.

    Args:
        arms: Each takes an item and returns one array.
        chained: An item that differs from the one given in waiting for an array.
        items: The pool.
        passes, calls: Profiles of each arm, and calls in one.
        record: Runs work and returns its kernels; for tests.
    """
    record = record or record_kernels
    found: dict[str, list[list[Event]]] = {name: [] for name in arms}
    for arm in arms.values():  # compiles, and starts the profiler once
        record(lambda arm=arm: _chain(arm, chained, items, 2, 0))  # type: ignore[misc]
    for number in range(passes):
        names = list(arms) if number % 2 == 0 else list(arms)[::-1]
        for name in names:
            start = number * calls
            found[name].append(record(lambda name=name, at=start: _chain(arms[name], chained, items, calls, at)))  # type: ignore[misc]
    return {name: summed(profiles, calls) for name, profiles in found.items()}


def _chain(
    arm: Callable[[Any], mx.array], chained: Callable[[Any, mx.array], Any], items: Sequence[Any], calls: int, at: int
) -> mx.array:
    out = arm(items[at % len(items)])
    for i in range(1, calls):
        out = arm(chained(items[(at + i) % len(items)], out))
    return out


def summed(profiles: Sequence[Iterable[Event]], calls: int) -> KernelTimes:
    """Figures of some profiles, each of so many chained calls."""
    totals, codes, lost = [], [], ""
    kernels: dict[str, list[float]] = {}
    for events in profiles:
        sums: dict[str, float] = {}
        markers = 0
        for name, seconds in events:
            if MARKER in name:
                markers += 1
            else:
                sums[name] = sums.get(name, 0.0) + seconds / calls
        if markers != calls - 1:
            lost = f"the profiler shows {markers} of the {calls - 1} kernels that chain the calls: records were lost"
        totals.append(sum(sums.values()))
        codes.append(sum(seconds for name, seconds in sums.items() if reads_codes(name)))
        for name, seconds in sums.items():
            kernels.setdefault(name, []).append(seconds)
    return KernelTimes(totals, codes, {name: statistics.median(found) for name, found in kernels.items()}, lost)


def reads_codes(kernel: str) -> bool:
    """Whether a kernel's name is that of one which reads packed codes in attention."""
    name = kernel.lower()
    return any(part in name for part in CODES) and not any(word in name for word in MERGING)
