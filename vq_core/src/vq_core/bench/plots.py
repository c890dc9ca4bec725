"""Figures of records.  Matplotlib is imported here and only when a figure is asked for.

``python -m vq_core.bench.plots RECORD FIGURE`` draws a saved record, such as one of a machine without matplotlib.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vq_core.bench.saving import check_target
from vq_core.errors import FormatError, SettingsError, VQError
from vq_core.files.atomic import replacing
from vq_core.files.jsontext import parse

KINDS = (".png", ".svg")
MISSING = (
    "--plot needs matplotlib, which is not installed: pip install 'vq-core[plots]', or leave --plot out; "
    "the figures are in the record of --json too"
)
NO_CONTEXTS = "the figure of decode shows steps by context: give --context with --plot"


def check_plot(path: Path) -> None:
    """Whether a figure can be drawn and written there; asked before the measuring, which takes minutes.

    Raises:
        SettingsError: matplotlib is missing, another kind of file, or a place that cannot be written.
    """
    if path.suffix.lower() not in KINDS:
        raise SettingsError(f"--plot {path}: the name must end in {' or '.join(KINDS)}")
    _matplotlib()
    check_target(path)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the figure of a record; the old or the new file stands whole.

    Raises:
        SettingsError: as :func:`check_plot`, or a record that has no figure.
    """
    check_plot(path)
    kinds: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "attention": _attention,
        "decode": _decode,
        "generate": _generate,
    }
    kind = str(record.get("benchmark"))
    if kind not in kinds:
        raise SettingsError(f"a record of {kind!r} has no figure; those of {', '.join(kinds)} have")
    buffer = io.BytesIO()
    kinds[kind](record).savefig(buffer, format=path.suffix.lower()[1:], dpi=144)
    try:
        with replacing(path.expanduser()) as file:
            file.write(buffer.getvalue())
    except OSError as error:
        raise SettingsError(f"the figure cannot be written to {path}: {error.strerror or error}") from error


def _matplotlib() -> Any:
    """The class of figures, without pyplot, which would look for a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError(MISSING) from error
    return Figure


def _figure(panels: int, title: str) -> tuple[Any, list[Any]]:
    figure = _matplotlib()(figsize=(6 * panels, 4.5), layout="constrained")
    figure.suptitle(title)
    made = figure.subplots(1, panels, squeeze=False)
    return figure, list(made[0])


def _device(record: Mapping[str, Any]) -> str:
    facts = record["environment"]
    return str(facts["device_info"].get("device_name", facts["device"]))


def _lines(axes: Any, series: Mapping[str, list[tuple[float, ...]]], ylabel: str) -> None:
    """One line an arm over the context; a point has its median and, where it has, its least and most."""
    for name, points in series.items():
        x, y = [p[0] for p in points], [p[1] for p in points]
        spread = None
        if points and len(points[0]) == 4:
            spread = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
        axes.errorbar(x, y, yerr=spread, marker="o", markersize=4, capsize=2, label=name)
    contexts = sorted({point[0] for points in series.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{int(n):,}" for n in contexts])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(labelsize=7, which="both")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(ylabel)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7)


def _series(rows: list[Any], of: Callable[[Any, str], tuple[float, ...] | None]) -> dict[str, list[tuple[float, ...]]]:
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        for name in row["arms"]:
            point = of(row, name)
            if point is not None:
                found.setdefault(name, []).append(point)
    return found


def _attention(record: Mapping[str, Any]) -> Any:
    rows, gpu = record["rows"], record["gpu_clock"]["available"]
    clocks = (["gpu"] if gpu else []) + ["queued", "single"]
    figure, panels = _figure(len(clocks) + 1, f"decode attention of one layer, {_device(record)}")

    def timed(clock: str) -> Callable[[Any, str], tuple[float, ...] | None]:
        def of(row: Any, name: str) -> tuple[float, ...] | None:
            if clock == "gpu":
                found = row["arms"][name]["gpu"]
                if "unavailable" in found:
                    return None
                low, high = found["min"], found["max"]
            else:
                found = row[clock]["arms"][name]
                low, high = found["low"], found["high"]
            return row["tokens"], 1e6 * found["median"], 1e6 * low, 1e6 * high

        return of

    for axes, clock in zip(panels, clocks, strict=False):
        _lines(axes, _series(rows, timed(clock)), f"{clock} clock, microseconds")
    _lines(
        panels[-1], _series(rows, lambda row, name: (row["tokens"], row["arms"][name]["bytes_read"] / 2**20)),
        "read by a step, MiB",
    )  # fmt: skip
    return figure


def _decode(record: Mapping[str, Any]) -> Any:
    rows = record["contexts"]
    if not rows:
        raise SettingsError(NO_CONTEXTS)
    figure, panels = _figure(3, f"decode steps, {record['config']['num_hidden_layers']} layers, {_device(record)}")

    def rate(row: Any, name: str) -> tuple[float, ...]:
        found = row["arms"][name]["pipelined"]["tokens_per_second"]
        return row["context"], 1e3 / found["median"], 1e3 / found["max"], 1e3 / found["min"]

    _lines(panels[0], _series(rows, rate), "a step as mlx-lm pipelines it, milliseconds")
    for axes, key, label in (
        (panels[1], "cache_bytes", "KV cache, MiB"),
        (panels[2], "peak_of_a_step_bytes", "peak of a step beyond what is held, MiB"),
    ):
        _lines(
            axes,
            _series(rows, lambda row, name, key=key: (row["context"], max(1, row["arms"][name][key]) / 2**20)),  # type: ignore[misc]
            label,
        )
    return figure


def _generate(record: Mapping[str, Any]) -> Any:
    arms = record["arms"]
    figure, panels = _figure(3, f"{record['model']}: {record['prompt_tokens']} tokens read, {_device(record)}")
    names = list(arms)
    for axes, clock in zip(panels, ("prefill", "decode"), strict=False):
        rates = [arms[name][f"{clock}_tokens_per_second"] for name in names]
        medians = [rate["median"] for rate in rates]
        spread = [[m - rate["min"] for m, rate in zip(medians, rates, strict=True)],
                  [rate["max"] - m for m, rate in zip(medians, rates, strict=True)]]  # fmt: skip
        axes.barh(names, medians, xerr=spread, capsize=2)
        axes.set_xlabel(f"{clock}, tokens a second")
    panels[2].barh(names, [arms[name]["held_bytes"] / 2**20 for name in names])
    panels[2].set_xlabel("KV caches held, MiB")
    for axes in panels:
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
    return figure


def draw_saved(record: Path, figure: Path) -> None:
    """Draw the figure of a record that ``--json`` has written.

    Raises:
        SettingsError: as :func:`draw`, or a file that is no record.
    """
    try:
        found = parse(record.expanduser().read_bytes(), str(record))
    except OSError as error:
        raise SettingsError(f"the record cannot be read from {record}: {error.strerror or error}") from error
    except FormatError as error:
        raise SettingsError(str(error)) from None
    if not isinstance(found, dict):
        raise SettingsError(f"{record} is no record of a benchmark: it must hold a JSON object")
    draw(found, figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m vq_core.bench.plots RECORD.json FIGURE.png")
    try:
        draw_saved(Path(sys.argv[1]), Path(sys.argv[2]))
    except VQError as error:
        sys.exit(f"vq: {error}")
