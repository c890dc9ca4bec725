"""`vq run`: mlx-lm's own commands on compressed models."""

from __future__ import annotations

import _thread
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vq_core.cli.options import (
    FAILED,
    NOTHING_PACKED,
    SHIPPED,
    Attention,
    Fallback,
    Keys,
    Method,
    Residual,
    SinkTokens,
    Values,
    Windows,
    checked,
    model_path,
)

if TYPE_CHECKING:
    from vq_core.hosts.mlx_lm.loaded import Loaded

COMMANDS = ("benchmark", "cache_prompt", "chat", "evaluate", "generate", "server")
"""Commands of mlx-lm that make caches; the others have none to pack."""
ONE_CACHE = ("cache_prompt", "generate")
"""Commands that fill one cache, so that one with nothing packed is a failure of the whole run."""
DRAFTING = ("generate", "server")
"""Commands that take a draft model."""
MODELS = ("--model", "--draft-model")
CONTEXT = {"allow_interspersed_args": False}
"""What stands after the command belongs to the command, with ``--`` or without."""


def run(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help=f"One of {', '.join(COMMANDS)}.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", help="Options of that command, as mlx-lm names them."),
    ] = None,
    method: Method = None,
    keys: Keys = None,
    values: Values = None,
    residual: Residual = 128,
    sink_tokens: SinkTokens = 0,
    attention: Attention = "auto",
    fallback: Fallback = "error",
    windows: Windows = "auto",
) -> None:
    """Run a command of mlx-lm with packed caches: vq run --method kivi:bits=4 -- server --model PATH."""
    from vq_core.cli.methods import need_mlx
    from vq_core.errors import HostError, SettingsError, VQError

    need_mlx()
    given = [_model(before, text) for before, text in pairwise(["", *(arguments or [])])]
    if command not in COMMANDS:
        raise SettingsError(f"{command!r} is no command that vq can run; accepted are {', '.join(COMMANDS)}")
    from vq_core.hosts.mlx_lm import check_version
    from vq_core.hosts.mlx_lm.loaded import compress_loaded

    check_version()
    options = checked(
        method=method, keys=keys, values=values, residual=residual, sink_tokens=sink_tokens, attention=attention,
        fallback=fallback, windows=windows,
    )  # fmt: skip
    _look_at(command, given, options)
    try:
        module = importlib.import_module(f"mlx_lm.{command}")
    except ImportError as error:
        raise HostError(f"mlx-lm's {command} cannot be imported: {error}; install what it needs") from error
    before = sys.argv
    sys.argv = [f"mlx_lm.{command}", *given]
    try:
        named = _named(given)
        drafting = _drafts(command, given)
        with compress_loaded(refused=_stop(named) if named else None, drafting=drafting, **options) as loaded:
            failure: Exception | None = None
            ended = False
            try:
                module.main()
                ended = True
            except (VQError, EOFError, BrokenPipeError):
                raise  # an end of input is typer's to tell, and who closes a pipe has read enough
            except KeyboardInterrupt:
                if loaded.complete >= named or not loaded.errors:
                    raise
            except Exception as error:
                failure = error
            finally:
                packed = _report(loaded, max(named, 1), ended)
            if failure is not None and "support batching" in str(failure):
                raise HostError(
                    f"mlx-lm's {command} puts several requests into one batch, which packed caches cannot form yet: "
                    "have it take one at a time (a batch size of 1)"
                ) from failure
            first = loaded.errors[0][1] if loaded.errors and loaded.complete < max(named, 1) else None
            if isinstance(first, VQError):
                raise first
            if (reason := failure or first) is not None:
                raise _failed(command, reason)
    finally:
        sys.argv = before
    if command in ONE_CACHE and not packed:
        raise typer.Exit(NOTHING_PACKED)


def _model(before: str, text: str) -> str:
    """An argument; the name of the model that ships becomes its folder."""
    option, equals, value = text.partition("=")
    if before in MODELS:
        return model_path(text)
    if equals and option in MODELS and (value == SHIPPED or not value):
        return f"{option}={model_path(value)}"
    return text


