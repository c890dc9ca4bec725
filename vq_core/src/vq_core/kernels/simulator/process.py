"""The parent's side of the worker: one child process, one shared segment, one launch at a time."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from vq_core.kernels.simulator.errors import SimulatorError

_WORKER = Path(__file__).with_name("worker.py")
_PAGE = 1 << 20


class WorkerDied(Exception):
    """The child ended during a launch: ``reason`` is a signal's name or an exit status."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerTimeout(Exception):
    """The launch did not end in time; the child has been killed."""


class WorkerRefused(Exception):
    """The child could not load the library."""


class Worker:
    """A child process with a segment of memory that both see. Not for several threads at once: see :data:`lock`."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._descriptor, path = tempfile.mkstemp(prefix="vq-simulator-")
        os.unlink(path)  # the memory stays as long as somebody has it open
        self._process: subprocess.Popen[str] | None = None
        self.segment = self._map(_PAGE)

    def _map(self, size: int) -> mmap.mmap:
        try:
            os.ftruncate(self._descriptor, size)
            if hasattr(os, "posix_fallocate"):  # or a full disk would end this process at the first write
                os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            raise SimulatorError(
                f"{size} bytes for a launch do not fit into the folder for temporary files: {error}. Launch on smaller "
                f"arrays, or set TMPDIR to a folder with room",
                kind="memory",
            ) from None
        return mmap.mmap(self._descriptor, size)

    def reserve(self, size: int) -> mmap.mmap:
        """The segment, with at least ``size`` bytes."""
        if size > len(self.segment):
            self.segment = self._map(-(-size // _PAGE) * _PAGE)
        return self.segment

    def usable(self) -> bool:
        """False in a process that was forked off: the child belongs to its parent."""
        return self._owner == os.getpid()

    def launch(self, library: Path, symbol: str, time_limit: float) -> None:
        """Runs ``symbol`` on the segment, and returns when it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{library}\t{symbol}\t{len(self.segment)}\t{int(time_limit) + 1}\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                ready = selector.select(time_limit)
            answer = process.stdout.readline() if ready else None
        except BrokenPipeError:
            answer = ""
        except BaseException:  # an interrupt: the child is in the middle of a launch
            self.close()
            raise
        if answer is None:
            self.close()
            raise WorkerTimeout
        if not answer:
            status = process.wait()
            self.close()
            raise WorkerDied(signal.Signals(-status).name if status < 0 else f"exit status {status}")
        if answer.startswith("error"):
            raise WorkerRefused(answer.split("\t", 1)[1].strip())

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER), str(self._descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            pass_fds=(self._descriptor,),
        )

    def close(self) -> None:
        """Ends the child; the next launch starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # an order that the child did not live to read
                    assert pipe is not None
                    pipe.close()


lock = threading.Lock()
_worker: Worker | None = None


def worker() -> Worker:
    """This process's worker. Hold :data:`lock` from before the call until the results are copied."""
    global _worker
    if _worker is None or not _worker.usable():
        _worker = Worker()
    return _worker


@atexit.register
def _close() -> None:
    if _worker is not None and _worker.usable():
        _worker.close()
