"""`vq bench kernels`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vq_core.cli.bench.shared import tell


def kernels(
    method: Annotated[
        list[str] | None, typer.Option(help="Methods, such as kivi or kivi:bits=8; may be repeated.")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Sequence lengths; may be repeated.")] = None,
    bits: Annotated[list[int] | None, typer.Option(min=1, help="Bits of a code; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Head size.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of a comparison, at least.")] = 24,
    share: Annotated[
        list[float] | None, typer.Option(help="The operation's share of a whole step, 0 to 1; may be repeated.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the record here.")] = None,
) -> None:
    """Each method's fused kernels against the plain operations that they stand for, on the GPU."""
    from vq_core.cli.methods import need_mlx, records

    need_mlx()
    from vq_core.bench.kernels import Wanted, measure
    from vq_core.bench.saving import check_target, save

    given = {
        "methods": method, "tokens": tokens, "bits": bits, "dtype": dtype, "heads": heads, "head_dim": head_dim,
        "rounds": rounds, "shares": share,
    }  # fmt: skip
    wanted = Wanted(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items() if v})  # type: ignore[arg-type]
    if json_file is not None:
        check_target(json_file)
    records()
    with contextlib.redirect_stdout(sys.stderr):  # what plugins print must not get between the figures
        record = measure(wanted, tell=tell())
    if json_file is not None:
        save(record, json_file)
    _print(record)
    if json_file is not None:
        typer.echo(f"record: {json_file}")


def _print(record: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for method in dict.fromkeys(row["method"] for row in record["rows"]):
        table = Table(title=method, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("operation", "side"):
            table.add_column(name, overflow="fold")
        for name in (
            "tokens", "plain us (min-max)", "kernel us (min-max)", "queued: times as fast", "single: times as fast",
            "GB/s", "of copy",
        ):  # fmt: skip
            table.add_column(name, justify="right", overflow="fold")
        for row in (row for row in record["rows"] if row["method"] == method):
            table.add_row(*_cells(row))
        console.print(table)
    for line in _notes(record):
        console.print(line, markup=False, soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    arms, bandwidth = row["queued"]["comparison"]["arms"], row["bandwidth"]
    fraction = bandwidth["fraction_of_copy"]
    return [
        row["operation"], row["side"], f"{row['tokens']:,}", _time(arms["plain"]), _time(arms["kernel"]),
        _times(row["queued"]), _times(row["single"]), f"{bandwidth['bytes_per_second'] / 1e9:,.0f}",
        "no ratio" if fraction is None else f"{fraction:.2f} (noise {bandwidth['noise_floor']:.1%})",
    ]  # fmt: skip


def _time(arm: dict[str, Any]) -> str:
    return f"{arm['median'] * 1e6:,.1f} ({arm['low'] * 1e6:,.1f}-{arm['high'] * 1e6:,.1f})"


def _times(figures: dict[str, Any]) -> str:
    """The ratio with its noise floor, or that there is none."""
    if figures["times_as_fast"] is None:
        return "no ratio"
    inside = ", inside the noise" if figures["inside_noise"] else ""
    return f"{figures['times_as_fast']:.2f}{inside} (noise {figures['noise_floor']:.1%})"


def _notes(record: dict[str, Any]) -> list[str]:
    copy = record["copy"]
    lines = [
        f"{record['environment']['device_info'].get('device_name', record['environment']['device'])}, "
        f"{record['backend']}. queued: calls of one arm forced together; single: one call and waiting for it. Medians.",
        f"copy: {copy['bytes_per_second'] / 1e9:,.0f} GB/s ({copy['kernel']}); of copy: the kernel's bytes a second "
        "over those of the faster of this copy and one of as many bytes as the kernel's, queued.",
    ]
    lines += [f"no ratio: {where}: {reason}" for where, reason in _refusals(record)]
    # The last of an operation's rows is that of all its sides together.
    for row in {(row["method"], row["tokens"], row["operation"]): row for row in record["rows"]}.values():
        where = f"{row['method']}, {row['tokens']} tokens, {row['operation']} {row['side']}"
        for estimate in row["whole_step"]:
            lines.append(f"{where}, {estimate['share']:.1%} of a whole step: {_estimate(estimate)}")
    if not any(row["whole_step"] for row in record["rows"]):
        lines.append("What a whole step gains at most: give --share, the operation's share of it.")
    return lines + [f"left out: {entry['method']}: {entry['reason']}" for entry in record["left_out"]]


def _refusals(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Where there is no ratio and why, each reason once with the first place it holds for."""
    found: dict[str, str] = {}
    for row in record["rows"]:
        where = f"{row['method']}, {row['tokens']} tokens, {row['operation']} {row['side']}"
        for clock, figures in (("queued", row["queued"]), ("single", row["single"]), ("of copy", row["bandwidth"])):
            for reason in figures["refused"]:
                found.setdefault(reason, f"{where} ({clock})")
    return [(where, reason) for reason, where in found.items()]


def _estimate(estimate: dict[str, Any]) -> str:
    free = estimate["if_it_took_no_time"]
    limit = "" if free is None else f"; {free:.3f} if it took no time at all"
    if estimate["at_most"] is None:
        return f"no estimate, there is no ratio outside the noise{limit}"
    return f"at most {estimate['at_most']:.3f} times as fast end to end{limit}"
