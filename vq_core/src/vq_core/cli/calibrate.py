"""`vq calibrate`: learn a method's constants from a model and a text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vq_core.cli.options import model_path, prompt_text

if TYPE_CHECKING:
    from vq_core.calibration.artifact import Learnt


def calibrate(
    model: Annotated[str, typer.Argument(help="A folder in mlx-lm's format, a name on the hub, or demo.")],
    method: Annotated[str, typer.Option(help="The method with its settings, such as vecinfer:sub=8,centroids=256.")],
    text: Annotated[Path, typer.Option(help="A file of UTF-8 text like what the model is used on; - reads stdin.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    side: Annotated[
        list[str] | None, typer.Option(help="keys or values; by default all that the method holds.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Tokens of each layer that are kept to learn from.")] = 4096,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence that the model reads.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="At most so many rounds of what the method iterates.")] = 25,
    seed: Annotated[int, typer.Option(min=0, help="Of what is random.")] = 0,
) -> None:
    """Learn a method's constants from a model's own keys and values."""
    from vq_core.cli.methods import need_mlx, records

    need_mlx()
    from vq_core.api.facts import SIDES
    from vq_core.calibration import artifact, learn
    from vq_core.errors import SettingsError
    from vq_core.hosts.mlx_lm import identity, load_with_config, observe
    from vq_core.hosts.mlx_lm.continuation import check_target

    records()
    artifact.chosen(method)
    wrong = [name for name in side or () if name not in SIDES]
    if wrong:
        raise SettingsError(f"--side {wrong[0]!r} is not accepted; accepted are {' and '.join(SIDES)}")
    words = prompt_text(None, text, "the calibration text")
    check_target(out, "the artifact")
    with contextlib.redirect_stdout(sys.stderr):  # what other libraries print
        loaded, tokenizer, _ = load_with_config(model_path(model))
        tokens = tokenizer.encode(words)
        with _progress() as tell:
            made = learn.calibrate(
                method, lambda heard: observe(loaded, tokens, heard, context=context), tokens, out,
                model=identity(loaded), sides=side,  # type: ignore[arg-type]
                samples=samples, rounds=rounds, seed=seed, tell=tell,
            )  # fmt: skip
    _print(made, out)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Bars on standard error: tokens read, then layer sides learnt."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    units = {"reading": "reading, tokens", "learning": "learning, layer sides"}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(units[what], total=of)
            bars.update(tasks[what], completed=done, total=of)

        yield tell


def _print(made: Learnt, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from vq_core.api.settings import format_value

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    layers = sorted({place.layer for place in made.entries if place.layer is not None})
    sides = sorted({place.side for place in made.entries})
    taken = sum(a.nbytes for held in made.entries.values() for a in held.values())
    name = made.method["name"]
    for row in (
        ("file", str(out)),
        ("method", f"{name} of {made.method['distribution']} {made.method['version']}"),
        ("settings", made.settings),
        ("model", str(made.model)),
        ("learnt", f"{' and '.join(sides)} of {len(layers)} layers, {taken:,} bytes"),
        ("from", f"{made.learnt['tokens']:,} tokens, at most {made.learnt['samples']:,} of them a layer"),
        ("SHA-256", made.digest),
    ):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"use it: --method {name}:{made.settings},artifact={format_value(str(out))}", markup=False, soft_wrap=True
    )
