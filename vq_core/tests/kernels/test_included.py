"""Kernels' texts in files: named after what they hold, mended where they hold something else, or left out."""

from __future__ import annotations

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


def test_without_a_folder_the_texts_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / 'a"b'):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        module._folder.cache_clear()
        assert included(GIVEN) == GIVEN
