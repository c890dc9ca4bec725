"""Where MLX is missing or has no backend; and what listing must never import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

INSTALL = "pip install mlx" if sys.platform == "darwin" else "pip install 'vq-core[cpu]'"


@pytest.mark.parametrize("absence", ["no_mlx", "no_backend"])
def test_listing_without_mlx(site: Any, source: Any, absence: str, request: pytest.FixtureRequest) -> None:
    prelude = request.getfixturevalue(absence)
    site.add_good("fine")
    site.add("acme-eager", {"eager": "acme_eager"}, {"acme_eager": "import mlx.core\n" + source("eager")})
    child = site.list(prelude=prelude)
    assert child.record("fine")["status"] == "ok"
    eager = child.record("eager")
    assert eager["status"] == "broken"
    assert "needs mlx" in eager["reason"]
    assert INSTALL in eager["reason"]

    assert site.run("--version", prelude=prelude).code == 0
    doctor = site.run("doctor", prelude=prelude)
    assert doctor.code == 0, doctor.err
    assert INSTALL in doctor.out.partition("what to do")[2]

    info = site.run("info", "fine", prelude=prelude)
    assert info.code == 0, info.err
    assert "bits" in info.out
    assert "needs MLX" in info.out


@pytest.mark.parametrize("absence", ["no_mlx", "no_backend"])
@pytest.mark.parametrize(
    "command",
    [
        ("demo",), ("bench", "kernels"), ("bench", "attention"), ("bench", "decode"), ("bench", "generate", "demo"),
        ("generate", "model", "-p", "text", "--method", "fine"),
    ],
)  # fmt: skip
def test_running_without_mlx_is_one_line(
    site: Any, absence: str, command: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    site.add_good("fine")
    child = site.run(*command, prelude=request.getfixturevalue(absence))
    assert child.code == 2, child.err
    assert INSTALL in child.err
    assert "Traceback" not in child.err and len(child.err.strip().splitlines()) == 1


def test_a_good_methods_bits_are_shown(site: Any) -> None:
    site.add_good("fine")
    child = site.run("info", "fine", "--head-dim", "64")
    assert child.code == 0, child.err
    assert "keys (head size 64)" in child.out
    assert "= 16 bits per element" in child.out
    assert "bfloat16 models are refused" in child.out  # it packs what it is given, and promises float16


@pytest.mark.parametrize("command", [["list-methods"], ["list-methods", "--json"], ["--version"], ["--help"]])
def test_listing_imports_no_model_library(site: Any, command: list[str]) -> None:
    site.add_good("fine")
    child = site.run(*command)
    assert child.code == 0, child.err
    assert "vq_core" in child.imported
    assert not child.imported & {"mlx_lm", "transformers", "numpy"}


def test_importing_vq_core_imports_neither_mlx_nor_mlx_lm() -> None:
    code = (
        "import sys, vq_core, vq_core.plugins\n"
        "assert issubclass(vq_core.SettingsError, vq_core.VQError)\n"
        "assert vq_core.__version__\n"
        "assert callable(vq_core.list_methods)\n"
        "try:\n    vq_core.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "print(sorted({'mlx', 'mlx_lm', 'numpy', 'rich', 'typer'} & set(sys.modules)))\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "[]"
