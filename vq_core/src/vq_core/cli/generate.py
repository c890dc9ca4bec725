"""`vq generate`."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from vq_core.hosts.mlx_lm.generate import Run
    from vq_core.hosts.mlx_lm.report import LayerEntry

NOTHING_PACKED = 3
"""Exit status when a method was asked for and no token was packed."""


def generate(
    model: Annotated[str, typer.Argument(help="A folder in mlx-lm's format or the name of a model on the hub.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; '-' reads standard input.")],
    method: Annotated[str | None, typer.Option(help="Method of both sides, such as kivi:bits=4.")] = None,
    keys: Annotated[str | None, typer.Option(help="Method of the keys.")] = None,
    values: Annotated[str | None, typer.Option(help="Method of the values.")] = None,
    residual: Annotated[int, typer.Option(help="Newest tokens that stay exact.")] = 128,
    sink_tokens: Annotated[int, typer.Option(help="First tokens that stay exact.")] = 0,
    attention: Annotated[str, typer.Option(help="auto, mlx or reference.")] = "auto",
    fallback: Annotated[str, typer.Option(help="When a method's attention fails its probe: error or warn.")] = "error",
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many new tokens.")] = 256,
    temp: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The text and the report as JSON.")] = False,
) -> None:
    """Generate text with a packed cache, then say what it held."""
    from vq_core.cli.methods import need_mlx, records

    need_mlx()
    from vq_core.cache.policy import CachePolicy
    from vq_core.errors import SettingsError
    from vq_core.hosts.mlx_lm import check_version, compressed
    from vq_core.hosts.mlx_lm.generate import load, stream

    check_version()
    if method is None and keys is None and values is None:
        raise SettingsError("no method: give --method kivi:bits=4, or --keys and --values; `vq list-methods` has them")
    records()
    options: dict[str, Any] = {
        "method": method, "keys": keys, "values": values, "residual": residual,
        "sink_tokens": sink_tokens, "attention": attention, "fallback": fallback,
    }  # fmt: skip
    CachePolicy.make(**options)  # refuses what is wrong before the model is loaded
    text = _text(prompt)
    out = sys.stdout
    run: Run | None = None
    # What other libraries print while they load and run must not get between the pieces of text, or into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        loaded, tokenizer = load(model)
        with compressed(loaded, **options) as handle:
            for piece, latest in stream(
                loaded, tokenizer, text, handle=handle, max_tokens=max_tokens, temperature=temp, seed=seed
            ):
                run = latest
                if not as_json:
                    out.write(piece)
                    out.flush()
    assert run is not None and run.report is not None
    if as_json:
        typer.echo(json.dumps(_facts(run), indent=2))
    else:
        _print(run)
    if not run.report.packed:
        typer.secho("vq: no token was packed; see the notes of the report", fg="red", err=True)
        raise typer.Exit(NOTHING_PACKED)


def _text(prompt: str) -> str:
    """The prompt itself, or standard input."""
    from vq_core.errors import SettingsError

    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        prompt.encode()  # an argument of other bytes than UTF-8 holds half characters
    except UnicodeError as error:
        raise SettingsError(f"the prompt is not UTF-8 text: {error}") from None
    return prompt


def _facts(run: Run) -> dict[str, Any]:
    assert run.report is not None
    return {
        "text": run.text,
        "prompt_tokens": run.prompt_tokens,
        "prompt_tps": run.prompt_tps,
        "generation_tokens": run.generation_tokens,
        "generation_tps": run.generation_tps,
        "peak_memory": run.peak_memory,
        "report": run.report.as_dict(),
    }


def _print(run: Run) -> None:
    from rich.console import Console

    console = Console()
    console.print("\n")
    console.print(_layers(run))
    console.print(_totals(run))
    assert run.report is not None
    for note in run.report.notes:
        console.print(f"note: {note}", style="yellow", markup=False)


def _layers(run: Run) -> Table:
    from itertools import groupby

    from rich import box
    from rich.table import Table

    table = Table(title="layers", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("layer", "status", "packed", "exact", "bytes", "fp16/held", "method, reasons, notes"):
        right = name in ("packed", "exact", "bytes", "fp16/held")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    assert run.report is not None
    for row, alike in groupby(run.report.layers, key=_row):
        named = [entry.place for entry in alike]
        table.add_row("-".join(dict.fromkeys((named[0], named[-1]))), *row)
    return table


def _row(entry: LayerEntry) -> tuple[str, ...]:
    """A layer's columns but its number; layers in a row that are alike share one line."""
    from rich.markup import escape

    report = entry.report
    if report is None:
        return (entry.status, "", "", f"{entry.native_bytes:,}", "", escape(entry.reason))
    said = [report.keys] if report.keys == report.values else [f"keys {report.keys}", f"values {report.values}"]
    if report.approximate:
        said.append(f"{report.approximate} tokens in the window came back from codes")
    said += filter(None, (entry.reason, *report.notes))
    held = report.bytes
    exact = report.exact + report.approximate
    numbers = (f"{report.packed:,}", f"{exact:,}", f"{held.held:,}", f"{held.ratio:.2f}")
    return (entry.status, *numbers, escape("\n".join(said)))


def _totals(run: Run) -> Table:
    from rich.table import Table

    assert run.report is not None
    held = run.report.bytes
    packed, exact, approximate = run.report.tokens()
    table = Table(title="cache", title_justify="left", show_header=False)
    for name, value in (
        ("tokens packed / exact / approximate", f"{packed} / {exact} / {approximate}"),
        ("bytes: codes", f"{held.codes:,}"),
        ("bytes: scales, zeros, norms", f"{held.metadata:,}"),
        ("bytes: exact window", f"{held.window:,}"),
        ("bytes: spare capacity", f"{held.spare:,}"),
        ("bytes: held in packed layers", f"{held.held:,}"),
        ("bytes: the same in fp16", f"{held.fp16:,}"),
        ("fp16 / held", f"{held.ratio:.2f}"),
        ("bytes: layers left native", f"{run.report.native_bytes:,}"),
        ("bytes: constants of the methods, shared", f"{held.constants:,}"),
        ("prompt", f"{run.prompt_tokens} tokens, {run.prompt_tps:.1f} tok/s"),
        ("generation", f"{run.generation_tokens} tokens, {run.generation_tps:.1f} tok/s"),
        ("peak memory", f"{run.peak_memory / 2**20:.1f} MiB"),
    ):
        table.add_row(name, value)
    return table
