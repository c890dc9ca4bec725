"""The child process that runs compiled kernels, so that a kernel that crashes or never ends takes nobody with it.

Run by its path with ``python -I -S``; it needs nothing but the standard library.  It reads one launch a line, runs it
on the shared segment, and answers one line.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys

STACKS = 1024 * (32768 + 320)  # VQ_LANES * VQ_STACK of runtime/fibers.h
GUARD = 1 << 16  # below the stacks: whole pages, on every system


def guarded_stacks() -> tuple[mmap.mmap, int]:
    """Memory for the lanes' stacks and its address. A lane that overflows for ever meets a page it may not write,
    before it reaches what the parent will read."""
    memory = mmap.mmap(-1, GUARD + STACKS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(GUARD), 0):
        raise OSError("mprotect failed")
    return memory, address + GUARD


def main(descriptor: int) -> None:
    """Serves launches until the parent closes the pipe."""
    libraries: dict[str, ctypes.CDLL] = {}
    segment: mmap.mmap | None = None
    _stacks, stacks_at = guarded_stacks()
    for line in sys.stdin.buffer:
        library, symbol, size, seconds = line.decode().rstrip("\n").split("\t")
        if segment is None or len(segment) != int(size):
            segment = mmap.mmap(descriptor, int(size))
        try:
            if library not in libraries:
                libraries[library] = ctypes.CDLL(library)
            function = getattr(libraries[library], symbol)
        except (OSError, AttributeError) as error:
            answer = f"error\t{error}".replace("\n", " ")
        else:
            # The parent stops a launch at its limit; this alarm ends the process where the parent itself is gone.
            signal.alarm(int(seconds) + 30)
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            view = ctypes.c_char.from_buffer(segment)
            function(ctypes.addressof(view), stacks_at)
            del view
            signal.alarm(0)
            answer = "done"
        sys.stdout.buffer.write(f"{answer}\n".encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
