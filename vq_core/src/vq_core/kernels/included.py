"""A kernel's text in files that a short text includes: MLX joins and hashes the whole text at every call.

25 KB of it cost some five microseconds of each call, as much as a short kernel's launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any


def included(declared: dict[str, Any]) -> dict[str, Any]:
    """A CUDA kernel's declaration with both texts in files; as it is where none can be written.

    Files are named after what they hold, so equal texts stay equal for MLX's own cache of compiled kernels.
    """
    folder = _folder()
    if folder is None:
        return declared
    try:
        header = _written(folder, f"{declared['name']}-header", declared["header"])
        body = _written(folder, f"{declared['name']}-body", declared["source"])
    except OSError:
        return declared
    # MLX passes an array's shape only where it reads its name.
    names = sorted(set(re.findall(r"\b\w+_(?:shape|strides|ndim)\b", declared["source"])))
    source = f'// {" ".join(names)}\n#include "{body}"\n'
    return declared | {"header": f'#include "{header}"\n', "source": source}


def _written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cuh"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return path
    handle, made = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(made).replace(path)
    except BaseException:  # an interrupt too; it goes on once nothing is left behind
        Path(made).unlink(missing_ok=True)
        raise
    return path


@cache
def _folder() -> Path | None:
    """One that only this user writes to, and that a text can name; ``None``: there is none."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        # By its specification a relative path counts as none.
        folder = (Path(home) if Path(home).is_absolute() else Path.home() / ".cache").resolve() / "vq" / "kernels"
        if re.search(r'["\\\x00-\x1f\ud800-\udfff]', str(folder)):
            return None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.resolve().stat()
        own = getattr(os, "getuid", lambda: found.st_uid)() == found.st_uid and not found.st_mode & 0o022
        if folder.resolve() == folder and own:
            return folder if os.access(folder, os.W_OK) else None
    return None
