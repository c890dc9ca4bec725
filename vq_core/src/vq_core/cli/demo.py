"""`vq demo`."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vq_core.demo.show import Arm


def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens for each cache.")] = 200,
    temp: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.7,
    scored: Annotated[int, typer.Option(min=1, help="Tokens scored for the divergence.")] = 600,
    method: Annotated[list[str] | None, typer.Option(help="Methods to show beside fp16; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> None:
    """Run the model that ships with vq: the fp16 cache beside packed ones."""
    from vq_core.cli.methods import need_mlx, records

    need_mlx()
    from vq_core.demo.show import METHODS, run_demo

    records()
    with contextlib.redirect_stdout(sys.stderr):  # what other libraries print must not get into the JSON
        arms = run_demo(
            methods=method or list(METHODS), max_tokens=max_tokens, temperature=temp, scored=scored, tell=_tell(as_json)
        )
    if as_json:
        typer.echo(json.dumps([arm.as_dict() for arm in arms], indent=2))
    else:
        _print(arms)


def _tell(quiet: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=True)
    return (lambda line: None) if quiet else (lambda line: console.print(line, style="dim", markup=False))


def _print(arms: list[Arm]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for arm in arms:
        console.rule(arm.name, align="left")
        console.print(f"...{arm.prompt_end}", style="dim", markup=False, end="", highlight=False)
        console.print(arm.text + "\n", markup=False, highlight=False)
    title = "one prompt, the same model, different caches"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cache", overflow="fold")
    for name in ("packed", "tokens", "bytes", "ratio", "KL", "same top", "perplexity"):
        table.add_column(name, justify="right", no_wrap=name != "same top", overflow="fold")
    for arm in arms:
        table.add_row(
            arm.name, f"{arm.packed:,}", f"{arm.tokens:,}", f"{arm.held:,}", f"{arm.ratio:.2f}",
            f"{arm.kl:.5f}", f"{arm.top1:.1%}", f"{arm.perplexity:.3f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "Bytes are those of every array the caches hold, spare capacity included; ratio is what the same tokens take "
        "in half precision without spare, over those. KL (nats) to the fp16 cache, same top token and perplexity are "
        f"teacher-forced over {arms[-1].scored} tokens of another text, which read packed history "
        f"({arms[-1].packed_share:.0%} of the keys they attend to).",
        style="dim",
    )
