"""Writing a file so that its name always leads to the old content or to the new, each whole.

A temporary file beside the target is written, brought to the disk and renamed.  Its writer holds a lock on it,
which the operating system drops when the process dies, however it dies: the next writer of the same target
removes every temporary of that target that nobody holds any more.  So at most one is left by each killed writer,
and none once the target has been written again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MARK = ".vq-part-"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write, seekable, which takes the place of ``path`` when the block ends without an error.

    After an error the temporary file is gone and ``path`` is what it was.  A symbolic link is followed.

    Raises:
        OSError: the folder is missing or not writable, the disk is full, ``path`` is not a regular file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{target} is {kind(os.stat(target).st_mode)}, not a regular file")
    remove_stale(target)
    temporary, descriptor = _create(target)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            os.replace(temporary, target)
    except BaseException:  # an interrupt too; it goes on once nothing is left behind
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def temporaries(target: Path) -> list[Path]:
    """The temporary files of a target, in use or left behind."""
    return [Path(p) for p in glob.glob(glob.escape(str(target.parent / f".{_stem(target)}")) + MARK + "*")]


def _stem(target: Path) -> str:
    """The target's name, or what stands for it where nothing could be added to it."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()


def remove_stale(target: Path) -> None:
    """Remove the temporaries whose writers are gone; what cannot be opened or locked is left alone."""
    for path in temporaries(target):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def kind(mode: int) -> str:
    """What a path leads to, in words."""
    tests = {"a folder": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK, "a link": stat.S_ISLNK}
    return next((name for name, test in tests.items() if test(mode)), "a device")


def _create(target: Path) -> tuple[Path, int]:
    while True:
        path = target.parent / f".{_stem(target)}{MARK}{secrets.token_hex(8)}"
        # 0o666 and the user's mask: the permissions of any new file.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody else can lock it either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BaseException:  # an interrupt too; it goes on once the file made here is gone
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        os.close(descriptor)  # somebody took it for stale between its making and its lock


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that brings no folder to the disk
            raise
    finally:
        os.close(descriptor)
