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


def main(descriptor: int) -> None:
    """Serves launches until the parent closes the pipe."""
    libraries: dict[str, ctypes.CDLL] = {}
    segment: mmap.mmap | None = None
    stacks = mmap.mmap(-1, STACKS)
    stacks_at = ctypes.addressof(ctypes.c_char.from_buffer(stacks))
    for line in sys.stdin:
        library, symbol, size, seconds = line.rstrip("\n").split("\t")
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
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