def _look_at(command: str, given: list[str], options: dict[str, Any]) -> None:
    """Refuse, or name, options of mlx-lm that have no effect on packed caches; it accepts beginnings of names too."""
    from vq_core.errors import SettingsError

    for text in given:
        option = text.partition("=")[0]
        if _means(text, "--kv-bits"):
            raise SettingsError(
                f"{option} quantizes mlx-lm's own caches and has no effect on packed ones: leave it out, "
                "and choose the bits by --method"
            )
        if _means(text, "--max-kv-size"):
            _say(f"{option} has no effect: a compressed model's caches keep every token")
    if _drafts(command, given):
        _refuse_what_keeps_drafts(options)


def _refuse_what_keeps_drafts(options: dict[str, Any]) -> None:
    """One line before anything is loaded, where mlx-lm would raise after it."""
    from vq_core.cache.policy import CachePolicy
    from vq_core.errors import SettingsError
    from vq_core.plugins.registry import resolve

    policy = CachePolicy.make(**{name: value for name, value in options.items() if name != "windows"}).default
    for side in (policy.keys, policy.values):
        facts = resolve(side.label).facts
        if facts is not None and not facts.capabilities.trimmable:
            raise SettingsError(
                f"speculative decoding takes rejected tokens out of the caches, and the method {side.text} cannot "
                "drop packed tokens; leave --draft-model out, or choose another method"
            )


SHORTEST = {"--model": "--mo", "--draft-model": "--d", "--kv-bits": "--kv-b", "--max-kv-size": "--max-k"}
"""Beginnings of options that mlx-lm may take for the whole name; one command or another takes no shorter one."""


def _means(text: str, name: str) -> bool:
    """Whether an argument is an option of mlx-lm, in full or cut short."""
    option = text.partition("=")[0]
    return option.startswith(SHORTEST[name]) and name.startswith(option)


def _drafts(command: str, given: list[str]) -> bool:
    """Whether the command line names a draft model."""
    return command in DRAFTING and any(_means(text, "--draft-model") for text in given)


def _named(given: list[str]) -> int:
    """Models that the command loads by itself; a server without a model loads what its requests name."""
    found = [any(_means(text, name) for text in given) for name in MODELS]
    return sum(found) if found[0] else 0


def _stop(named: int) -> Callable[[Loaded], None]:
    """End a server one of whose own models was refused; it loads them in a thread, and would go on without."""

    def stop(loaded: Loaded) -> None:
        if threading.current_thread() is not threading.main_thread() and loaded.complete < named:
            _thread.interrupt_main()
            raise SystemExit(2)  # of the thread, without a traceback; the main thread tells the error

    return stop


def _failed(command: str, error: Exception) -> typer.Exit:
    """Say in one line what mlx-lm's command, or a model's files, raised; the exit to raise for it."""
    if os.environ.get("VQ_DEBUG") == "1":
        traceback.print_exception(error)
    else:
        line = " ".join(str(error).split())
        _say(f"mlx-lm's {command} failed: {type(error).__name__}: {line}; VQ_DEBUG=1 shows the traceback")
    return typer.Exit(FAILED)


def _report(loaded: Loaded, needed: int, ended: bool) -> bool:
    """Print what the caches made last hold; whether any model has packed a token."""
    from rich.console import Console

    from vq_core.cli.printing import print_notes, print_report
    from vq_core.errors import VQError

    console = Console(stderr=True)
    reports: list[tuple[str, Any]] = loaded.reports()
    for name, report in reports:
        console.print(f"\n{name}, the caches made last", markup=False, highlight=False, soft_wrap=True)
        print_report(console, report, [])
    print_notes(console, loaded.notes())
    for name, error in loaded.errors if loaded.complete >= needed else []:  # else the error itself is on its way
        what = "compressed" if isinstance(error, VQError) else "loaded"
        _say(f"{name} was not {what}: {' '.join(str(error).split())}")
    packed = any(report.packed for _, report in reports)
    if ended and not packed and any(r.tokens for _, report in reports for r in report.packed_layers):
        _say("no token was packed; see the notes of the report")
    return packed


def _say(line: str) -> None:
    typer.secho(f"vq: {line}", fg="red", err=True)
