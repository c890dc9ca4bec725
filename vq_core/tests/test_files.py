"""Files as data: what is written comes back bit for bit, what was changed is one typed error."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from vq_core.errors import FormatError, SettingsError
from vq_core.files import atomic, jsontext, tensors

FORM = tensors.Format("test-file", 3)
PATTERNS = mx.array([0, 1, 2**15, 2**15 + 1, 0x7C01, 0x7F81, 0xFFFF, 0x3C00], mx.uint16)  # zeros of both signs, NaNs


def read(path: Path) -> tuple[Any, dict[str, mx.array]]:
    with tensors.Reader(path, FORM) as reader:
        return reader.header.description, reader.tensors()


def raw(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array.reshape(-1)).view(mx.uint8)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.vq"


@pytest.fixture
def saved(path: Path) -> Path:
    tensors.write(path, FORM, {"a": [1, None]}, {"x": mx.arange(6).reshape(2, 3), "y": mx.array([1.5, -0.0])})
    return path


# ---- contents


@pytest.mark.parametrize("name", tensors.DTYPES)
def test_every_dtype_comes_back_bit_for_bit(path: Path, name: str) -> None:
    dtype = tensors.DTYPES[name]
    bits = mx.concatenate([PATTERNS, ~PATTERNS, PATTERNS * 3, PATTERNS + 77]).view(mx.uint8)
    array = (bits > 100) if name == "BOOL" else bits.view(dtype)
    arrays = {"whole": array.reshape(2, -1), "cut": array.reshape(2, -1)[:, 1:3], "turned": array.reshape(2, -1).T}
    arrays |= {"one": array[0], "none": mx.zeros((3, 0, 2), dtype), "last": mx.zeros((0,), dtype)}
    tensors.write(path, FORM, None, arrays)
    found = read(path)[1]
    assert sorted(found) == sorted(arrays)
    for key, want in arrays.items():
        assert (found[key].shape, found[key].dtype) == (want.shape, want.dtype)
        assert raw(found[key]) == raw(want)


def test_other_programs_can_read_the_arrays(saved: Path) -> None:
    found: Any = mx.load(str(saved), format="safetensors")
    assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["y"].tolist() == [1.5, 0]


def test_the_description_comes_back(path: Path) -> None:
    about = {"text": '\ud800 \x00 \u00fc \U0001f600 \\ "', "deep": [[[{"": [-1, 2**70, 1.5, True, None]}]]]}
    tensors.write(path, FORM, about, {})
    assert read(path)[0] == about


def test_the_file_may_be_replaced_after_reading(saved: Path) -> None:
    found = read(saved)[1]
    tensors.write(saved, FORM, None, {"x": mx.zeros((2, 3))})
    saved.unlink()
    assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


# ---- what is refused


def seal(content: dict[str, Any], data: bytes = b"", size: int | None = None, **about: Any) -> bytes:
    """A file with right hashes around whatever it claims."""
    zero = "0" * 64
    whole = {"format": "test-file", "version": "3", "description": "null"} | about
    whole |= {"data_sha256": hashlib.sha256(data).hexdigest(), "header_sha256": zero}
    text = json.dumps({"__metadata__": whole, **content}).encode()
    head = struct.pack("<Q", len(text) if size is None else size) + text
    return head.replace(zero.encode(), hashlib.sha256(head).hexdigest().encode()) + data


def tensor(dtype: Any = "U8", shape: Any = (4,), begin: Any = 0, end: Any = 4, **rest: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]} | rest


def test_a_sealed_file_is_read(path: Path) -> None:
    path.write_bytes(seal({"x": tensor()}, b"abcd"))
    assert read(path)[1]["x"].tolist() == list(b"abcd")


@pytest.mark.parametrize(
    "content",
    [
        {"x": tensor(end=5)},
        {"x": tensor(begin=-4, end=0)},
        {"x": tensor(begin=1, end=5)},
        {"x": tensor(begin=4, end=0)},
        {"x": tensor(begin=0.0)},
        {"x": tensor(begin=False)},
        {"x": tensor(begin=2**70, end=2**70 + 4)},
        {"x": tensor(shape=[2**40], end=2**40)},
        {"x": tensor(shape=[2**31 - 1] * 3, end=(2**31 - 1) ** 3)},
        {"x": tensor(shape=[-4])},
        {"x": tensor(shape=[-2, -2])},
        {"x": tensor(shape=[True] * 4)},
        {"x": tensor(shape=[4.0])},
        {"x": tensor(shape="4")},
        {"x": tensor(shape=[1] * 9 + [4])},
        {"x": tensor(shape=None)},
        {"x": tensor(dtype="U9")},
        {"x": tensor(dtype=["U8"])},
        {"x": tensor(dtype="F64", shape=[0], end=0)},
        {"x": tensor(dtype="BOOL")},
        {"x": tensor(more=1)},
        {"x": {"dtype": "U8", "shape": [4]}},
        {"x": None},
        {"x": tensor(), "y": tensor()},
        {"x": tensor(), "y": tensor(begin=6, end=10)},
        {"x": tensor(shape=[3], end=3)},
        {},
    ],
)  # fmt: skip
def test_claims_about_tensors(path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before memory is taken, whatever the hashes say."""
    path.write_bytes(seal(content, b"abcd"))
    most = []
    empty = tensors.np.empty
    monkeypatch.setattr(tensors.np, "empty", lambda n, dtype: most.append(n) or empty(n, dtype))
    with pytest.raises(FormatError):
        read(path)
    assert all(n <= 4 for n in most)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b"1", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe",
        b'{"__metadata__": 1}', b'{"__metadata__": {}, "__metadata__": {}}', b'{"__metadata__": {"format": NaN}}',
        b"9" * 5000, b"1e999",
        b'{"__metadata__": {"format": "test-file"}}', b'{"__metadata__": {"format": "test-file", "version": 3}}',
        b'{"__metadata__": {"format": "test-file", "version": "3", "header_sha256": 5}}',
    ],
)  # fmt: skip
def test_headers_that_are_none(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(FormatError):
        tensors.read_header(path, FORM)


@pytest.mark.parametrize("size", (0, 1, 2**31, 2**63, 2**64 - 1))
def test_a_header_of_another_length(path: Path, size: int) -> None:
    path.write_bytes(seal({"x": tensor()}, b"abcd", size))
    with pytest.raises(FormatError):
        read(path)


def test_a_header_beyond_the_limit(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", tensors.LARGEST_HEADER + 1))
        file.truncate(2**40)  # a sparse file: the claim fits its length
    with pytest.raises(FormatError, match="at most 16,777,216 are read"):
        read(path)
    with pytest.raises(SettingsError, match="a file can hold"):
        tensors.write(path, FORM, "x" * tensors.LARGEST_HEADER, {})


def test_another_version_and_another_format(path: Path) -> None:
    path.write_bytes(seal({}, version="4"))
    with pytest.raises(FormatError, match="version '4'; this vq-core reads version 3"):
        read(path)
    path.write_bytes(seal({}, format="other"))
    with pytest.raises(FormatError, match="no file of the format test-file"):
        read(path)


def test_every_flipped_bit_and_every_cut(saved: Path) -> None:
    whole = saved.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        for content in (bytes(damaged), whole[:place], whole[:place] + b"\0" + whole[place:]):
            saved.write_bytes(content)
            with pytest.raises(FormatError):
                read(saved)
    saved.write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match="cut, or added to"):
        read(saved)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, said in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe"), ("/dev/zero", "a device")):
        with pytest.raises(FormatError, match=f"is {said}, not a regular file"):
            tensors.read_header(name, FORM)
    for name in (tmp_path / "none", "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(FormatError, match="cannot read"):
            tensors.read_header(name, FORM)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "given twice"), ("NaN", "no number"), ("-Infinity", "no number"),
        ("1e400", "out of range"), ("[" * 50_000, "nested too deeply"), ("1" * 5000, "not valid JSON"),
        ("", "not valid JSON"),
        (b"\xff", "not valid JSON"), ("{'a': 1}", "not valid JSON"), ("[1,]", "not valid JSON"),
    ],
)  # fmt: skip
def test_json_that_is_refused(text: str | bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        jsontext.parse(text, "it")


# ---- writing


def test_a_new_file_has_the_permissions_of_any_other(path: Path) -> None:
    for mask in (0o022, 0o077):
        before = os.umask(mask)
        try:
            tensors.write(path, FORM, None, {})
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_link_is_followed(saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(saved)
    tensors.write(link, FORM, "new", {})
    assert link.is_symlink() and read(saved)[0] == "new"


@pytest.mark.parametrize("path", (None, 5, b"file", ["file"]))
def test_what_is_no_path(path: Any) -> None:
    for use in (lambda: tensors.write(path, FORM, None, {}), lambda: tensors.read_header(path, FORM)):
        with pytest.raises(SettingsError, match="must be text or a Path"):
            use()


def test_the_longest_name(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    tensors.write(path, FORM, "new", {})
    (tmp_path / f".{atomic._stem(path)}{atomic.MARK}0").write_bytes(b"left")
    tensors.write(path, FORM, "newer", {})
    assert read(path)[0] == "newer" and os.listdir(tmp_path) == [path.name]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path, tmp_path / "none" / "file", tmp_path / "pipe", tmp_path / ("x" * 300), "/dev/null", "a\0b"):
        with pytest.raises(SettingsError, match="cannot write"):
            tensors.write(name, FORM, None, {})
    assert sorted(os.listdir(tmp_path)) == ["pipe"]


@pytest.mark.parametrize("name", ("write", "fsync", "replace"))
def test_a_write_that_fails(saved: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A full disk, at each of the steps: the old file is whole and nothing is left beside it."""
    before = saved.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if name == "write":
        monkeypatch.setattr(tensors, "_bytes_of", full)
    else:
        monkeypatch.setattr(atomic.os, name, full)
    with pytest.raises(SettingsError, match="No space left on device"):
        tensors.write(saved, FORM, None, {"x": mx.zeros(4)})
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_an_interrupt_leaves_nothing_behind(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(KeyboardInterrupt), atomic.replacing(saved) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_only_temporaries_of_dead_writers_are_removed(saved: Path) -> None:
    stale = saved.parent / f".{saved.name}{atomic.MARK}0123"
    other = saved.parent / f".other{atomic.MARK}0123"
    stale.write_bytes(b"left")
    other.write_bytes(b"left")
    with atomic.replacing(saved) as file:
        file.write(b"first")
        (mine,) = atomic.temporaries(saved)
        assert mine != stale
        with atomic.replacing(saved) as second:
            second.write(b"second")
            assert mine in atomic.temporaries(saved)
        assert saved.read_bytes() == b"second"
    assert saved.read_bytes() == b"first" and other.exists() and not atomic.temporaries(saved)


def test_many_writers_of_one_file(path: Path) -> None:
    """Whoever comes last wins, and what stands there is always one of them, whole."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(10):
                with atomic.replacing(path) as file:
                    file.write(bytes([number]) * 5000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = path.read_bytes()
    assert not errors and content == content[:1] * 5000 and not atomic.temporaries(path)


KILLS = 50


def test_saves_that_are_killed(path: Path) -> None:
    """A process that saves 4 MB again and again, killed 50 times: the file is always one of those saved, whole."""
    program = Path(__file__).parent / "killed_saves.py"
    done = subprocess.run(
        [sys.executable, str(program), str(path), str(KILLS)], capture_output=True, text=True, timeout=200
    )
    assert not done.returncode and not done.stderr, done.stderr
    found = json.loads(done.stdout)
    # Each killed process had checked what the one before it left; the last is checked by one more.
    assert found["kills"] == KILLS and found["whole"] and found["saved"]
    assert found["inside"] >= KILLS // 5, "too few of the kills fell inside a write for this to mean anything"
    assert found["most"] == 1 and found["left"] == 0


def test_a_name_given_twice_among_many_is_found_at_once() -> None:
    """A file of many names must not take time that grows with their square: counted in comparisons, not seconds."""
    compared = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = str.__hash__

    pairs = [(Name(f"n{i}"), 0) for i in range(2000)]
    with pytest.raises(FormatError, match="'n1999' is given twice"):
        jsontext._once([*pairs, (Name("n1999"), 1)])
    assert compared < 20_000


def test_an_empty_tensor_s_other_lengths_are_bounded() -> None:
    entry = {"dtype": "F32", "shape": [1, 0, 2**31 - 1, 2**31 - 1], "data_offsets": [0, 0]}
    with pytest.raises(FormatError, match="lengths other than 0 multiply to more than"):
        tensors._tensor("x", entry)
    assert tensors._tensor("x", entry | {"shape": [1, 0, 2**31 - 1]})[1] == (1, 0, 2**31 - 1)
