"""Tiny models on disk, and `vq` called in this process."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from vq_core.cli.main import main

from ..host_mlx_lm.models import TEMPLATE, save


@pytest.fixture(scope="session")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cli")
    return {name: save(root / name, name) for name in ("llama", "jamba", "gpt_oss", "stablelm")} | {
        "chat": save(root / "chat", chat_template=TEMPLATE),
        "short": save(root / "short", max_position_embeddings=220),
    }


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.fixture
def vq(monkeypatch: Any, capsys: Any) -> Any:
    """``vq(*arguments, stdin=b"")``: exit status, standard output, standard error."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: Any, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vq", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run
