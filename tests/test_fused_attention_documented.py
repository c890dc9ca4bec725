"""docs/kernels/fused-attention.md, done: its snippet run, verified, compiled, broken; its table of refusals true."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import pytest

from vq_core import PackedKVCache
from vq_core.api import PrepareContext, UnsupportedShapeError
from vq_core.attention.verifying import pass_kernel
from vq_core.kernels.nvrtc import compile_for_cuda, installed
from vq_core.plugins.binding import bind
from vq_core.testing import SnippetConformance, load_plugin, registered

from .conformance.test_methods import code_lines
from .test_hooks_documented import blocks

PAGE = (Path(__file__).parent.parent / "docs/kernels/fused-attention.md").read_text()
SNIPPET, SCRIPT = (block.partition("\n")[2] for block in blocks("kernels/fused-attention.md"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snippet") / "int8_snippet.py"
    path.write_text(SNIPPET)
    return path


@pytest.fixture(scope="module")
def plugin(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The method of docs/hooks.md with the page's hook."""
    (text,) = [block for block in blocks("hooks.md") if "def vq_method" in block]
    file = tmp_path_factory.mktemp("method") / "int8.py"
    file.write_text(text)
    hooks = {name: value for name, value in vars(load_plugin(file)).items() if name.startswith("vq_")}
    return SimpleNamespace(**hooks, vq_snippet=load_plugin(written).vq_snippet)


@pytest.fixture
def used(plugin: Any) -> Iterator[Any]:
    with registered(plugin):
        yield plugin


def test_it_is_short(written: Path) -> None:
    assert code_lines(written) <= 30


def test_what_is_run_on_the_page(used: Any) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(SCRIPT, {})
    said = printed.getvalue()
    assert "passed=True" in said and "configurations=5" in said and "error=''" in said
    assert "its text does not grow" in said and "[[kernel]] void custom_kernel_attend_int8_2_64_int8_1_64" in said
    name = "attend_int8_2_64_int8_1_64_64_64_h_i8fi8f"
    assert f"kernel (simulator): {name} (matrix: int8 holds its keys in no form" in said


def test_the_kit_passes(plugin: Any) -> None:
    kit = type("Page", (SnippetConformance,), {"method": "int8", "plugin": plugin})()
    with kit._registered():
        kit.test_fused_attention_is_dense_attention(0)
        kit.test_fused_attention_is_reported()
        kit.test_fused_nan_stays_in_its_row()


@pytest.mark.skipif(not installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
def test_it_compiles_for_cuda(used: Any) -> None:
    sides = [bind("int8", PrepareContext(side, 2, 64, 64, "float16")) for side in ("keys", "values")]  # type: ignore[arg-type]
    assert compile_for_cuda(pass_kernel(*sides), {"Q": "float16", "M": 4})[:4] == b"\x7fELF"


def changed(plugin: Any, name: str, **changes: Any) -> Any:
    """The method with another snippet for its values."""
    from vq_core.api import hookimpl

    def vq_snippet(state, side):
        made = plugin.vq_snippet(state, side)
        if side == "keys":
            return made
        return attrs.evolve(made, name=name, **changes) if changes else None

    return SimpleNamespace(**vars(plugin) | {"vq_snippet": hookimpl(vq_snippet)})


def attended(**options: Any) -> PackedKVCache:
    cache = PackedKVCache(method="int8", kernels="simulator", residual=8, **options)
    x = mx.random.normal((1, 2, 40, 64), key=mx.random.key(2)).astype(mx.float16)
    cache.update_and_fetch(x, x)
    cache.attend(mx.ones((1, 2, 1, 64), mx.float16), scale=0.125)
    return cache


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("c + j", "c", "differs from dense attention by"), ("* D +", "* 1000 +", "Missing bound check")],
)
def test_broken_it_says_what_the_page_says(plugin: Any, old: str, new: str, said: str) -> None:
    assert said in PAGE and old in SNIPPET
    numbers = load_numbers(plugin).replace(old, new)
    with registered(changed(plugin, f"broken_{len(new)}", numbers=numbers)), pytest.raises(Exception, match=said):
        attended(attention="kernel")


def load_numbers(plugin: Any) -> str:
    found: str = plugin.vq_snippet(64, "values").numbers
    return found


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("none", {}, "int8 has no snippet for its values"),
        ("two", {"tokens": 2, "integers": {"T": 2, "D": 64}}, "tiles of 2 tokens of values may lie across the end"),
    ],
)
def test_the_report_says_what_the_page_says(plugin: Any, name: str, changes: Any, said: str) -> None:
    with registered(changed(plugin, name, **changes)):
        assert attended().report().attention.startswith(f"mlx (kernel: {said}") and said in PAGE
        with pytest.raises(UnsupportedShapeError, match=f"attention='kernel': {said}"):
            attended(attention="kernel")


def test_the_table_has_the_words_of_the_refusals(plugin: ModuleType) -> None:
    """The others are raised in vq_core/tests/kernels/test_snippet.py."""
    source = (Path(__file__).parent.parent / "vq_core/tests/kernels/test_snippet.py").read_text()
    for words in (
        "pages of 48 tokens with tiles of",
        "60 numbers a key are no whole runs of 8 channels",
        "need more than 32768 bytes",
    ):
        assert words in source and words in PAGE
    assert re.search(r"no kernels on Device\(cpu, 0\)", PAGE)
