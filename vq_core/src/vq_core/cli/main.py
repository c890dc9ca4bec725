"""The command `vq`.

A command is a function in a module of its own, registered below in one line.  Those modules import nothing
but typer at their top: MLX, mlx-lm, rich and the rest of vq are imported inside the functions, so that
`vq list-methods` answers at once and works where MLX does not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from vq_core.cli import bench, calibrate, demo, doctor, evaluate, generate, methods, run, verify
from vq_core.cli.options import FAILED
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
app.command("calibrate")(calibrate.calibrate)
app.command("verify")(verify.verify)
app.add_typer(evaluate.app, name="evaluate")


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
    """Run `vq`; an error that vq raises on purpose, or output that cannot be written, becomes one red line."""
    status: Any = 0
    try:
        app()
    except SystemExit as end:
        status = end.code
    except VQError as error:
        _complain(error)
        status = 2
    except OSError as error:
        _complain(error)
        status = FAILED
    sys.exit(status if _flushed() else FAILED)


def _flushed() -> bool:
    """Write what standard output still holds; Python would do it after us, and then complain in lines of its own."""
    if sys.stdout is None or sys.stdout.closed:
        return True
    try:
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes once more when it ends
        if not isinstance(error, BrokenPipeError):  # whoever closes a pipe has read enough
            _complain(error)
        return False
    return True


def _complain(error: Exception) -> None:
    if os.environ.get("VQ_DEBUG") == "1":
        traceback.print_exc()
        return
    from rich.console import Console

    # No markup and no wrapping: a message may hold brackets, and scripts read it line by line.
    line = " ".join(str(error).split())
    if isinstance(error, OSError):
        line = f"reading or writing failed: {line}"
    Console(stderr=True, highlight=False).print(f"vq: {line}", style="red", markup=False, soft_wrap=True)
