"""`vq bench attention`."""

from __future__ import annotations

from functools import partial
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
    stand_ins,
    table,
    times,
)
from vq_core.cli.bench.shared import show as shown


def attention(
    method: Methods = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="Tier of attention, or all; by default auto; may be repeated.")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of the cache; may be repeated.")] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 128,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    residual: Annotated[int, typer.Option(help="Newest tokens that stay exact.")] = 128,
    rounds: Annotated[int, typer.Option(help="Turns of a comparison, at least.")] = 12,
    calls: Annotated[int, typer.Option(help="Calls queued before one evaluation, at least.")] = 20,
    pool_bytes: Annotated[
        int | None, typer.Option(help="Bytes that the packed codes of the rotating caches exceed together.")
    ] = None,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Decode attention of one layer by method and tier, against MLX's own and mlx-lm's quantized one."""
    from vq_core.cli.methods import need_mlx

    need_mlx()
    from vq_core.bench.attention import Wanted, measure

    wanted = Wanted(
        **chosen(
            methods=method, tiers=tier, tokens=tokens, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype, residual=residual, rounds=rounds, calls=calls, beyond=pool_bytes,
        )
    )  # fmt: skip
    measured(json_file, plot, partial(measure, wanted), _print)


def _print(record: dict[str, Any]) -> None:
    lines = [
        f"{device(record)}. queued: calls forced together; single: one call and waiting for it; GPU: sum of the "
        "kernels. Medians; times as fast as MLX's own attention on a dense cache. Error: relative L2 to float32 "
        "attention on the decoded cache.",
    ]
    if not record["gpu_clock"]["available"]:
        lines.append(f"no GPU clock: {record['gpu_clock']['reason']}")
    for row in record["rows"]:
        shape = (
            f"{row['tokens']:,} tokens, B {row['batch']}, {row['heads']}/{row['kv_heads']} heads, D {row['head_dim']}"
        )
        made = table(
            f"{shape}, {row['dtype']}, window {row['residual']}", ("arm",),
            ("queued us", "times", "single us", "times", "GPU us", "times", "bytes read", "of floor", "error"),
        )  # fmt: skip
        for name, arm in row["arms"].items():
            add(made, name, *_cells(row, name, arm))
        shown(made)
        lines += stand_ins(row["arms"])
        lines += refused(f"{row['tokens']} tokens, queued", row["queued"])
        lines += refused(f"{row['tokens']} tokens, single", row["single"])
        for name, arm in row["arms"].items():
            lines += [f"{row['tokens']} tokens: {name}: {one['said']} against {one['base']}, queued"
                      for one in arm["queued"][1:]]  # fmt: skip
    notes(lines + left_out(record))


def _cells(row: dict[str, Any], name: str, arm: dict[str, Any]) -> list[str]:
    gpu, floor = arm["gpu"], arm["floor"]
    cells = []
    for clock in ("queued", "single"):
        cells += [f"{row[clock]['arms'][name]['median'] * 1e6:,.1f}", times(next(iter(arm[clock]), None))]
    if "unavailable" in gpu:
        cells += ["", ""]
    else:
        ratio = gpu["times_as_fast"]
        cells += [f"{gpu['median'] * 1e6:,.1f}", "no ratio" if ratio is None else f"{ratio:.2f}"]
    if floor is None:
        fraction = ""
    else:
        codes = floor["fraction_of_codes_pass"]
        fraction = f"{floor['fraction_of_total']:.0%}" + ("" if codes is None else f" (codes {codes:.0%})")
    return [*cells, f"{arm['bytes_read']:,}", fraction, f"{arm['relative_error']:.1e}"]
