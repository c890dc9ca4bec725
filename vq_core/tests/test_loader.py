"""Loader and registry in this process; what needs a process of its own is in tests/loader."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from vq_core import hookspecs
from vq_core.api import API_VERSION, MethodFacts, PluginError, SettingsError, hookimpl, setting
from vq_core.plugins import diagnose, loader, registry
from vq_core.plugins.records import MethodRecord


@attrs.frozen
class Settings:
    bits: int = setting(2, accepted=(2, 4))


def facts(name: str = "toy", **changes: Any) -> MethodFacts:
    return MethodFacts(name=name, summary="a toy", settings=Settings, **changes)


def plugin(**changes: Any) -> SimpleNamespace:
    """A method that loads, with some attributes replaced; ``None`` removes one."""
    hooks: dict[str, Any] = {
        "vq_method": hookimpl(lambda: facts()),
        "vq_prepare": hookimpl(lambda ctx: 1),
        "vq_layout": hookimpl(lambda ctx: None),
        "vq_encode": hookimpl(lambda state, x: x),
        "vq_pack": hookimpl(lambda codes: codes),
        "vq_decode": hookimpl(lambda packed: packed),
    }
    return SimpleNamespace(**{name: hook for name, hook in (hooks | changes).items() if hook is not None})


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load(plugin)`: the record of an entry point `toy = toy_module:plugin`."""

    def run(made: Any, name: str = "toy", value: str = "toy_module:plugin") -> MethodRecord:
        module = ModuleType("toy_module")
        module.plugin = made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "toy_module", module)
        entry_point = EntryPoint(name, value, loader.GROUP)
        return loader._load(loader.Offer(loader.canonical_name(name), "acme-toy", "1.0", entry_point))

    return run


def test_a_good_method(load: Any) -> None:
    record = load(plugin())
    assert (record.status, record.reason, record.traceback, record.api_version) == ("ok", "", "", API_VERSION)
    assert record.label == "acme-toy:toy"
    assert json.loads(json.dumps(record.as_dict())) == {
        "name": "toy",
        "status": "ok",
        "distribution": "acme-toy",
        "version": "1.0",
        "reason": "",
        "summary": "a toy",
        "sides": ["keys", "values"],
        "paper": "",
        "api_version": API_VERSION,
        "entry_point": "toy_module:plugin",
    }


def raises(error: BaseException) -> Any:
    def hook() -> MethodFacts:
        raise error

    return hookimpl(hook)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vq_pack": None, "vq_decode": None}, "PluginError: required hooks are missing: vq_pack, vq_decode"),
        ({"vq_method": None}, "required hooks are missing: vq_method"),
        ({"vq_method": lambda: facts()}, "vq_method is defined but not marked: put @vq_core.api.hookimpl on it"),
        ({"vq_attend": lambda state: None}, "vq_attend is defined but not marked"),
        ({"vq_method": hookimpl(lambda: {"name": "toy"})}, "must return a vq_core.api.MethodFacts, got dict"),
        ({"vq_method": hookimpl(lambda: None)}, "must return a vq_core.api.MethodFacts, got NoneType"),
        ({"vq_method": hookimpl(lambda: facts("tory"))}, "called 'toy' but toy_module:plugin calls its method 'tory'"),
        ({"vq_method": raises(RuntimeError("boom"))}, "RuntimeError: boom"),
        ({"vq_method": raises(SystemExit(4))}, "SystemExit: toy_module calls sys.exit(4)"),
        ({"vq_encode": hookimpl(lambda state, key: 1)}, "PluginValidationError: .*'key'.*vq_core.hookspecs"),
        ({"vq_encod": hookimpl(lambda state: 1)}, "unknown hook 'vq_encod'"),
        ({"vq_decode": hookimpl(lambda state: (yield), wrapper=True)}, "vq_decode is a wrapper, which would never run"),
    ],
)
def test_a_method_that_breaks_the_contract(load: Any, changes: dict[str, Any], part: str) -> None:
    record = load(plugin(**changes))
    assert record.status == "broken"
    assert part in record.reason or re.search(part, record.reason), record.reason
    assert "\n" not in record.reason
    assert "Traceback" in record.traceback
    assert record.plugin is None


