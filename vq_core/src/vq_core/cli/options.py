"""Options that several commands share, and the small things that they need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED = 1
"""Exit status when mlx-lm's command failed, or output could not be written."""
NOTHING_PACKED = 3
"""Exit status when a method was asked for and no token was packed."""
SHIPPED = "demo"
"""Name of the model that ships with vq; a folder of that name is ``./demo``."""

Method = Annotated[str | None, typer.Option(help="Method of both sides, such as kivi:bits=4.")]
Keys = Annotated[str | None, typer.Option(help="Method of the keys.")]
Values = Annotated[str | None, typer.Option(help="Method of the values.")]
Residual = Annotated[int, typer.Option(help="Newest tokens that stay exact.")]
SinkTokens = Annotated[int, typer.Option(help="First tokens that stay exact.")]
Attention = Annotated[str, typer.Option(help="auto, matrix, kernel, mlx or reference.")]
Fallback = Annotated[str, typer.Option(help="When a method's attention fails its probe: error or warn.")]

Windows = Annotated[str, typer.Option(help="Layers with a sliding window: auto, packed or native.")]


def checked(
    *, method: str | None, keys: str | None, values: str | None, residual: int, sink_tokens: int, attention: str,
    fallback: str, windows: str,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of ``compress``; what is wrong with them is refused before a model is loaded."""
    from vq_core.cache.policy import CachePolicy
    from vq_core.cli.methods import records
    from vq_core.errors import SettingsError
    from vq_core.hosts.mlx_lm.prepare import check_ways

    if method is None and keys is None and values is None:
        raise SettingsError("no method: give --method kivi:bits=4, or --keys and --values; `vq list-methods` has them")
    records()
    options: dict[str, Any] = {
        "method": method, "keys": keys, "values": values, "residual": residual,
        "sink_tokens": sink_tokens, "attention": attention, "fallback": fallback,
    }  # fmt: skip
    CachePolicy.make(**options)
    check_ways(windows=windows)
    return options | {"windows": windows}


def model_path(name: str) -> str:
    """The folder of the model that ships for ``demo``, else the name itself; an empty one is refused."""
    from vq_core.demo import MODEL_PATH
    from vq_core.errors import SettingsError

    if not name.strip():
        raise SettingsError("the model's name is empty: give a folder in mlx-lm's format, a name on the hub, or 'demo'")
    return str(MODEL_PATH) if name == SHIPPED else name


def prompt_text(prompt: str | None, file: Path | None, what: str = "the prompt") -> str:
    """The prompt itself, a file's text or standard input."""
    from vq_core.errors import SettingsError

    if (prompt is None) == (file is None):
        raise SettingsError("give the prompt by either --prompt TEXT or --prompt-file FILE; '-' is standard input")
    try:
        if "-" in (prompt, str(file)):
            return sys.stdin.buffer.read().decode()
        if file is not None:
            return file.expanduser().read_bytes().decode()
        assert prompt is not None
        prompt.encode()  # an argument of other bytes than UTF-8 holds half characters
    except UnicodeError as error:
        raise SettingsError(f"{what} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise SettingsError(f"{what} cannot be read from {file}: {error.strerror or error}") from error
    return prompt
