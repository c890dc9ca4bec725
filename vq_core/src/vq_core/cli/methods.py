"""`vq list-methods` and `vq info`."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from vq_core.api import Layout, MethodFacts, PrepareContext
    from vq_core.plugins.records import MethodRecord

REFUSED = "refused: "
STATUS_STYLE = {"ok": "green", "broken": "red", "incompatible": "red", "shadowed": "yellow", "disabled": "dim"}


def records() -> list[MethodRecord]:
    """All records; what plugins print while they load goes to stderr, so that stdout stays ours."""
    from vq_core.plugins.registry import list_methods

    with contextlib.redirect_stdout(sys.stderr):
        return list_methods()


def need_mlx() -> None:
    """Raise one typed error where MLX cannot be imported, before a module that imports it at its top is loaded."""
    from vq_core.errors import HostError
    from vq_core.plugins.diagnose import headline, mlx_install_line

    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise HostError(f"this command needs MLX ({headline(error)}): {mlx_install_line()}") from error


def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if any method cannot be used.")] = False,
) -> None:
    """List the installed methods, usable or not."""
    found = records()
    if as_json:
        typer.echo(json.dumps([record.as_dict() for record in found], indent=2))
    else:
        _print_table(found)
    if strict and any(record.status not in ("ok", "disabled") for record in found):
        raise typer.Exit(1)


def info(
    method: Annotated[str, typer.Argument(help="A method, with settings if wanted: kivi or kivi:bits=4.")],
    head_dim: Annotated[int, typer.Option(min=1, help="Head size for the bits per element.")] = 128,
) -> None:
    """Show one method: paper, settings, capabilities, bits per element."""
    from rich.console import Console
    from rich.table import Table

    from vq_core.api.settings import build_settings, format_choice, parse_choice
    from vq_core.plugins.registry import resolve

    choice = parse_choice(method)
    records()
    record = resolve(choice.label)
    assert record.facts is not None
    facts = record.facts
    settings = build_settings(record.name, facts.settings, choice.options)

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    bits = list(_bits(facts, f"{record.label}:{_options(settings)}", head_dim))
    rows = [
        ("method", record.name),
        ("summary", facts.summary),
        ("paper", facts.paper or "none"),
        ("package", f"{record.distribution} {record.version} ({record.entry_point}), API version {facts.api_version}"),
        ("sides", ", ".join(facts.sides)),
        *_capabilities(facts),
        # Of what no side takes nothing is said but why.
        *(_error(facts, settings, head_dim) if not all(said.startswith(REFUSED) for _, said in bits) else ()),
        ("settings", format_choice(record.name, settings)),
        *bits,
    ]
    for name, value in rows:
        table.add_row(name, _plain(value))
    console.print(table)
    _print_settings(console, facts)


def _print_table(found: list[MethodRecord]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not found:
        typer.echo("no methods are installed; for example: pip install vq-kivi")
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("method", "status", "distribution", "sides"):
        table.add_column(heading, no_wrap=True)
    table.add_column("summary")
    for record in found:
        facts = record.facts
        summary = "see below" if record.reason else facts.summary if facts else ""
        sides = ", ".join(facts.sides) if facts else ""
        cells = (record.name, record.status, f"{record.distribution} {record.version}", sides, summary)
        style = STATUS_STYLE[record.status]
        table.add_row(*(_plain(cell, style if at == 1 else "") for at, cell in enumerate(cells)))
    console.print(table)
    for record in found:
        if record.reason:
            console.print(_plain(f"\n{record.name} of {record.distribution} {record.version}: {record.reason}", ""))
    if any(record.status not in ("ok", "disabled") for record in found):
        console.print("`vq doctor NAME` shows the traceback.", style="dim")


def _print_settings(console: Console, facts: MethodFacts) -> None:
    import attrs
    from rich.table import Table

    fields = attrs.fields(facts.settings)
    if not fields:
        console.print("\nThis method has no settings.")
        return
    table = Table(title="settings", title_justify="left", box=None, pad_edge=False)
    for heading in ("name", "default", "accepted"):
        table.add_column(heading)
    table.add_column("meaning", overflow="fold")
    for field in fields:
        accepted = field.metadata.get("accepted") or f"any {type(field.default).__name__}"
        texts = (field.name, str(field.default), accepted, field.metadata.get("help", ""))
        table.add_row(*map(_plain, texts))
    console.print()
    console.print(table)


def _capabilities(facts: MethodFacts) -> Iterator[tuple[str, str]]:
    able = facts.capabilities
    yield "head sizes", able.sizes
    yield "exact", "decodes to the input bit for bit" if able.exact else "no"
    if able.needs_calibration:
        yield "calibration", "needed: it refuses to run without an artifact, which `vq calibrate` learns from the model"
    if not able.trimmable:
        yield "trim", "not behind the packed frontier"


def _error(facts: MethodFacts, settings: Any, head_dim: int) -> Iterator[tuple[str, str]]:
    able = facts.capabilities
    if able.gaussian_error is not None:
        bound = able.gaussian_error(settings, head_dim)
        yield "error", f"relative squared error on N(0, 1) at most {bound:.4g} at head size {head_dim}"


def _bits(facts: MethodFacts, text: str, head_dim: int) -> Iterator[tuple[str, str]]:
    """Bits per stored number of each side, or why they cannot be told here."""
    from vq_core.api import PrepareContext, VQError

    for side in facts.sides:
        contexts = {
            dtype: PrepareContext(side=side, kv_heads=8, key_dim=head_dim, value_dim=head_dim, dtype=dtype)
            for dtype in ("float16", "bfloat16", "float32")
        }
        try:
            layout = _layout(text, contexts.pop("float16"))
        except VQError as error:
            # Refusing a head size or asking for calibration is an answer; the rest of the page still helps.
            said = f"{REFUSED}{error}"
        except ImportError as error:
            said = f"needs MLX ({error}); see `vq doctor`"
        else:
            codes, metadata = layout.bits_per_element(head_dim)
            said = f"{codes:.4g} codes + {metadata:.4g} metadata = {codes + metadata:.4g} bits per element"
            if layout.sequence:
                said += f", and {sum(f.nbytes for f in layout.sequence):,} bytes a KV head once a sequence"
            # Scales of other models may be wider: a figure of float16 alone would be too low for them.
            for dtype, context in contexts.items():
                try:
                    bits = sum(_layout(text, context).bits_per_element(head_dim))
                except VQError as error:
                    said += f"; {dtype} models are refused: {error}"
                    continue
                if bits != codes + metadata:
                    said += f"; {bits:.4g} in {dtype} models"
        yield f"{side} (head size {head_dim})", said


def _layout(text: str, context: PrepareContext) -> Layout:
    from vq_core.calibration.stand_in import completed
    from vq_core.plugins.binding import bind

    text = completed(text, [(context.kv_heads, context.head_dim)])
    return bind(text, context).layout


def _options(settings: Any) -> str:
    from vq_core.api.settings import format_choice

    return format_choice("", settings).removeprefix(":")


def _plain(text: str, style: str = "") -> Any:
    from rich.text import Text

    # Texts from plugins are not markup: a summary may hold [brackets].
    return Text(text, style=style)
