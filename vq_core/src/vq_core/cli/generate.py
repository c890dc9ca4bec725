"""`vq generate`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vq_core.cli.options import (
    NOTHING_PACKED,
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
    prompt_text,
)

DRAFT_TOKENS = 3
"""Proposed at a time, where nothing else is said."""

if TYPE_CHECKING:
    from vq_core.hosts.mlx_lm.chat import Chat
    from vq_core.hosts.mlx_lm.draft import Draft
    from vq_core.hosts.mlx_lm.generate import Run


def generate(
    model: Annotated[
        str, typer.Argument(help="A folder in mlx-lm's format, a name on the hub, or 'demo': the model that ships.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to continue; '-' reads standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file of UTF-8 text instead of --prompt.")
    ] = None,
    method: Method = None,
    keys: Keys = None,
    values: Values = None,
    residual: Residual = 128,
    sink_tokens: SinkTokens = 0,
    attention: Attention = "auto",
    fallback: Fallback = "error",
    windows: Windows = "auto",
    max_tokens: Annotated[
        int, typer.Option(min=0, help="At most so many new tokens; 0 with --save-cache only reads the prompt.")
    ] = 256,
    temp: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the sampling.")] = 0,
    save_cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the cache there when generation has ended.")
    ] = None,
    load_cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on from a saved cache: the prompt follows what it holds.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A small model of the same vocabulary that proposes tokens.")
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that it proposes at a time.", show_default=str(DRAFT_TOKENS))
    ] = None,
    draft_method: Annotated[
        str | None, typer.Option(help="Method of the draft's cache; by default the same as the model's.")
    ] = None,
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="The prompt as it is, without the model's chat template.")
    ] = False,
    system_prompt: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    chat_template_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Arguments of the chat template, such as enable_thinking.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The text and the report as JSON.")] = False,
) -> None:
    """Generate text with a packed cache, then say what it held."""
    from vq_core.cli.methods import need_mlx

    need_mlx()
    from vq_core.errors import SettingsError
    from vq_core.hosts.mlx_lm import check_version, compressed
    from vq_core.hosts.mlx_lm.continuation import check_source, check_target, resume
    from vq_core.hosts.mlx_lm.generate import load_with_config, stream

    check_version()
    options = checked(
        method=method, keys=keys, values=values, residual=residual, sink_tokens=sink_tokens, attention=attention,
        fallback=fallback, windows=windows,
    )  # fmt: skip
    path, draft_path = model_path(model), None if draft_model is None else model_path(draft_model)
    of_draft = _draft_options(options, draft_model, draft_method, num_draft_tokens)
    chat = _chat(ignore_chat_template, system_prompt, chat_template_config)
    text = prompt_text(prompt, prompt_file)
    if max_tokens == 0 and save_cache is None:
        raise SettingsError("--max-tokens 0 only reads the prompt: give --save-cache FILE, or 1 token or more")
    if load_cache is not None:
        check_source(load_cache)
    if save_cache is not None:
        check_target(save_cache)
    out = sys.stdout
    run: Run | None = None
    # What other libraries print while they load and run must not get between the pieces of text, or into the JSON.
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        loaded, tokenizer, config = load_with_config(path)
        handle = stack.enter_context(compressed(loaded, **options))
        after = None if load_cache is None else resume(load_cache, handle)
        draft = None if draft_path is None else _draft(stack, draft_path, num_draft_tokens or DRAFT_TOKENS, of_draft)
        for piece, latest in stream(
            loaded, tokenizer, text, handle=handle, max_tokens=max_tokens, temperature=temp, seed=seed,
            chat=chat, after=after, draft=draft, config=config,
        ):  # fmt: skip
            run = latest
            if not as_json:
                out.write(piece)
                out.flush()
        assert run is not None and run.continuation is not None
        if save_cache is not None:
            run.continuation.model = model
            run.continuation.save(save_cache, handle)
    _show(run, None if save_cache is None else str(save_cache), as_json)


def _show(run: Run, saved: str | None, as_json: bool) -> None:
    from vq_core.cli.printing import print_run, run_facts

    assert run.report is not None
    if as_json:
        typer.echo(json.dumps(run_facts(run, saved), indent=2))
    else:
        print_run(run, saved)
    if not run.report.packed:
        typer.secho("vq: no token was packed; see the notes of the report", fg="red", err=True)
        raise typer.Exit(NOTHING_PACKED)


def _draft_options(
    options: dict[str, Any], model: str | None, method: str | None, num_tokens: int | None
) -> dict[str, Any]:
    from vq_core.cache.policy import CachePolicy
    from vq_core.errors import SettingsError

    for option, value in (("--draft-method", method), ("--num-draft-tokens", num_tokens)):
        if model is None and value is not None:
            raise SettingsError(f"{option} is for --draft-model MODEL, which is not given")
    if method is None:
        return options
    changed = options | {"method": method, "keys": None, "values": None}
    CachePolicy.make(**{name: value for name, value in changed.items() if name != "windows"})
    return changed


def _draft(stack: contextlib.ExitStack, path: str, num_tokens: int, options: dict[str, Any]) -> Draft:
    from vq_core.hosts.mlx_lm import compressed
    from vq_core.hosts.mlx_lm.draft import Draft
    from vq_core.hosts.mlx_lm.generate import load_with_config

    loaded, tokenizer, config = load_with_config(path)
    handle = stack.enter_context(compressed(loaded, **options))
    return Draft(loaded, tokenizer, handle, num_tokens, config)


def _chat(ignore: bool, system: str | None, config: str | None) -> Chat | None:
    from vq_core.errors import FormatError, SettingsError
    from vq_core.files.jsontext import parse, shown
    from vq_core.hosts.mlx_lm.chat import Chat, check_arguments

    if ignore:
        if system is not None or config is not None:
            raise SettingsError("--ignore-chat-template leaves no place for --system-prompt or --chat-template-config")
        return None
    try:
        found = {} if config is None else parse(config, "--chat-template-config")
    except FormatError as error:
        raise SettingsError(f'{error}; give an object such as {{"enable_thinking": false}}') from None
    if not isinstance(found, dict):
        raise SettingsError(f"--chat-template-config must be a JSON object, got {shown(found)}")
    check_arguments(found, "--chat-template-config")
    return Chat(system, found)
