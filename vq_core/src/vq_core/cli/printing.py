"""What `vq generate` and `vq run` print of a model's caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vq_core.hosts.mlx_lm.generate import Run
    from vq_core.hosts.mlx_lm.report import LayerEntry, ModelReport


def print_run(run: Run, saved: str | None) -> None:
    """The report of one generation, on standard output."""
    from rich.console import Console

    assert run.report is not None
    console = Console()
    console.print("\n")
    print_report(console, run.report, _rows(run))
    if run.draft is not None and run.draft.report is not None:
        console.print(f"draft model: {_method(run.draft.report)}", markup=False, highlight=False)
        print_notes(console, run.draft.report.notes)
    print_notes(console, run.notes)
    if saved is not None:
        console.print(f"saved: {saved}", markup=False, highlight=False, soft_wrap=True)


def print_report(console: Console, report: ModelReport, more: list[tuple[str, str]]) -> None:
    """Layers, totals and notes of one model's caches."""
    console.print(_layers(report))
    console.print(_totals(report, more))
    print_notes(console, report.notes)


def print_notes(console: Console, notes: Any) -> None:
    """One line each."""
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False)


def run_facts(run: Run, saved: str | None) -> dict[str, Any]:
    """One generation for JSON."""
    assert run.report is not None and run.continuation is not None
    draft = run.draft
    return {
        "text": run.text,
        "prompt_tokens": run.prompt_tokens,
        "prompt_tps": run.prompt_tps,
        "generation_tokens": run.generation_tokens,
        "generation_tps": run.generation_tps,
        "peak_memory": run.peak_memory,
        "context": run.context,
        "loaded_tokens": run.loaded,
        "held_tokens": run.continuation.count,
        "saved": saved,
        "draft": draft and {
            "num_draft_tokens": draft.num_tokens,
            "accepted": draft.accepted,
            "held": draft.held,
            "report": draft.report and draft.report.as_dict(),
        },
        "notes": run.notes,
        "report": run.report.as_dict(),
    }  # fmt: skip


def _rows(run: Run) -> list[tuple[str, str]]:
    rows = [
        ("prompt", f"{run.prompt_tokens} tokens, {run.prompt_tps:.1f} tok/s"),
        ("generation", f"{run.generation_tokens} tokens, {run.generation_tps:.1f} tok/s"),
        ("peak memory", f"{run.peak_memory / 2**20:.1f} MiB"),
    ]
    if run.loaded:
        rows.insert(0, ("loaded", f"{run.loaded} tokens"))
    if run.draft is not None:
        rows.append(("draft: accepted", f"{run.draft.accepted} of {run.generation_tokens} new tokens"))
        rows.append(("draft: bytes held", f"{run.draft.held:,}"))
    return rows


def _method(report: ModelReport) -> str:
    ours = report.packed_layers
    if not ours:
        return "no layer is packed"
    texts = dict.fromkeys(r.keys if r.keys == r.values else f"keys {r.keys}, values {r.values}" for r in ours)
    packed, exact, approximate = report.tokens()
    return f"{'; '.join(texts)}; tokens packed / exact / approximate: {packed} / {exact} / {approximate}"


def _layers(report: ModelReport) -> Table:
    from itertools import groupby

    from rich import box
    from rich.table import Table

    table = Table(title="layers", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("layer", "status", "packed", "exact", "bytes", "fp16/held", "method, reasons, notes"):
        right = name in ("packed", "exact", "bytes", "fp16/held")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row, alike in groupby(report.layers, key=_row):
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


def _totals(report: ModelReport, more: list[tuple[str, str]]) -> Table:
    from rich.table import Table

    held = report.bytes
    packed, exact, approximate = report.tokens()
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
        ("bytes: layers left native", f"{report.native_bytes:,}"),
        ("bytes: constants of the methods, shared", f"{held.constants:,}"),
        *more,
    ):
        table.add_row(name, value)
    return table
