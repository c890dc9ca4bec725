"""docs/writing-a-method.md, done: its files written, listed by ``vq``, run through the kit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "writing-a-method.md"


def files() -> dict[str, str]:
    """The page's files: blocks whose first line is a path, and blocks appended to one."""
    found: dict[str, str] = {}
    for block in re.findall(r"^```(?:python|toml)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        first, _, rest = block.partition("\n")
        if match := re.fullmatch(r"# (append: )?([\w/.-]+\.(?:py|toml))", first):
            append, path = match.groups()
            assert bool(append) == (path in found), f"{path} is given twice, or appended to before it is given"
            found[path] = found[path] + "\n\n" + rest if append else rest
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a folder, with the metadata that an installation of it would leave."""
    folder = tmp_path_factory.mktemp("acme-vq-int")
    for path, text in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for group, e in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(package / "src")}
    return subprocess.run(
        [sys.executable, *command], cwd=package, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_page_shows_a_whole_package() -> None:
    shown = re.search(r"^acme-vq-int/\n((?:  .*\n)+)", PAGE.read_text(), re.MULTILINE)
    assert shown is not None
    assert {line.strip() for line in shown.group(1).splitlines()} == set(files())


def test_it_is_listed(package: Path) -> None:
    done = run(package, "-m", "vq_core", "list-methods", "--json")
    assert done.returncode == 0, done.stderr
    (record,) = [r for r in json.loads(done.stdout) if r["name"] == "acme_int"]
    assert (record["status"], record["distribution"], record["reason"]) == ("ok", "acme-vq-int", "")


def test_it_passes_the_kit(package: Path) -> None:
    done = run(package, "-m", "pytest", "-ra", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert re.search(r"\d{3} passed", done.stdout) and "capability constant_exact=False" in done.stdout


def test_the_single_file_way(package: Path) -> None:
    (block,) = [
        b
        for b in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        if "registered" in b
    ]
    program = block + "\n    import mlx.core as mx\n    x = mx.ones((1, 1, 200, 64))\n"
    program += "    cache.update_and_fetch(x, x)\n    print(cache.report().packed)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=package, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.split() == ["72"], done.stdout + done.stderr
