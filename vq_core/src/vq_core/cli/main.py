"""The command `vq`.

A command is a function in a module of its own, registered below in one line.  Those modules import nothing
but typer at their top: MLX, mlx-lm, rich and the rest of vq are imported inside the functions, so that
`vq list-methods` answers at once and works where MLX does not.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from vq_core.cli import bench, demo, doctor, generate, methods, run, verify
from vq_core.errors import VQError

app = typer.Typer(
    name="vq",
    help="KV-cache compression for MLX and mlx-lm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list-methods")(methods.list_methods)
app.command("info")(methods.info)
app.command("doctor")(doctor.doctor)
app.command("generate")(generate.generate)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")
app.command("verify")(verify.verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        import vq_core

        typer.echo(f"vq-core {vq_core.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """KV-cache compression for MLX and mlx-lm."""


def main() -> None:
    """Run `vq`; an error that vq raises on purpose becomes one red line and exit status 2."""
    try:
        app()
    except VQError as error:
        _complain(error)
        sys.exit(2)


def _complain(error: VQError) -> None:
    if os.environ.get("VQ_DEBUG") == "1":
        traceback.print_exc()
        return
    from rich.console import Console

    # No markup and no wrapping: a message may hold brackets, and scripts read it line by line.
    line = " ".join(str(error).split())
    Console(stderr=True, highlight=False).print(f"vq: {line}", style="red", markup=False, soft_wrap=True)
