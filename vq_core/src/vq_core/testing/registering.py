"""Methods that no installed distribution offers, made usable for a test."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pluggy import PluginManager, PluginValidationError

from vq_core.api.facts import API_VERSION, MethodFacts
from vq_core.errors import PluginError
from vq_core.plugins import registry
from vq_core.plugins.loader import check_hooks
from vq_core.plugins.records import MethodRecord

DISTRIBUTION = "in-test"

_versions: dict[int, tuple[Any, str]] = {}


def load_plugin(path: str | Path) -> ModuleType:
    """The module in a file, which need not be importable by name; each file is loaded once."""
    file = Path(path).resolve()
    name = f"_vq_testing_{file.stem}_{zlib.crc32(str(file).encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PluginError(f"{file} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # attrs and pickle look the module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever the file raises goes on; half a module must not be found by the next import
        del sys.modules[name]
        raise
    return module


def record_of(plugin: Any, name: str | None = None) -> MethodRecord:
    """A record of a plugin object, checked as the loader checks an installed one.

    Raises:
        PluginError: hooks that are missing, unmarked or of a wrong signature; facts of another API version.
    """
    manager = PluginManager("vq")
    manager.register(plugin, "plugin")
    caller = getattr(manager.hook, "vq_method", None)
    facts = next(iter(caller()), None) if caller is not None else None
    if not isinstance(facts, MethodFacts):
        raise PluginError(f"{plugin!r}: vq_method must be there, marked with hookimpl, and return a MethodFacts")
    if facts.api_version != API_VERSION:
        raise PluginError(f"method {facts.name!r}: API version {facts.api_version}, this vq-core has {API_VERSION}")
    try:
        check_hooks(plugin, facts.name)
    except PluginValidationError as error:
        raise PluginError(f"method {facts.name!r}: {error}") from error
    # One version for one object: what is bound once stays bound when it is registered again.
    _, version = _versions.setdefault(id(plugin), (plugin, f"0+test{len(_versions)}"))
    where = getattr(plugin, "__file__", None) or type(plugin).__qualname__
    return MethodRecord(
        name or facts.name, "ok", DISTRIBUTION, version, str(where), facts.api_version, facts=facts, plugin=plugin
    )


@contextmanager
def registered(plugin: Any, name: str | None = None) -> Iterator[MethodRecord]:
    """Make a method usable by name for the time of a ``with`` block.

    Args:
        plugin: A module or an instance with the hooks.
        name: Name to register it under, by default the one that its facts give.

    Raises:
        PluginError: a plugin that does not fit the hook specifications.
        SettingsError: a name that is taken.
    """
    record = record_of(plugin, name)
    known = [r for r in registry.list_methods() if r.name == record.name and r.plugin is plugin]
    if known:  # an outer block has registered it
        yield known[0]
        return
    registry.add_record(record)
    try:
        yield record
    finally:
        registry.remove_record(record)
