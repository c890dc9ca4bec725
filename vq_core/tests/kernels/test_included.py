"""Kernels' texts in files: named after what they hold, mended where they hold something else, or left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vq_core.kernels import included as module
from vq_core.kernels.included import included

GIVEN = {"name": "k", "header": "float f();\n", "source": "out[0] = x_shape[0] + f() + y_ndim;\n", "shared_memory": 7}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._folder.cache_clear()
    yield
    module._folder.cache_clear()


def files(text: str) -> list[Path]:
    return [Path(found) for found in re.findall(r'#include "(.*)"', text)]


def test_the_texts_are_in_files_and_the_names_that_mlx_looks_for_stay() -> None:
    found = included(GIVEN)
    (header,), (body,) = files(found["header"]), files(found["source"])
    assert (header.read_text(), body.read_text()) == (GIVEN["header"], GIVEN["source"])
    assert found["source"].startswith("// x_shape y_ndim\n") and found["name"] == "k" and found["shared_memory"] == 7
    assert included(GIVEN) == found, "equal texts stay equal: MLX keeps what it compiled by them"


def test_other_texts_are_other_files_and_a_damaged_one_is_written_anew() -> None:
    found = included(GIVEN)
    (body,) = files(found["source"])
    assert files(included({**GIVEN, "source": "out[0] = 1;\n"})["source"]) != [body]
    body.write_text("out[0] = 2;\n")
    assert included(GIVEN) == found and body.read_text() == GIVEN["source"]
    body.write_bytes(b"\xff")
    assert included(GIVEN) == found and body.read_text() == GIVEN["source"]
    assert sorted(path.suffix for path in body.parent.iterdir()) == [".cuh"] * 3, "nothing half written stays"


@pytest.mark.parametrize("how", ["file", "quote", "line", "bytes", "link", "open"])
def test_without_a_folder_that_will_do_the_texts_stay_where_they_are(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder, one that a text cannot name, or one that others write to."""
    names = {"quote": 'a"b', "line": "a\nb", "bytes": os.fsdecode(b"\xff\xfe")}
    home = tmp_path / names.get(how, how)
    if how == "file":
        home.write_text("")
    if how == "link":
        (tmp_path / 'q"q').mkdir()
        home.symlink_to(tmp_path / 'q"q')
    if how == "open":
        (home / "vq/kernels").mkdir(parents=True)
        (home / "vq/kernels").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    module._folder.cache_clear()
    assert included(GIVEN) == GIVEN


def test_a_relative_folder_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    module._folder.cache_clear()
    (body,) = files(included(GIVEN)["source"])
    assert body.is_relative_to((tmp_path / "home/.cache/vq/kernels").resolve()) and not (tmp_path / "here").exists()


def test_what_cannot_be_written_leaves_nothing_behind() -> None:
    (body,) = files(included(GIVEN)["source"])
    body.unlink()
    body.mkdir()
    before = sorted(body.parent.iterdir())
    assert included(GIVEN) == GIVEN and sorted(body.parent.iterdir()) == before