def test_a_class_is_not_a_plugin(load: Any) -> None:
    assert "toy_module:plugin is a class: an entry point names a module or an instance" in load(Settings).reason


def test_entry_points_that_cannot_be_read(load: Any) -> None:
    assert "is neither 'module' nor 'module:object'" in load(plugin(), value="not a module").reason
    assert "is not made of letters, digits and '_'" in load(plugin(), name="to/y").reason


@pytest.mark.parametrize(("version", "upgrade"), [(API_VERSION - 1, "acme-toy"), (API_VERSION + 1, "vq-core")])
def test_another_api_version(load: Any, version: int, upgrade: str) -> None:
    """Told from its number, before signatures of that version are held against it."""
    changes = {"vq_method": hookimpl(lambda: facts(api_version=version)), "vq_encode": hookimpl(lambda tokens: 1)}
    record = load(plugin(**changes))
    assert record.status == "incompatible"
    assert record.api_version == version
    assert f"written for API version {version}, this vq-core has API version {API_VERSION}" in record.reason
    assert f"pip install --upgrade {upgrade}" in record.reason


def test_an_interrupt_is_the_users(load: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(plugin(vq_method=raises(KeyboardInterrupt())))


def test_an_exception_whose_text_cannot_be_made(load: Any) -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Rude" in load(plugin(vq_method=raises(Rude()))).reason


def test_required_and_bound_hooks_are_specified() -> None:
    # Kernels are asked for once a binding, through pluggy, so a wrapper around that hook runs.
    assert {*loader.REQUIRED, *loader.BOUND, "vq_kernels", "vq_snippet", "vq_device", "vq_calibrate"} == {
        name for name in vars(hookspecs) if name.startswith("vq_")
    }


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        (ModuleNotFoundError("No module named 'mlx'", name="mlx"), True),
        (ModuleNotFoundError("No module named 'mlx.core'", name="mlx.core"), True),
        (ImportError("libmlx.so: cannot open shared object file", name="core"), True),
        (ImportError("libcublas.so.13: not found", name="core", path="/x/mlx/core.so"), True),
        (ModuleNotFoundError("No module named 'mlx_lm'", name="mlx_lm"), False),
        (ImportError("cannot import name 'new' from 'mlx.core'", name="mlx.core"), False),
        (ValueError("mlx"), False),
    ],
)
def test_what_counts_as_missing_mlx(error: BaseException, missing: bool) -> None:
    assert diagnose.is_missing_mlx(error) is missing
    assert ("needs mlx" in diagnose.explain(error, module="toy", distribution="acme-toy")) is missing


@pytest.mark.parametrize(("platform", "line"), [("darwin", "pip install mlx"), ("linux", "pip install 'vq-core[cpu]'")])
def test_the_line_that_installs_mlx(monkeypatch: pytest.MonkeyPatch, platform: str, line: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    error = RuntimeError("wrapped")
    error.__cause__ = ModuleNotFoundError("No module named 'mlx'", name="mlx")
    assert f"needs mlx, which is missing or has no backend here: {line}" in diagnose.explain(
        error, module="toy", distribution="acme-toy"
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MethodRecord]]:
    """The records that the registry sees; change them before the first look."""
    records = [
        MethodRecord("bad", "broken", "acme-bad", "2.0", "bad", reason="ImportError: no such thing"),
        MethodRecord("kivi", "ok", "vq-kivi", "0.1", "kivi"),
        MethodRecord("old", "incompatible", "acme-old", "0.1", "old", reason="written for API version 0"),
        MethodRecord("quiet", "disabled", "acme-quiet", "0.1", "quiet", reason="switched off by VQ_DISABLE=quiet"),
        MethodRecord("twin", "shadowed", "acme-one", "1", "one", reason="choose with acme-one:twin or acme-two:twin"),
        MethodRecord("twin", "shadowed", "acme-two", "1", "two", reason="choose with acme-one:twin or acme-two:twin"),
    ]
    monkeypatch.setattr(registry, "_records", None)
    monkeypatch.setattr(registry, "load_all", lambda: list(records))
    yield records


