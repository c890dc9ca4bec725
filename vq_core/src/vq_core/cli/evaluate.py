"""`vq evaluate`: what packing does to attention and to a model's predictions, and the bytes that are held."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vq_core.cli.bench.shared import Json, add, chosen, device, left_out, measured, notes, table
from vq_core.cli.bench.shared import show as shown

app = typer.Typer(
    help="Quality and bytes of methods: synthetic attention, a model's predictions, arrays held.", no_args_is_help=True
)

Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="A method, or all: every installed one at every width; may be repeated."),
]
Partner = Annotated[
    str | None, typer.Option(help="Method of the other side, of methods of one side; kivi:bits=2 by default.")
]
WHOLE = {
    "codes": "codes", "metadata": "metadata", "window": "exact window", "spare": "spare capacity",
    "held": "all in", "constants": "shared constants, apart",
}  # fmt: skip
Dtype = Annotated[str | None, typer.Option(help="float16, bfloat16 or float32.")]


@app.command()
def synthetic(
    method: Methods = None,
    tokens: Annotated[int | None, typer.Option(help="Keys and values.")] = None,
    queries: Annotated[int | None, typer.Option(help="Queries, half of them retrieval-like.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head size.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws of the data and of the methods' constants.")] = None,
    dtype: Dtype = None,
    json_file: Json = None,
) -> None:
    """Attention on synthetic keys and values with one side quantized: output error and KL of the probabilities."""
    from vq_core.cli.methods import need_mlx

    need_mlx()
    from vq_core.evaluate.synthetic import Wanted, measure

    wanted = Wanted(
        **chosen(methods=method, tokens=tokens, queries=queries, head_dim=head_dim, seeds=seeds, dtype=dtype)
    )
    measured(json_file, None, partial(measure, wanted), _print_synthetic)


@app.command()
def model(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, name on the hub, or demo.")],
    method: Methods = None,
    keys: Annotated[list[str] | None, typer.Option(help="Method of the keys; may be repeated.")] = None,
    values: Annotated[
        list[str] | None, typer.Option(help="Method of the values, one for each --keys, in their order.")
    ] = None,
    partner: Partner = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text; by default the held-out text that ships.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Tokens read before scoring begins.")] = None,
    scored: Annotated[int | None, typer.Option(help="Tokens scored.")] = None,
    residual: Annotated[int | None, typer.Option(help="Newest tokens that stay exact.")] = None,
    sink_tokens: Annotated[int | None, typer.Option(help="First tokens that stay exact.")] = None,
    json_file: Json = None,
) -> None:
    """A model's predictions with packed caches against its own cache, teacher-forced, and the bytes held."""
    from vq_core.cli.methods import need_mlx
    from vq_core.cli.options import model_path

    need_mlx()
    from vq_core.evaluate.on_model import Wanted, measure

    given = chosen(
        methods=method, keys=keys, values=values, partner=partner, text=text, prefill=prefill, scored=scored,
        residual=residual, sink_tokens=sink_tokens,
    )  # fmt: skip
    measured(json_file, None, partial(measure, Wanted(model_path(name), **given)), _print_model)


@app.command("bytes")
def bytes_held(
    method: Methods = None,
    partner: Partner = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the cache.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head size.")] = None,
    dtype: Dtype = None,
    residual: Annotated[int | None, typer.Option(help="Newest tokens that stay exact.")] = None,
    json_file: Json = None,
) -> None:
    """Codes and metadata in the arrays that a cache holds against the layout's figure; the rest on lines of its own.

    Exit status 1 if they differ by more than 1%.
    """
    from vq_core.cli.methods import need_mlx
    from vq_core.cli.options import FAILED

    need_mlx()
    from vq_core.evaluate.held import Wanted, measure

    given = chosen(
        methods=method, partner=partner, tokens=tokens, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        residual=residual,
    )  # fmt: skip
    record = measured(json_file, None, partial(measure, Wanted(**given)), _print_bytes)
    if not all(side["within"] for row in record["rows"] for side in row["sides"].values()):
        raise typer.Exit(FAILED)


