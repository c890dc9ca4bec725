"""Records of measurements in files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from vq_core.errors import SettingsError
from vq_core.files.atomic import replacing


def check_target(path: Path) -> None:
    """Raise :class:`SettingsError` if a record cannot be written there; what is there stays as it is.

    Asked before the measuring, which takes minutes.
    """
    file = path.expanduser()
    try:
        if file.is_dir():
            raise SettingsError(f"the record cannot be written: {file} is a folder; name a file in it")
        if not file.parent.is_dir():
            raise SettingsError(f"the record cannot be written: there is no folder {file.parent}; make it first")
        there = file.exists()
        with file.open("ab"):
            pass
        if not there:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
    except OSError as error:
        raise SettingsError(f"the record cannot be written to {file}: {error.strerror or error}") from error


def save(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON; the old or the new file stands whole."""
    try:
        with replacing(path.expanduser()) as file:
            file.write((json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise SettingsError(f"the record cannot be written to {path}: {error.strerror or error}") from error
