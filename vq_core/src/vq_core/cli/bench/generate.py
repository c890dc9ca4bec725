"""`vq bench generate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vq_core.cli.bench.shared import (
    Json,
    Methods,
    Plot,
    add,
    chosen,
    device,
    left_out,
    measured,
    notes,
    refused,
    table,
    times,
)
from vq_core.cli.bench.shared import show as shown
from vq_core.cli.options import FAILED, model_path, prompt_text


def generate(
    model: Annotated[
        str, typer.Argument(help="A folder in mlx-lm's format, a name on the hub, or 'demo': the model that ships.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to continue; by default the demonstration's.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file of UTF-8 text instead of --prompt.")
    ] = None,
    method: Methods = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens of a generation.")] = 128,
    residual: Annotated[int, typer.Option(help="Newest tokens that stay exact.")] = 128,
    rounds: Annotated[int, typer.Option(help="Turns; each arm runs twice in each.")] = 3,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Whole generations on a real model: mlx-lm's caches and ours, with the texts compared."""
    from vq_core.cli.methods import need_mlx

    need_mlx()
    from vq_core.bench.generate import Wanted, measure
    from vq_core.demo import prompt_text as shipped

    path = model_path(model)
    text = shipped() if prompt is None and prompt_file is None else prompt_text(prompt, prompt_file)
    wanted = Wanted(**chosen(methods=method, max_tokens=max_tokens, residual=residual, rounds=rounds))
    record = measured(json_file, plot, partial(measure, path, text, wanted, name=model), _print)
    if not record["agree"]:
        typer.secho("vq: texts that must agree differ", fg="red", err=True)
        raise typer.Exit(FAILED)


def _print(record: dict[str, Any]) -> None:
    made = table(
        f"{record['model']}: {record['prompt_tokens']:,} tokens read, {record['max_tokens']:,} new", ("cache",),
        ("prefill tok/s (min-max)", "times", "decode tok/s (min-max)", "times", "peak MiB", "held MiB", "KV ratio",
         "without window", "same as plain"),
    )  # fmt: skip
    for name, arm in record["arms"].items():
        cells = []
        for clock in ("prefill", "decode"):
            rate = arm[f"{clock}_tokens_per_second"]
            cells += [f"{rate['median']:,.1f} ({rate['min']:,.1f}-{rate['max']:,.1f})", times(rate["against"])]
        ratio = arm.get("kv_ratio_with_window", arm["plain_held_bytes_over_own"])
        without = arm.get("kv_ratio_without_window")
        add(
            made, name, *cells, f"{arm['peak_bytes'] / 2**20:,.1f}", f"{arm['held_bytes'] / 2**20:,.2f}",
            "" if ratio is None else f"{ratio:.2f}", "" if without is None else f"{without:.2f}",
            f"{arm['same_tokens_as_plain']}/{arm['generated_tokens']}",
        )  # fmt: skip
    shown(made)
    lines = [
        f"{device(record)}. Medians. KV ratio: the same tokens in fp16 over the bytes held; without window: the packed "
        "tokens over their codes."
    ]
    lines += [line for clock in ("prefill", "decode") for line in refused(clock, record[clock])]
    for entry in record["agreements"]:
        must = "must agree" if entry["must"] else "may differ"
        says = "agree" if entry["agree"] else "differ"
        lines.append(f"{entry['what']}: {' and '.join(entry['arms'])}, {entry['runs']} texts: {says} ({must})")
    notes(lines + left_out(record))
