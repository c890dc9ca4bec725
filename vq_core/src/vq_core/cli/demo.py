"""`vq demo`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vq_core.demo.show import Arm


def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens for each cache.")] = 200,
    scored: Annotated[int, typer.Option(min=1, help="Tokens scored for the divergence.")] = 600,
    method: Annotated[list[str] | None, typer.Option(help="Methods to show beside fp16; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> None:
    """Run the model that ships with vq: the fp16 cache beside packed ones."""
    from vq_core.cli.methods import records
    from vq_core.demo.show import METHODS, run_demo

    records()
    arms = run_demo(methods=method or list(METHODS), max_tokens=max_tokens, scored=scored, tell=_tell(as_json))
    if as_json:
        typer.echo(json.dumps([arm.as_dict() for arm in arms], indent=2))
    else:
        _print(arms)


def _tell(quiet: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=True)
    return (lambda line: None) if quiet else (lambda line: console.print(line, style="dim", markup=False))


def _print(arms: list[Arm]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for arm in arms:
        console.rule(arm.name, align="left")
        console.print(f"...{arm.prompt_end}", style="dim", markup=False, end="", highlight=False)
        console.print(arm.text + "\n", markup=False, highlight=False)
    table = Table(title="one prompt, the same model, different caches", title_justify="left")
    for name in (
        "cache",
        "tokens packed / all",
        "bytes held",
        "fp16 / held",
        "KL to fp16",
        "same top token",
        "perplexity",
    ):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for arm in arms:
        table.add_row(
            arm.name, f"{arm.packed} / {arm.tokens}", f"{arm.held:,}", f"{arm.ratio:.2f}",
            f"{arm.kl:.5f}", f"{arm.top1:.1%}", f"{arm.perplexity:.3f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "Bytes are those of every array the caches hold, spare capacity included. KL (nats), same top token and "
        f"perplexity are teacher-forced over {arms[-1].scored} tokens, each of which reads packed history "
        f"({arms[-1].packed_share:.0%} of the keys it attends to).",
        style="dim",
    )