def _print_synthetic(record: dict[str, Any]) -> None:
    asked = record["conditions"]
    for side, what in (("keys", "error / KL"), ("values", "error")):
        rows = [row for row in record["rows"] if row["side"] == side]
        names = [column["name"] for column in asked["columns"][side]]
        made = table(f"{side} quantized: {what}", ("method",), ("bits", *names))
        for row in rows:
            add(made, row["method"], f"{row['bits']['total']:.4g}", *(_figures(row["columns"][name]) for name in names))
        if rows:
            shown(made)
    notes(
        [
            f"{asked['tokens']:,} tokens, D {asked['head_dim']}, {asked['dtype']}, {asked['queries']} queries, "
            f"{asked['seeds']} seeds; bits per number with all metadata. Error: relative, of the output, norms over "
            "all queries; KL(exact || quantized) in nats, mean over queries. docs/evaluation.md says the rest.",
            *left_out(record),
        ]
    )


def _figures(found: dict[str, Any]) -> str:
    return f"{found['error']:.3f}" + (f" / {found['kl']:.4f}" if "kl" in found else "")


def _print_model(record: dict[str, Any]) -> None:
    own, rows, asked = record["own"], record["rows"], record["conditions"]
    made = table("predictions", ("method",), ("bits", "KL", "same top", "perplexity", "all-in bits", "fp16/held"))
    add(made, own["name"], "", "0", "100.0%", f"{own['perplexity']:.4f}", f"{own['all_in_bits']:.2f}", "")
    for row in rows:
        add(
            made, row["name"], f"{row['bits']:.4g}", f"{row['kl']:.5f}", f"{row['top1']:.1%}",
            f"{row['perplexity']:.4f}", f"{row['all_in_bits']:.2f}", f"{row['bytes']['ratio']:.2f}",
        )  # fmt: skip
    held = table(
        "bytes held per token", ("method",), ("codes", "metadata", "window", "spare", "held", "constants, in all")
    )
    for row in rows:
        per = row["bytes_per_token"]
        cells = [f"{per[name]:,.1f}" for name in ("codes", "metadata", "window", "spare", "held")]
        add(held, row["name"], *cells, f"{row['bytes']['constants']:,}")
    shown(made, held)
    lines = [
        f"{device(record)}. Teacher-forced over {rows[0]['scored']} tokens of {asked['text']} after a prefill of "
        f"{asked['prefill']}; {min(row['packed_share'] for row in rows):.0%} or more of the keys attended to were "
        f"packed. Bits per number: of packed tokens with all metadata; all-in: of every array held, at "
        f"{rows[0]['tokens']:,} tokens.",
    ]
    for told in record["kl_falls_as_bits_rise"]:
        lines.append(f"KL falls as bits rise, {told['family']}: {'yes' if told['ordered'] else 'no'}")
        lines += [f"  {line}" for line in told["inversions"]]
    lines += [f"{row['name']}: {note}" for row in rows for note in row["notes"]]
    notes(lines + left_out(record))


def _print_bytes(record: dict[str, Any]) -> None:
    asked = record["conditions"]
    made = table(
        "packed tokens, bits per number", ("method", "side"), ("codes", "metadata", "together", "layout", "off by")
    )
    whole = table("the whole cache", ("method", "what"), ("bytes", "bits per number"))
    numbers = 2 * asked["tokens"] * asked["kv_heads"] * asked["head_dim"]
    lines = [
        f"{asked['tokens']:,} tokens, {asked['kv_heads']} KV heads, D {asked['head_dim']}, {asked['dtype']}, window "
        f"{asked['residual']}: counted in the arrays held. Constants are shared by layers and caches, and "
        "not in what the cache holds."
    ]
    for row in record["rows"]:
        held = row["bytes"]
        for side, one in row["sides"].items():
            per, layout = one["bits"], sum(one["layout_bits"].values())
            off = f"{one['difference']:+.2%}{'' if one['within'] else ': more than 1%'}"
            cells = [f"{x:.4f}" for x in (per["codes"], per["metadata"], sum(per.values()), layout)]
            add(made, row["name"], side, *cells, off)
            if one["bytes"]["sequence"]:
                lines.append(f"{row['name']}: metadata has {one['bytes']['sequence']:,} bytes of the whole sequence")
        for name, said in WHOLE.items():
            bits = "" if name == "constants" else f"{held[name] * 8 / numbers:.4f}"
            add(whole, row["name"] if name == "codes" else "", said, f"{held[name]:,}", bits)
        if row["walked"] != held["held"]:
            lines.append(f"{row['name']}: the account says {held['held']:,}, the arrays found are {row['walked']:,}")
    shown(made, whole)
    notes(lines + left_out(record))
