"""`vq bench`: measuring, one command, in a module of its own, for each thing that is measured."""

from __future__ import annotations

import typer

from vq_core.cli.bench import attention, decode, generate, kernels

app = typer.Typer(help="Measure on this device; nothing else may run meanwhile.", no_args_is_help=True)
app.command("kernels")(kernels.kernels)
app.command("attention")(attention.attention)
app.command("decode")(decode.decode)
app.command("generate")(generate.generate)
