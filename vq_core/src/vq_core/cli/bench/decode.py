"""`vq bench decode`."""

from __future__ import annotations

import re
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
    stand_ins,
    table,
    times,
)
from vq_core.cli.bench.shared import show as shown

UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def decode(
    method: Methods = None,
    tier: Annotated[list[str] | None, typer.Option(help="Tier of attention; by default auto; may be repeated.")] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens held before the timed steps; may be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sizes of the model, a config.json; by default a Llama of 3B.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head size.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the feed-forward part.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens of the vocabulary.")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    residual: Annotated[int, typer.Option(help="Newest tokens that stay exact.")] = 128,
    steps_a_sample: Annotated[int, typer.Option(help="Steps of one sample.")] = 32,
    rounds: Annotated[int, typer.Option(help="Turns of a comparison, at least.")] = 6,
    fits: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Fill caches up to this budget, such as 8GiB.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Time a prefill of so many tokens.")] = None,
    prefill_rounds: Annotated[int, typer.Option(help="Turns of --prefill.")] = 2,
    steps: Annotated[int | None, typer.Option(help="Run so many steps and watch memory and compiled kernels.")] = None,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Whole decode steps of a model geometry with random weights: mlx-lm's caches and ours, by context."""
    from vq_core.cli.methods import need_mlx

    need_mlx()
    from vq_core.bench.decode import Wanted, measure
    from vq_core.bench.geometry import geometry
    from vq_core.bench.plots import NO_CONTEXTS
    from vq_core.errors import SettingsError

    sizes = geometry(
        config, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=intermediate, vocab=vocab,
    )  # fmt: skip
    others = any(option is not None for option in (fits, prefill, steps))
    given = chosen(
        geometry=sizes, methods=method, tiers=tier, dtype=dtype, residual=residual, steps=steps_a_sample, rounds=rounds,
        fits=None if fits is None else size(fits), prefill=prefill, prefill_rounds=prefill_rounds, stable_steps=steps,
    )  # fmt: skip
    if context or others:  # no context where only something else was asked for
        given["contexts"] = tuple(context or ())
    wanted = Wanted(**given)
    if plot is not None and not wanted.contexts:
        raise SettingsError(NO_CONTEXTS)
    measured(json_file, plot, partial(measure, wanted), _print)


def size(text: str) -> int:
    """Bytes of a text such as ``8GiB`` or ``1000000``.

    Raises:
        SettingsError: it is none.
    """
    from vq_core.errors import SettingsError

    found = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text.strip())
    unit = None if found is None else UNITS.get(found.group(2).lower())
    if found is None or unit is None:
        raise SettingsError(f"--fits {text!r}: give bytes, such as 8GiB, 500MB or 8589934592")
    return int(found.group(1)) * unit


def _print(record: dict[str, Any]) -> None:
    lines = [
        f"{device(record)}. pipelined: the next step is built and started before a token is read, as mlx-lm does; "
        "synchronous: each step is waited for. Medians; host: building the graph, over mlx-lm's plain cache.",
    ]
    for row in record["contexts"]:
        made = table(
            f"{row['context']:,} tokens (grown to {row['grown_to']['pipelined']:,})", ("cache",),
            ("tokens/s (min-max)", "times", "synchronous", "times", "MiB of cache", "ratio", "peak of a step MiB",
             "host us a layer"),
        )  # fmt: skip
        for name, arm in row["arms"].items():
            piped, waited = arm["pipelined"], arm["synchronous"]
            rate = piped["tokens_per_second"]
            add(
                made, name, f"{rate['median']:,.1f} ({rate['min']:,.1f}-{rate['max']:,.1f})", times(piped["against"]),
                f"{waited['tokens_per_second']['median']:,.1f}", times(waited["against"]), _mib(arm["cache_bytes"]),
                f"{arm['plain_cache_bytes_over_own']:.2f}", _mib(arm["peak_of_a_step_bytes"]),
                f"{arm['host']['over_plain_us_a_layer']:+.1f}",
            )  # fmt: skip
        lines += stand_ins(row["arms"])
        shown(made)
        for clock in ("pipelined", "synchronous"):
            lines += refused(f"{row['context']} tokens, {clock}", row[clock])
    for part in (_fits, _prefill, _stability):
        lines += part(record)
    notes(lines + left_out(record))


def _fits(record: dict[str, Any]) -> list[str]:
    found = record["fits"]
    if found is None:
        return []
    return [
        f"{name}: {arm['tokens']:,} tokens fit into {found['budget_bytes']:,} bytes "
        f"({'no base' if arm['times_the_base'] is None else format(arm['times_the_base'], '.2f')} times as many); "
        f"{arm['passed_at_tokens']:,} take {arm['passed_with_bytes']:,}"
        for name, arm in found["arms"].items()
    ]


def _prefill(record: dict[str, Any]) -> list[str]:
    found = record["prefill"]
    if found is None:
        return []
    return [
        f"prefill of {found['tokens']:,} tokens, {name}: {arm['tokens_per_second']['median']:,.1f} tokens/s, "
        f"times as fast: {times(arm['against'])}; peak {_mib(arm['peak_bytes'])} MiB, "
        f"{arm['peak_over_base_peak']:.3f} of the base's"
        for name, arm in found["arms"].items()
    ]


def _stability(record: dict[str, Any]) -> list[str]:
    found = record["stability"]
    if found is None:
        return []
    return [
        f"{found['steps']:,} steps, {name}: {arm['compiled_after_the_third_step']} kernels compiled after the third; "
        f"beyond the caches {arm['active_beyond_caches_bytes']['begin']:,} bytes at the begin, "
        f"{arm['active_beyond_caches_bytes']['end']:,} at the end"
        for name, arm in found["arms"].items()
    ]


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f}"
