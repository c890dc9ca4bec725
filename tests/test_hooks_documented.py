"""The contract's prose: every hook documented, in the specification and in docs/, and used by a tested method."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

import pytest
from pluggy import PluginManager

import vq_core.api.attend
import vq_kivi.method
from vq_core import hookspecs
from vq_core.testing import CodecConformance, NumbersConformance, load_plugin
from vq_core.testing.registering import record_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HOOKS = {name: f for name, f in vars(hookspecs).items() if name.startswith("vq_") and inspect.isfunction(f)}
METHODS = [load_plugin(path) for path in sorted((ROOT / "tests/methods").glob("*.py"))]


def blocks(page: str, language: str = "python") -> list[str]:
    """Fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def arguments(hook: str) -> list[str]:
    return list(inspect.signature(HOOKS[hook]).parameters)


def test_there_are_hooks() -> None:
    manager = PluginManager("vq")
    manager.add_hookspecs(hookspecs)
    assert {name for name in vars(manager.hook) if name.startswith("vq_")} == set(HOOKS) >= {"vq_method", "vq_attend"}


@pytest.mark.parametrize("hook", HOOKS)
def test_specification_describes_its_arguments(hook: str) -> None:
    text = inspect.getdoc(HOOKS[hook]) or ""
    assert len(text) > 80, f"{hook} is hardly described"
    for name in arguments(hook):
        assert re.search(rf"^\s*{name}: \S", text, re.MULTILINE), f"{hook} does not describe its argument {name!r}"


@pytest.mark.parametrize("hook", HOOKS)
def test_reference_page_has_the_signature(hook: str) -> None:
    assert f"| `{hook}({', '.join(arguments(hook))})` |" in (DOCS / "hooks.md").read_text()


def test_reference_page_knows_no_other_hooks() -> None:
    for page in ("hooks.md", "writing-a-method.md"):
        assert set(re.findall(r"\bvq_[a-z]+\b", (DOCS / page).read_text())) - {"vq_core"} <= set(HOOKS)


def test_reference_page_has_both_halves_of_attention() -> None:
    page = (DOCS / "hooks.md").read_text()
    for half in (vq_core.api.attend.KeyAttention, vq_core.api.attend.ValueAttention):
        for name, function in vars(half).items():
            if isinstance(function, types.FunctionType) and not name.startswith("_"):
                named = [p for p in inspect.signature(function).parameters if p != "self"]
                assert f"`{name}({', '.join(named)})`" in page, name


@pytest.mark.parametrize("hook", HOOKS)
def test_a_tested_method_implements_it(hook: str) -> None:
    assert any(hasattr(getattr(plugin, hook, None), "vq_impl") for plugin in (*METHODS, vq_kivi.method)), hook


def example(tmp_path: Path) -> types.ModuleType:
    found = [block for block in blocks("hooks.md") if "def vq_method" in block]
    assert len(found) == 1
    lines = [line for line in found[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 30, f"the complete example has {len(lines)} lines"
    file = tmp_path / "int8.py"
    file.write_text(found[0])
    return load_plugin(file)


def test_complete_example_works(tmp_path: Path) -> None:
    plugin = example(tmp_path)
    assert record_of(plugin).name == "int8"
    kit = type("Example", (CodecConformance, NumbersConformance), {"method": "int8", "plugin": plugin})()
    with kit._registered():
        for side in ("keys", "values"):
            kit.test_round_trip("int8", side, "bfloat16")
            kit.test_blocks_one_by_one("int8", side)
            kit.test_gaussian_error("int8", side)
            kit.test_scale("int8", side)
            kit.test_zero_vectors("int8", side)
            kit.test_nan_and_inf_stay("int8", side, float("nan"))
            kit.test_extremes("int8", side, "float16", 60000.0)