@pytest.mark.usefixtures("installed")
def test_resolving_usable_methods() -> None:
    for label in ("kivi", " KIVI ", "vq-kivi:kivi", "VQ_Kivi:Kivi"):
        assert registry.resolve(label).distribution == "vq-kivi"
    chosen = registry.resolve("acme-two:twin")
    assert (chosen.distribution, chosen.status, chosen.reason) == ("acme-two", "ok", "")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("label", "error", "parts"),
    [
        ("zzz", SettingsError, ["unknown method 'zzz'", "installed: bad, kivi, old, quiet, twin"]),
        ("kiwi", SettingsError, ["unknown method 'kiwi'", "Did you mean 'kivi'?"]),
        ("ki-vi", SettingsError, ["unknown method 'ki-vi'", "Did you mean 'kivi'?"]),
        ("qjl", SettingsError, ["unknown method 'qjl'", "pip install vq-qjl"]),
        ("turbo-quant", SettingsError, ["Did you mean 'turboquant'?", "not installed: pip install vq-turboquant"]),
        ("twin", SettingsError, ["'twin' is ambiguous", "acme-one:twin or acme-two:twin"]),
        ("acme:kivi", SettingsError, ["'acme' offers no method 'kivi'", "installed: vq-kivi:kivi"]),
        ("kivi:bits", SettingsError, ["unknown method 'kivi:bits'", "Settings are written kivi:bits=VALUE"]),
        ("kivi:bits=2", SettingsError, ["expected, without settings, got 'kivi:bits=2'"]),
        ("", SettingsError, ["a method must be named"]),
        ("bad", PluginError, ["'bad' of acme-bad 2.0 is broken", "ImportError: no such thing", "vq doctor bad"]),
        ("old", PluginError, ["'old' of acme-old 0.1 is incompatible", "API version 0"]),
        ("quiet", PluginError, ["switched off by VQ_DISABLE=quiet", "take it out of VQ_DISABLE"]),
    ],
)
def test_resolving_what_cannot_be_used(label: str, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        registry.resolve(label)
    for part in parts:
        assert part in str(caught.value)


def test_resolving_where_nothing_is_installed(installed: list[MethodRecord]) -> None:
    installed.clear()
    with pytest.raises(SettingsError, match=r"unknown method 'zzz'; installed: none.*pip install vq-kivi"):
        registry.resolve("zzz")
    with pytest.raises(SettingsError, match="pip install vq-vecinfer"):
        registry.resolve("vecinfer")


def test_a_disabled_rival_does_not_make_a_name_ambiguous(installed: list[MethodRecord]) -> None:
    installed.append(MethodRecord("kivi", "disabled", "acme-kivi", "1", "kivi"))
    assert registry.resolve("kivi").distribution == "vq-kivi"


def test_records_are_cached_until_refreshed(installed: list[MethodRecord]) -> None:
    first = registry.list_methods()
    first.clear()
    assert len(registry.list_methods()) == len(installed)
    installed.append(MethodRecord("new", "ok", "acme-new", "1", "new"))
    assert "new" not in [record.name for record in registry.list_methods()]
    assert "new" in [record.name for record in registry.list_methods(refresh=True)]


def test_a_plugin_that_lists_methods_at_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_records", None)
    monkeypatch.setattr(registry, "load_all", registry.list_methods)
    with pytest.raises(PluginError, match="while methods are being loaded"):
        registry.list_methods()
    monkeypatch.setattr(registry, "load_all", lambda: [])
    assert registry.list_methods() == []
