"""Safetensors files of ours: JSON that describes, tensors that hold, a hash of every byte.

The file is a valid safetensors file.  Its ``__metadata__`` has the format's name and version, our description as
JSON text, the hash of the tensors' bytes and the hash of the header (with that hash's own digits as zeros).
Nothing that the file claims is believed: a tensor is made after its place, size and dtype were checked against
the length of the file, so that memory is bounded by that length.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import attrs
import mlx.core as mx
import numpy as np

from vq_core.errors import FormatError, SettingsError
from vq_core.files import jsontext
from vq_core.files.atomic import kind, replacing
from vq_core.files.jsontext import shown

LARGEST_HEADER = 16 * 2**20
DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "F16": mx.float16,
    "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = {1: (mx.uint8, np.uint8), 2: (mx.uint16, np.uint16), 4: (mx.uint32, np.uint32), 8: (mx.uint64, np.uint64)}
"""By size, what any dtype can be seen as; not as bytes, of which 2 GiB would be more than MLX can count."""
_ZERO = "0" * 64
_MOST = 2**40
"""Numbers that a shape may count, an empty one's other lengths too: beyond it numpy and MLX fail in their own ways."""
_PIECE = 2**24


@attrs.frozen
class Format:
    """A kind of file.

    Attributes:
        name: Stored in each file.
        version: The one that is written and read.
    """

    name: str
    version: int


@attrs.frozen(eq=False)
class Header:
    """A checked header.

    Attributes:
        description: What the writer described, any JSON.
        tensors: By name: dtype by safetensors name, shape, first byte.
        data_sha256: Hash of the tensors' bytes, checked when they are read.
        start: Where in the file they begin.
        length: Their bytes.
    """

    description: Any
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]
    data_sha256: str
    start: int
    length: int


# ---- writing


def write(path: str | os.PathLike[str], form: Format, description: Any, tensors: Mapping[str, mx.array]) -> None:
    """Write a file; ``path`` has the old content or the new at every moment.

    Raises:
        SettingsError: a path that cannot be written, a disk that is full, a dtype or a description that no file
            can hold.  ``path`` is as it was.
    """
    name, table, offset = _named(path), {}, 0
    for key, array in tensors.items():
        if array.dtype not in _NAMES:
            raise SettingsError(f"{key} is {array.dtype}; a file can hold {', '.join(map(str, _NAMES))}")
        end = offset + array.nbytes
        table[key] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    try:
        about = {"format": form.name, "version": str(form.version), "description": jsontext.dump(description)}
        about |= {"data_sha256": _ZERO, "header_sha256": _ZERO}
        size = len(_header(table, about))
        if size > LARGEST_HEADER:
            raise SettingsError(f"the description takes {size:,} bytes; a file can hold {LARGEST_HEADER:,}")
        with replacing(name) as file:
            file.write(bytes(size))
            digest = hashlib.sha256()
            for array in tensors.values():
                data = _bytes_of(array)
                digest.update(data)
                file.write(data)
            about["data_sha256"] = digest.hexdigest()
            about["header_sha256"] = hashlib.sha256(_header(table, about)).hexdigest()
            file.seek(0)
            file.write(_header(table, about))
    except SettingsError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise SettingsError(f"cannot write {shown(name)}: {getattr(error, 'strerror', None) or error}") from error


def _named(path: Any) -> str:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise SettingsError(f"the path must be text or a Path, got {shown(path)}")
    return os.fspath(path)


def _header(table: Mapping[str, Any], about: Mapping[str, str]) -> bytes:
    text = jsontext.dump({"__metadata__": about, **table}).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(array: mx.array) -> memoryview:
    """All bytes of an array in order, without a copy where it lies in order."""
    if not array.size:
        return memoryview(b"")
    plain = mx.contiguous(array).view(_PLAIN[array.dtype.size][0])
    return memoryview(plain).cast("B")  # type: ignore[arg-type]


# ---- reading


def read_header(path: str | os.PathLike[str], form: Format) -> Header:
    """Read and check the description; the tensors' bytes are not looked at.

    Raises:
        FormatError: anything that is not a whole file of this format and version.
    """
    with _open(path) as file:
        return _read_header(file, form)


