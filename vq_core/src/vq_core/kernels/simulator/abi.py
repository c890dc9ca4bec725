"""The structures that Python and the compiled kernel share: mirrors of runtime/types.h."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

MAX_THREADS = 1024  # VQ_LANES of runtime/fibers.h
_TEXT = 64


class Buffer(ctypes.Structure):
    """``vq_buffer``: offsets in the segment, size, bytes of one element."""

    _fields_ = (
        ("data", ctypes.c_int64),
        ("owner", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("granule", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class Report(ctypes.Structure):
    """``vq_report``: what went wrong, in numbers."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "op", "line", "other_op", "other_line", "buffer")),
        ("lane", ctypes.c_uint32),
        ("group", ctypes.c_uint32 * 3),
        ("other_lane", ctypes.c_uint32),
        ("other_group", ctypes.c_uint32 * 3),
        ("missing", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("index", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        *((name, ctypes.c_char * _TEXT) for name in ("file", "other_file", "name")),
    )

    def plain(self) -> Any:
        """The fields as Python values: texts as str, groups as tuples."""
        values: dict[str, Any] = {}
        for name, *_ in self._fields_:
            value = getattr(self, name)
            if isinstance(value, bytes):
                value = value.decode(errors="replace")
            values[name] = tuple(value) if isinstance(value, ctypes.Array) else value
        return SimpleNamespace(**values)


class Launch(ctypes.Structure):
    """``vq_launch``: the head of the segment."""

    _fields_ = (
        ("threadgroups", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("at_lane", ctypes.c_uint32),
        ("at_group", ctypes.c_uint32 * 3),
        ("at_line", ctypes.c_int32),
        ("buffers", ctypes.c_int32),
        ("report", Report),
    )
