"""`vq doctor`: what is installed, what does not work, and what to do."""

from __future__ import annotations

import platform
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vq_core.plugins.records import MethodRecord

MLX_LM_SUPPORTED = ((0, 32, 0), (0, 33, 0))
"""mlx-lm from the first up to, not including, the second; the same as vq-core's requirement."""


def doctor(
    method: Annotated[str | None, typer.Argument(help="Only this method, with its traceback.")] = None,
) -> None:
    """Report versions, backends and plugins, and what to do about each problem.

    Exit status 0 whatever is found: `vq list-methods --strict` is the one for scripts.
    """
    from vq_core.cli.methods import records
    from vq_core.plugins.registry import find

    found = records()
    if method is not None:
        found = find(method)
    else:
        _print_rows(_versions())
    problems = [] if method is not None else _host_problems()
    for record in found:
        _print_record(record)
        problems += _advice(record)
    if method is None:
        if not found:
            problems.append("no methods are installed, for example: pip install vq-kivi")
        problems += _unused_switches(found)
    _print_advice(problems)


def installed(distribution: str) -> str | None:
    """Version of an installed distribution."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def supported_mlx_lm(version: str) -> bool:
    """Whether vq-core works with this version of mlx-lm."""
    low, high = MLX_LM_SUPPORTED
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return low <= numbers < high


def _versions() -> list[tuple[str, str]]:
    import vq_core

    backend, device = _mlx_backend()
    return [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("vq-core", vq_core.__version__),
        ("mlx", installed("mlx") or "not installed"),
        ("mlx backend", backend),
        ("default device", device),
        ("mlx-lm", installed("mlx-lm") or "not installed"),
    ]


def _mlx_backend() -> tuple[str, str]:
    try:
        import mlx.core as mx
    except ImportError as error:
        return f"cannot be imported: {error}", "none"
    backends = [name for name in ("metal", "cuda") if hasattr(mx, name) and getattr(mx, name).is_available()]
    return ", ".join([*backends, "cpu"]), str(mx.default_device())


def _host_problems() -> list[str]:
    from vq_core.plugins.diagnose import mlx_install_line

    problems = []
    on_linux = sys.platform.startswith("linux")
    backend, _ = _mlx_backend()
    if backend.startswith("cannot"):
        problems.append(f"mlx {backend}: {mlx_install_line()}{', or vq-core[cuda13] for NVIDIA' if on_linux else ''}")
    low, high = (".".join(map(str, bound)) for bound in MLX_LM_SUPPORTED)
    version = installed("mlx-lm")
    if version is None or not supported_mlx_lm(version):
        state = "is not installed" if version is None else f"{version} is not supported"
        problems.append(
            f"mlx-lm {state}, vq-core works with {low} up to before {high}: pip install 'mlx-lm>={low},<{high}'"
        )
    return problems


def _advice(record: MethodRecord) -> list[str]:
    if record.status in ("ok", "disabled"):
        return []
    said = f"{record.name}: {record.reason}"
    if record.status == "broken" and "pip install" not in record.reason:
        name = record.distribution
        said += f". Else pip install --upgrade {name}, or do without: pip uninstall {name}, or VQ_DISABLE={record.name}"
    return [said]


def _unused_switches(found: list[MethodRecord]) -> list[str]:
    from vq_core.api.settings import canonical_name
    from vq_core.plugins.loader import DISABLE, disabled_names

    known = {name for record in found for name in (record.name, canonical_name(record.distribution))}
    return [f"{DISABLE} names {name!r}, which is not installed: take it out" for name in disabled_names() - known]


def _print_record(record: MethodRecord) -> None:
    from vq_core.cli.methods import STATUS_STYLE

    typer.echo()
    said = f"{record.name}: {record.status}"
    typer.echo(typer.style(said, fg=_colour(STATUS_STYLE[record.status]), bold=True), nl=False)
    typer.echo(f"  ({record.distribution} {record.version}, {record.entry_point})")
    if record.reason:
        typer.echo(f"  {record.reason}")
    for line in record.traceback.splitlines():
        typer.echo(f"    {line}")


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def _print_advice(problems: list[str]) -> None:
    typer.echo()
    if not problems:
        typer.echo(typer.style("no problems found", fg="green"))
        return
    typer.echo(typer.style("what to do", fg="red", bold=True))
    for problem in dict.fromkeys(problems):  # two that share a name share their advice
        typer.echo(f"  - {problem}")


def _colour(style: str) -> str | None:
    return None if style == "dim" else style
