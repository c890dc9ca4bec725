"""What the commands of `vq bench` share: options, targets that are checked first, and small things of printing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record here.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the figures into this .png or .svg; needs matplotlib."),
]
Methods = Annotated[list[str] | None, typer.Option("--method", help="Methods, such as kivi:bits=2; may be repeated.")]


def chosen(**given: Any) -> dict[str, Any]:
    """The options that were given, lists as tuples: what is left out has its default."""
    return {n: tuple(v) if isinstance(v, list) else v for n, v in given.items() if v is not None and v != []}


def measured(
    json_file: Path | None,
    plot: Path | None,
    measure: Callable[..., dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run a benchmark between the checks of its targets and the writing of them."""
    from vq_core.bench.plots import check_plot, draw
    from vq_core.bench.saving import check_target, save
    from vq_core.cli.methods import records

    if plot is not None:
        check_plot(plot)
    if json_file is not None:
        check_target(json_file)
    records()
    with contextlib.redirect_stdout(sys.stderr):  # what plugins print must not get between the figures
        record = measure(tell=tell())
    if json_file is not None:
        save(record, json_file)
    show(record)
    for what, file in (("record", json_file), ("figure", plot)):
        if file is not None:
            if what == "figure":
                draw(record, file)
            typer.echo(f"{what}: {file}")
    return record


def tell() -> Callable[[str], None]:
    """Shows what is done next, on standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    return lambda line: console.print(line, style="dim", markup=False, highlight=False)


def table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    """A table with columns aligned at the left and at the right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", overflow="fold")
    return made


def add(made: Table, *cells: str) -> None:
    """A row, as it is: names of arms hold brackets."""
    from rich.markup import escape

    made.add_row(*map(escape, cells))


def times(figures: dict[str, Any] | None) -> str:
    """A ratio with its noise floor, or that there is none; nothing for the base."""
    if figures is None:
        return "base"
    if figures["times_as_fast"] is None:
        return "no ratio"
    inside = ", inside the noise" if figures["inside_noise"] else ""
    return f"{figures['times_as_fast']:.2f}{inside} (noise {figures['noise_floor']:.1%})"


def show(*tables: Table) -> None:
    """Print tables."""
    from rich.console import Console

    console = Console(highlight=False)
    for one in tables:
        console.print(one)


def notes(lines: list[str]) -> None:
    """Lines below the tables, each once."""
    for line in dict.fromkeys(lines):
        typer.echo(line)


def stand_ins(arms: dict[str, Any]) -> list[str]:
    """Of which arms the constants are no model's."""
    return [f"{name}: {arm['stand_in']}" for name, arm in arms.items() if arm.get("stand_in")]


def left_out(record: dict[str, Any]) -> list[str]:
    """What was not measured and why."""
    return [f"left out: {entry['arm']}: {entry['reason']}" for entry in record["left_out"]]


def refused(where: str, comparison: dict[str, Any]) -> list[str]:
    """Why ratios are missing, a line for the arms that lack one for the same reasons."""
    found: dict[str, list[str]] = {}
    for name, arm in comparison["arms"].items():
        if arm["refused"] and name != comparison["base"]:
            found.setdefault("; ".join(arm["refused"]), []).append(name)
    return [f"no ratio: {where}, {', '.join(names)}: {reasons}" for reasons, names in found.items()]


def device(record: dict[str, Any]) -> str:
    """Where it was measured."""
    facts = record["environment"]
    return str(facts["device_info"].get("device_name", facts["device"]))
