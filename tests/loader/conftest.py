"""Distributions made on the spot: a dist-info folder and a module, in a folder on a child's PYTHONPATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

GOOD = """
import attrs
from vq_core.api import MethodFacts, hookimpl, setting, Layout, Field

@attrs.frozen
class Settings:
    bits: int = setting(2, accepted=(2, 4), help="Bits a number.")

@hookimpl
def vq_method():
    return MethodFacts(name={name!r}, summary="a good method", settings=Settings, api_version={api})

@hookimpl
def vq_prepare(ctx, settings):
    return settings

@hookimpl
def vq_layout(ctx, settings, state):
    return Layout(block=1, fields=(Field("x", "float16", (128, ctx.head_dim)),))

@hookimpl
def vq_encode(state, x):
    return x

@hookimpl
def vq_pack(state, codes):
    return {{"x": codes}}

@hookimpl
def vq_decode(state, packed):
    import mlx.core as mx
    return packed["x"].astype(mx.float32)
"""

RUN = """
import sys
sys.argv = ["vq", *{args!r}]
from vq_core.cli.main import main
try:
    main()
finally:
    print("IMPORTED", *sorted({{name.partition(".")[0] for name in sys.modules}}), file=sys.stderr)
"""

NO_MLX = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "mlx_lm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""

NO_BACKEND = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            said = "libmlx.so: cannot open shared object file: No such file or directory"
            raise ImportError(said, name="core", path="/site-packages/mlx/core.cpython-311-x86_64-linux-gnu.so")
sys.meta_path.insert(0, Blocker())
"""


def good(name: str, api: int = 1) -> str:
    """Source of a method that loads."""
    return GOOD.format(name=name, api=api)


class Child:
    """A finished `vq`."""

    def __init__(self, process: subprocess.CompletedProcess[str]) -> None:
        self.code = process.returncode
        self.out = process.stdout
        lines = process.stderr.splitlines()
        self.imported = {name for line in lines if line.startswith("IMPORTED") for name in line.split()[1:]}
        self.err = "\n".join(line for line in lines if not line.startswith("IMPORTED"))

    def json(self) -> list[dict[str, Any]]:
        assert self.code == 0, self.err
        return json.loads(self.out)

    def record(self, name: str, distribution: str | None = None) -> dict[str, Any]:
        """The one record of this name."""
        found = [r for r in self.json() if r["name"] == name and distribution in (None, r["distribution"])]
        assert len(found) == 1, self.out
        return found[0]


class Site:
    """A folder of generated distributions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = [root / "lib"]
        self.path[0].mkdir()

    def add(
        self,
        distribution: str,
        entry_points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        version: str = "1.2.3",
    ) -> Path:
        """Install a distribution; returns its dist-info folder."""
        lib = self.path[0]
        info = lib / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[vq.methods]", *lines, ""]))
        for name, source in (modules or {}).items():
            (lib / f"{name}.py").write_text(source)
        return info

    def add_good(self, name: str, distribution: str | None = None, **changes: Any) -> Path:
        """Install a method that loads."""
        distribution = distribution or f"acme-{name}"
        module = distribution.replace("-", "_") + "_method"
        return self.add(distribution, {name: module}, {module: good(name)}, **changes)

    def run(self, *args: str, prelude: str = "", cwd: Path | None = None, **environment: str) -> Child:
        """Run `vq` with these arguments in a child process."""
        variables = {k: v for k, v in os.environ.items() if k not in ("VQ_DISABLE", "VQ_DEBUG", "FORCE_COLOR")}
        path = [*map(str, self.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables |= {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "250", "NO_COLOR": "1", **environment}
        process = subprocess.run(
            [sys.executable, "-c", prelude + RUN.format(args=list(args))],
            env=variables,
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return Child(process)

    def list(self, **options: Any) -> Child:
        """Run `vq list-methods --json`."""
        return self.run("list-methods", "--json", **options)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty folder of distributions."""
    return Site(tmp_path)


@pytest.fixture
def no_mlx() -> str:
    """Prelude of a child in which MLX is not installed."""
    return NO_MLX


@pytest.fixture
def no_backend() -> str:
    """Prelude of a child in which MLX is installed without a backend, as `pip install mlx` leaves it on Linux."""
    return NO_BACKEND


@pytest.fixture
def source() -> Any:
    """`source(name, api=1)`: source of a method that loads."""
    return good
