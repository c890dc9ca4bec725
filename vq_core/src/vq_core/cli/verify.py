"""`vq verify`: every kernel against its reference, on this device."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vq_core.kernels.verify import Verdict


class Where(StrEnum):
    """Backends; an enumeration for the command's help."""

    metal = "metal"
    cuda = "cuda"
    simulator = "simulator"


def verify(
    backend: Annotated[Where | None, typer.Option(help="Where they run; by default the device's.")] = None,
    method: Annotated[str | None, typer.Option(help="Only this method's kernels, or core.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many configurations of each kernel.")] = None,
    attention: Annotated[
        bool, typer.Option(help="The pass kernels of attention too, which take longest to compile.")
    ] = True,
    part: Annotated[
        str | None, typer.Option(help="K/N: each N-th kernel from the K-th on, for N processes side by side.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of rows on stdout.")] = False,
) -> None:
    """Run every kernel of every method and compare with its reference.

    Exit status 1 if any differs or does not run.
    """
    from vq_core.cli.methods import need_mlx, records

    first, parts = _part(part)
    need_mlx()
    records()
    from vq_core.errors import HostError
    from vq_core.kernels.backends import choose, device_backend
    from vq_core.kernels.verify import build_ahead
    from vq_core.kernels.verify import verify as run
    from vq_core.plugins.offered import offered_kernels

    chosen = backend.value if backend else device_backend()
    if chosen is None:
        raise HostError("this device has neither Metal nor CUDA: give --backend simulator to run them on the CPU")
    runner = choose(chosen)
    offered, failed = offered_kernels(method, attention=attention)
    offered = offered[first::parts]
    failed += [
        f"kernel {one.kernel.name} of {one.method} runs on {', '.join(one.kernel.backends)} only"
        for one in offered if chosen not in one.kernel.backends
    ]  # fmt: skip
    offered = [one for one in offered if chosen in one.kernel.backends]
    if chosen == "simulator":
        build_ahead([one.kernel for one in offered], limit=limit)
    verdicts: list[tuple[str, Verdict]] = []
    for one in offered:
        verdicts.append((one.version, run(one.method, one.kernel, chosen, runner, limit)))
    if as_json:
        typer.echo(json.dumps([_row(version, verdict) for version, verdict in verdicts], indent=2))
    else:
        _print(verdicts)
    for line in failed:
        typer.echo(f"not verified: {' '.join(line.split())}", err=True)
    if not all(verdict.passed for _, verdict in verdicts):
        raise typer.Exit(1)


def _part(text: str | None) -> tuple[int, int]:
    """The first kernel and the step."""
    if text is None:
        return 0, 1
    first, _, parts = text.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise typer.BadParameter(f"{text!r}: K/N with 1 <= K <= N is needed, such as 1/4", param_hint="--part")
    return int(first) - 1, int(parts)


def _row(version: str, verdict: Verdict) -> dict[str, Any]:
    from importlib.metadata import version as installed

    import attrs
    import mlx.core as mx

    row = attrs.asdict(verdict)
    # JSON has no infinity.
    row["max_difference"] = verdict.max_difference if verdict.max_difference < float("inf") else "inf"
    return row | {"package": version, "mlx": installed("mlx"), "device": _device(mx)}


def _device(mx: Any) -> str:
    found: dict[str, Any] = mx.device_info()
    return str(found.get("device_name") or found.get("architecture") or mx.default_device())


def _print(verdicts: list[tuple[str, Verdict]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("method", "kernel", "stands for", "configurations", "result", "backend"):
        right = heading == "configurations"
        # A pass kernel's name says both snippets and the shape: it is folded where the terminal is narrow.
        table.add_column(
            heading, justify="right" if right else "left", no_wrap=heading not in ("kernel", "result"), overflow="fold"
        )
    for _, verdict in verdicts:
        result = Text(_result(verdict), style="green" if verdict.passed else "red")
        cells = (verdict.method, verdict.kernel, verdict.stands_for, f"{verdict.configurations:,}")
        table.add_row(*map(Text, cells), result, verdict.backend)
    console.print(table)
    for _, verdict in verdicts:
        if not verdict.passed:
            said = verdict.error or f"{verdict.differing} differ, the first: {verdict.first}"
            console.print(Text(f"\n{verdict.method} {verdict.kernel}: {said}"), soft_wrap=True)
    wrong = sum(not verdict.passed for _, verdict in verdicts)
    console.print(f"\n{wrong} of {len(verdicts)} kernels wrong" if wrong else f"\n{len(verdicts)} kernels, all right")


def _result(verdict: Verdict) -> str:
    if verdict.error:
        return "did not run"
    if verdict.identical:
        return "identical"
    within = ", within its tolerance" if verdict.passed else ""
    return f"differs by {verdict.max_difference:.2e}{within}"