class Reader:
    """A file of ours, opened once: what is checked and what is read are the same file, whatever its name leads to.

    Args:
        path: The file.
        form: The format that it must have.

    Raises:
        FormatError: anything that is not a whole file of this format and version.
    """

    def __init__(self, path: str | os.PathLike[str], form: Format):
        self._file = _open(path)
        try:
            self.header = _read_header(self._file, form)
        except BaseException:  # an interrupt too; it goes on once the file is closed, which nobody else could do
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def tensors(self) -> dict[str, mx.array]:
        """All tensors, evaluated.

        Raises:
            FormatError: bytes that are not those that were written.
        """
        header, digest = self.header, hashlib.sha256()
        found = {}
        self._file.seek(header.start)
        for name, (dtype, shape, _) in header.tensors.items():
            data = np.empty(math.prod(shape) * DTYPES[dtype].size, np.uint8)
            view = memoryview(data)  # type: ignore[arg-type]
            done = 0
            while done < len(view):
                got = self._file.readinto(view[done : done + _PIECE])  # type: ignore[attr-defined]
                if not got:
                    raise FormatError("the file became shorter while it was read")
                digest.update(view[done : done + got])
                done += got
            if dtype == "BOOL" and data.size and data.max() > 1:
                raise FormatError(f"tensor {shown(name)} has bytes that are neither true nor false")
            if data.size:
                plain = data.view(_PLAIN[DTYPES[dtype].size][1]).reshape(shape)
                found[name] = mx.array(plain).view(DTYPES[dtype])
            else:
                found[name] = mx.zeros(shape, DTYPES[dtype])
            mx.eval(found[name])
        if digest.hexdigest() != header.data_sha256:
            raise FormatError("the tensors' bytes are not those that were saved: the file is damaged")
        return found


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    name, descriptor = _named(path), None
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISREG(mode):
            # Without blocking, and asked again: a pipe may have taken the file's place since.
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise FormatError(f"cannot read {shown(name)}: {getattr(error, 'strerror', error)}") from None
    if descriptor is not None and stat.S_ISREG(mode):
        return open(descriptor, "rb", buffering=0)
    if descriptor is not None:
        os.close(descriptor)
    raise FormatError(f"{shown(name)} is {kind(mode)}, not a regular file")


def _read(file: BinaryIO, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        piece = file.read(min(n - len(data), _PIECE))
        if not piece:
            break
        data += piece
    return bytes(data)


def _read_header(file: BinaryIO, form: Format) -> Header:
    total = os.fstat(file.fileno()).st_size
    if total < 8:
        raise FormatError(f"the file has {total} bytes: it is empty or cut, not a saved cache")
    (size,) = struct.unpack("<Q", _read(file, 8))
    if size > total - 8:
        raise FormatError(f"the header claims {size:,} bytes, the file has {total:,}: cut, or no safetensors file")
    if size > LARGEST_HEADER:
        raise FormatError(f"the header claims {size:,} bytes; at most {LARGEST_HEADER:,} are read")
    raw = _read(file, size)
    content = jsontext.parse(raw, "the file's header")
    about = content.get("__metadata__") if isinstance(content, dict) else None
    if not isinstance(about, dict) or about.get("format") != form.name:
        raise FormatError(_stranger(about, form))
    if about.get("version") != str(form.version):
        raise FormatError(
            f"a {form.name} file of version {shown(about.get('version'))}; this vq-core reads version {form.version}"
        )
    keys = ("format", "version", "description", "data_sha256", "header_sha256")
    about = jsontext.record(about, "the file's metadata", *keys)
    digest = about["header_sha256"]
    if not isinstance(digest, str) or len(digest) != 64 or raw.count(digest.encode("utf-8", "replace")) != 1:
        raise FormatError("the header's hash is no hash: the file is damaged")
    before, after = raw.split(digest.encode())
    whole = struct.pack("<Q", size) + before + _ZERO.encode() + after
    if hashlib.sha256(whole).hexdigest() != digest:
        raise FormatError("the header is not the one that was saved: the file is damaged")
    start = 8 + size
    tensors = {name: _tensor(name, content[name]) for name in content if name != "__metadata__"}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1][2], math.prod(item[1][1]) > 0)))
    end = 0
    for name, (dtype, shape, begin) in tensors.items():
        if begin != end:
            raise FormatError(f"tensor {shown(name)} begins at byte {begin}, the one before ends at {end}")
        end += math.prod(shape) * DTYPES[dtype].size
    if start + end != total:
        raise FormatError(f"the file has {total:,} bytes, its header describes {start + end:,}: cut, or added to")
    description = jsontext.parse(jsontext.text(about["description"], "the description", LARGEST_HEADER), "description")
    return Header(description, tensors, jsontext.text(about["data_sha256"], "the hash", 64), start, end)


def _stranger(about: Any, form: Format) -> str:
    if isinstance(about, dict) and any(isinstance(k, str) and k[:2] in ("0.", "1.", "2.") for k in about):
        return "this file is of mlx-lm's own format: read it with mlx_lm.models.cache.load_prompt_cache"
    return f"this is no file of the format {form.name}"


def _tensor(name: str, value: Any) -> tuple[str, tuple[int, ...], int]:
    what = f"tensor {shown(name)}"
    entry = jsontext.record(value, what, "dtype", "shape", "data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise FormatError(f"{what} has dtype {shown(entry['dtype'])}; known are {', '.join(DTYPES)}")
    shape = tuple(jsontext.wholes(entry["shape"], f"the shape of {what}"))
    if len(shape) > 8:
        raise FormatError(f"{what} has {len(shape)} axes; at most 8 are read")
    if math.prod(n for n in shape if n) > _MOST:
        raise FormatError(f"{what} has the shape {shape}: its lengths other than 0 multiply to more than {_MOST}")
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise FormatError(f"the place of {what} must be two numbers")
    begin, end = (jsontext.whole(n, f"the place of {what}", high=2**62) for n in offsets)
    if end - begin != math.prod(shape) * DTYPES[entry["dtype"]].size:
        raise FormatError(f"{what} takes {end - begin:,} bytes; its shape {shape} asks for another number")
    return entry["dtype"], shape, begin
