"""docs/kernels/writing-a-kernel.md, done: the kernel as written, verified, offered, and broken."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.kernels.golden import write
from vq_core.kernels.nvrtc import compile_for_cuda, installed
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import verify
from vq_core.testing import KernelConformance, load_plugin, registered
from vq_core.testing.observe import assert_same, snapshot

from .test_hooks_documented import blocks

PAGE = (Path(__file__).parent.parent / "docs/kernels/writing-a-kernel.md").read_text()


def files() -> dict[str, str]:
    found: dict[str, str] = {}
    for block in blocks("kernels/writing-a-kernel.md"):
        first, _, rest = block.partition("\n")
        match = re.fullmatch(r"# (?:append: )?([\w.]+\.py)", first)
        assert match, first
        found[match[1]] = found.get(match[1], "") + rest
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("kernel")
    for name, text in files().items():
        (path / name).write_text(text)
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))
    sys.modules.pop("int8_kernels", None)


@pytest.fixture(scope="module")
def kernels(folder: Path) -> ModuleType:
    import importlib

    return importlib.import_module("int8_kernels")


@pytest.fixture(scope="module")
def plugin(kernels: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The method of docs/hooks.md with the page's hook."""
    (text,) = [block for block in blocks("hooks.md") if "def vq_method" in block]
    file = tmp_path_factory.mktemp("method") / "int8.py"
    file.write_text(text)
    method = load_plugin(file)
    hooks = {name: value for name, value in vars(method).items() if name.startswith("vq_")}
    return SimpleNamespace(**hooks, vq_kernels=kernels.vq_kernels)


def test_it_has_as_many_lines_as_the_page_says(kernels: ModuleType) -> None:
    lines = kernels.BODY.strip().split("\n")
    assert len(lines) <= 20 and f"{len(lines)} lines" in PAGE


def test_what_is_run_on_the_page(folder: Path, kernels: ModuleType) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec((folder / "try_it.py").read_text(), {})
    said = printed.getvalue()
    assert said.count("identical=True") == 2 and "configurations=96" in said
    assert "its text does not grow" in said and "[[kernel]] void custom_kernel_int8_pack" in said


def test_the_cases_hold_what_they_are_for(kernels: ModuleType) -> None:
    found = {"ties": 0, "nan": 0, "zero": 0}
    for case in kernels.cases():
        x = np.array(case.inputs[0].astype(mx.float32))
        scale = np.array(kernels.reference(case.inputs[0])[1])
        with np.errstate(all="ignore"):
            found["ties"] += int(((x / scale) % 1 == 0.5).sum())
        found["nan"] += int(np.isnan(scale).sum())
        found["zero"] += int((scale == 0).sum())
    assert min(found.values()) > 20, found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("n < rows && d", "d", "has written"),
        ("if (n < rows && lane == 0u)", "if (lane == 0u)", "has written"),
        ("min(n, rows - 1u)", "n", "Missing bound check"),
        ("rint(", "round(", "codes differs"),
        ("simd_any(bad) ? NAN : ", "", "scale differs"),
        (
            "  top = max(top, fabs(v));\n}\ntop = simd_max(top);",
            "  top = simd_max(max(top, fabs(v)));\n}",
            "diverge|differs",
        ),
    ],
)
def test_broken_it_is_caught(kernels: ModuleType, old: str, new: str, said: str) -> None:
    body = re.sub(r" +//.*", "", kernels.BODY)
    assert old in body
    broken = attrs.evolve(kernels.PACK, body=body.replace(old, new))
    verdict = verify("int8", broken, "simulator", Simulated())
    assert not verdict.passed and re.search(said, verdict.error or verdict.first), verdict


def test_the_classes_of_the_page(folder: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest would spread them."""
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {}
    exec((folder / "test_int8_kernels.py").read_text(), space)
    parity, broken = space["TestParity"](), space["TestBroken"]()
    (kernel,) = parity.kernels
    for contract in ("off", "fast"):
        parity.test_parity(contract, kernel)
        broken.test_unbroken_it_passes(kernel, contract)
    parity.test_the_text_does_not_grow(kernel)
    for item in broken.breaks:
        broken.test_broken_it_fails((item, kernel))
    broken.test_every_kernel_is_broken_in_six_ways()
    with registered(plugin):
        parity.test_every_kernel_is_offered()
        write([kernel], folder / "tests" / "golden")
        parity.test_golden_text(*parity.golden)
    shutil.rmtree(folder / "tests")
    # What is no break, does not show, cannot be compiled or is caught by other words fails.
    for changes, said in (
        ({"old": "not there"}, "holds no 'not there'"), ({"new": "rint ("}, "passed=True"),
        ({"new": "no_function("}, "differs by"), ({"error": "has one writer"}, "has one writer"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=re.escape(said)):
            broken.test_broken_it_fails((attrs.evolve(broken.breaks[0], **changes), kernel))
    few = type("Few", (space["TestBroken"],), {"breaks": broken.breaks[:5]})()
    with pytest.raises(AssertionError, match="'int8_pack': 5"):
        few.test_every_kernel_is_broken_in_six_ways()
    more = type("More", (space["TestParity"],), {"configurations": 97})()
    with pytest.raises(AssertionError, match="configurations=96"):
        more.test_parity("off", kernel)


def test_it_serves_the_method(plugin: Any) -> None:
    kit = type("Page", (KernelConformance,), {"method": "int8", "plugin": plugin})()
    with kit._registered():
        for contract, seed in (("off", 0), ("fast", 1)):
            kit.test_kernels_equal_their_references(contract, seed)
        kit.test_kernel_text_does_not_grow()
        for side in ("keys", "values"):
            kit.test_kernels_serve_what_hooks_give(side, "bfloat16")
    with registered(plugin):
        x = mx.random.normal((1, 2, 50, 80), key=mx.random.key(1))
        caches = [PackedKVCache(method="int8", residual=0, kernels=kernels) for kernels in ("off", "simulator")]  # type: ignore[arg-type]
        for cache in caches:
            cache.update_and_fetch(x, x)
        assert_same(snapshot(caches[1]), snapshot(caches[0]), "stored")
        assert any("kernel int8_pack (simulator)" in line for line in caches[1].report().operations)


def test_its_golden_text(folder: Path, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    space: dict[str, Any] = {}
    exec((folder / "test_golden.py").read_text(), space)
    with pytest.raises(AssertionError):
        space["test_golden_text"]()
    write([kernels.PACK], folder / "tests" / "golden")
    space["test_golden_text"]()


@pytest.mark.skipif(not installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
def test_it_compiles_for_cuda(kernels: ModuleType) -> None:
    for variant in kernels.PACK.variants:
        assert compile_for_cuda(kernels.PACK, variant)[:4] == b"\x7fELF"
