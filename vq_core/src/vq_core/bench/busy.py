"""What else the machine is doing: a ratio that was measured beside other work says nothing."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import threading
import time

import attrs
import mlx.core as mx

MINUTE = 60.0
"""The first load average is the number of running threads, damped with this time in seconds."""
QUERY = ("--query-compute-apps=pid", "--format=csv,noheader")
FRESH = 2.0
"""Seconds for which a list of GPU processes is not asked for again."""


@attrs.frozen
class Machine:
    """One look at the machine.

    Attributes:
        cores: Of the machine.
        load: The load average of the last minute; ``None`` where the system has none.
        own: This process's own part of it.
        gpu_processes: Other processes on the GPU; ``None`` where nobody can tell.
        unknown: Why not.
    """

    cores: int
    load: float | None = None
    own: float = 0.0
    gpu_processes: int | None = None
    unknown: str = ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why nothing should be concluded from times that are taken now; empty where nothing speaks against it."""
        found = []
        if self.load is not None and self.load - self.own > self.cores / 2:
            mine = f", {self.own:.1f} of it this process's," if self.own >= 0.05 else ""
            found.append(f"the load average {self.load:.1f}{mine} is over half of {self.cores} cores")
        if self.gpu_processes:
            found.append(f"other processes on the GPU: {self.gpu_processes}")
        return tuple(found)


def look() -> Machine:
    """How busy the machine is now."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    others, unknown = gpu_processes()
    return Machine(os.cpu_count() or 1, load, _own.value(), others, unknown)


class OwnLoad:
    """This process's part of the load average, by the kernel's own formula on the CPU time it has used.

    Without it a long measurement on a machine of few cores would forbid itself.
    """

    def __init__(self) -> None:
        self._value, self._wall, self._used = 0.0, time.monotonic(), time.process_time()
        self._lock = threading.Lock()

    def value(self) -> float:
        """Now."""
        with self._lock:
            wall, used = time.monotonic(), time.process_time()
            passed = wall - self._wall
            if passed > 0:
                kept = math.exp(-passed / MINUTE)
                self._value = self._value * kept + (used - self._used) / passed * (1 - kept)
                self._wall, self._used = wall, used
            return self._value


_own = OwnLoad()
_listed: tuple[float, tuple[int | None, str]] | None = None


def gpu_processes() -> tuple[int | None, str]:
    """Other processes that compute on the machine's NVIDIA GPUs, or ``None`` and why that is not known."""
    global _listed
    if mx.default_device() == mx.cpu:
        return None, "the default device is no GPU"
    if _listed is None or time.monotonic() - _listed[0] > FRESH:
        _listed = (time.monotonic(), _ask())
    return _listed[1]


def _ask() -> tuple[int | None, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "no nvidia-smi here"
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=20, check=True)
        pids = [int(line) for line in done.stdout.split("\n") if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, f"nvidia-smi did not answer: {' '.join(str(error).split())}"
    return others(pids), ""


def others(pids: list[int]) -> int:
    """How many of the listed processes are not this one.

    In a container the list has the host's numbers: where this process's own is missing, one number that no process
    here has is taken for it.
    """
    if os.getpid() in pids:
        return len(pids) - 1
    strange = [pid for pid in pids if not _exists(pid)]
    return len(pids) - bool(strange)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
