"""``python killed_saves.py FILE KILLS``: fork processes that save in a loop, kill each, look at what is left.

A program of its own, which never evaluates an array before it forks: MLX's threads do not survive a fork.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx

from vq_core.files import atomic, tensors

FORM = tensors.Format("test-file", 3)
BYTES = 4 * 2**20


def save(path: Path, number: int) -> None:
    tensors.write(path, FORM, number, {"x": mx.full((BYTES,), number % 251, mx.uint8)})


def child(path: Path, first: int, ready: int) -> None:
    """Check what the last one left, then save until killed."""
    if path.exists():
        with tensors.Reader(path, FORM) as reader:
            number, x = reader.header.description, reader.tensors()["x"]
        assert x.shape == (BYTES,) and mx.all(x == number % 251).item()
    os.write(ready, b"1")
    for number in range(first, first + 10**6):
        save(path, number)


def in_child(path: Path, first: int, delay: float | None) -> bool:
    """Whether the child got as far as saving; killed ``delay`` seconds later."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            child(path, first, writing)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os.close(writing)
    select.select([reading], [], [], 60)
    ready = os.read(reading, 1) == b"1"
    time.sleep(delay or 0)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(reading)
    return ready and os.WIFSIGNALED(status)


def main(name: str, kills: str) -> None:
    path, rng = Path(name), random.Random(7)
    found = {"kills": 0, "whole": 0, "inside": 0, "most": 0}
    for i in range(int(kills)):
        found["kills"] += in_child(path, 1 + i, rng.random() * 0.05)
        left = atomic.temporaries(path)
        found["inside"] += bool(left)
        found["most"] = max(found["most"], len(left))
    found["whole"] = in_child(path, 1, 0.0)  # each child checks what the one before it left
    found["saved"] = path.exists()
    save(path, 1)
    found["left"] = len(os.listdir(path.parent)) - 1
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
