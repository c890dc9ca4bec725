"""Caches in a file: ``save_cache`` and ``load_cache``.

The file is a :mod:`vq_core.files.tensors` file whose description has one entry a layer: a class of a fixed list
and its state.  Nothing in it is run or imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

import vq_core
from vq_core.cache.shell import PackedKVCache
from vq_core.cache.state import checked, describe, rebuild
from vq_core.errors import FormatError, SettingsError
from vq_core.files import jsontext, tensors
from vq_core.files.jsontext import shown
from vq_core.hosts.mlx_lm import native
from vq_core.hosts.mlx_lm.expected import expected
from vq_core.hosts.mlx_lm.fingerprint import differences, fingerprint
from vq_core.hosts.mlx_lm.native import Described
from vq_core.hosts.mlx_lm.versions import check_saved, check_version

FORMAT = tensors.Format("vq-cache", 1)
DEEPEST = 4
"""Lists of caches within lists of caches that are read."""


def save_cache(
    path: str | os.PathLike[str], caches: Sequence[Any], *, model: Any = None, metadata: dict[str, str] | None = None
) -> None:
    """Save a model's caches in one file; the file is the old one or the new one, whole, at every moment.

    Args:
        path: The file. A symbolic link is followed.
        caches: One cache a layer: ours, mlx-lm's own, empty ones too.
        model: The model that filled them, or what :func:`~vq_core.compress` returned for it: its fingerprint is
            stored, so that :func:`load_cache` can tell another model. The caches must fit it.
        metadata: Text by name, to be kept with the caches; :func:`read_metadata` reads it.

    Raises:
        SettingsError: caches or metadata that cannot be saved, caches that do not fit ``model``, a path that
            cannot be written. The file is as it was.
        HostError: an mlx-lm that vq does not know.
    """
    version = check_version()
    texts = metadata or {}
    if not isinstance(texts, Mapping) or not all(isinstance(t, str) for pair in texts.items() for t in pair):
        raise SettingsError("metadata must be a dictionary of text by text")
    if not isinstance(caches, list | tuple) or not caches:
        raise SettingsError(f"caches must be a list of at least one cache, got {shown(caches)}")
    arrays: dict[str, mx.array] = {}
    try:
        layers = [_entry(cache, str(i), arrays) for i, cache in enumerate(caches)]
        _ = [_made(entry, arrays, set()) for entry in layers]  # what load would refuse is refused now
    except FormatError as error:
        raise SettingsError(f"save_cache: {error}") from error
    description = {
        "versions": {"vq_core": vq_core.__version__, "mlx_lm": version},
        "metadata": dict(texts), "model": None, "layers": layers,
    }  # fmt: skip
    if model is not None:
        goal = expected(model)
        wrong = goal.differences(layers, arrays)
        if wrong:
            raise SettingsError(f"save_cache: the caches do not fit the model: {'; '.join(wrong)}")
        description["model"] = fingerprint(goal.model)
    tensors.write(path, FORMAT, description, arrays)


def load_cache(path: str | os.PathLike[str], *, model: Any = None) -> list[Any]:
    """The caches of a file that :func:`save_cache` wrote, every array evaluated.

    Args:
        path: The file.
        model: The model that is to go on with the caches, or what :func:`~vq_core.compress` returned for it. Then
            the model's fingerprint (if the file has one), the number of layers, each layer's kind of cache, head
            sizes and dtype and, for a compressed model, its methods and settings must be those of the file.

    Raises:
        FormatError: no such file, a damaged one, one of another format, version or model, or caches that do not
            fit ``model``; all differences are named.
        SettingsError: a method that is not installed (the message has the pip line), or a ``model`` that is none.
        PluginError: an installed method that cannot be used.
        HostError: an mlx-lm that vq does not know.
    """
    check_version()
    goal = None if model is None else expected(model)
    with tensors.Reader(path, FORMAT) as reader:
        description = _checked(reader.header)
        layers, described = description["layers"], _described(reader.header)
        _check_entries(layers, described)
        if goal is not None:
            wrong = goal.differences(layers, described)
            if description["model"] is not None:
                wrong = differences(description["model"], fingerprint(goal.model)) + wrong
            if wrong:
                raise FormatError(f"the caches do not fit the model: {'; '.join(wrong)}")
            layers = goal.with_files_of_the_model(layers)
        arrays = reader.tensors()
    taken: set[str] = set()
    caches = [_made(entry, arrays, taken) for entry in layers]
    return caches if goal is None else goal.adopt(caches)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata that a file was saved with; the header is checked, the arrays are not read.

    Raises:
        FormatError: as :func:`load_cache`.
    """
    found: dict[str, str] = _checked(tensors.read_header(path, FORMAT))["metadata"]
    return found


# ---- the description


def _entry(cache: Any, name: str, arrays: dict[str, mx.array], depth: int = 0) -> dict[str, Any]:
    kind = type(cache).__name__
    if type(cache) is PackedKVCache:
        description, held = describe(cache)
        arrays |= {f"{name}.{key}": array for key, array in held.items()}
        return {"class": "PackedKVCache", "name": name, "state": description}
    from mlx_lm.models import cache as known

    # The very class: one of somebody else's may have the name of mlx-lm's.
    if type(cache) is getattr(known, kind, None):
        if kind == "CacheList" and depth < DEEPEST:
            children = [_entry(c, f"{name}.{i}", arrays, depth + 1) for i, c in enumerate(cache.caches)]
            return {"class": kind, "caches": children}
        if kind in native.CLASSES:
            return {"class": kind, "state": native.encode(cache.state, name, arrays)}
    raise FormatError(_unknown(f"{type(cache).__module__}.{type(cache).__qualname__}"))


def _unknown(kind: str) -> str:
    return f"caches of the class {kind} are not known; known are PackedKVCache, CacheList, {', '.join(native.CLASSES)}"


def _checked(header: tensors.Header) -> dict[str, Any]:
    what = "the file's description"
    content = jsontext.record(header.description, what, "versions", "metadata", "model", "layers")
    versions = jsontext.record(content["versions"], "the versions", "vq_core", "mlx_lm")
    for name, value in versions.items():
        jsontext.text(value, f"the version of {name}", 100)
    check_saved(versions["mlx_lm"])
    texts = content["metadata"]
    if not isinstance(texts, dict) or not all(isinstance(value, str) for value in texts.values()):
        raise FormatError("the metadata must be text by name")
    if content["model"] is not None and not isinstance(content["model"], dict):
        raise FormatError("the model's fingerprint must be an object")
    if not isinstance(content["layers"], list) or not content["layers"]:
        raise FormatError("the layers must be a list of at least one")
    return content


def _described(header: tensors.Header) -> dict[str, Described]:
    return {n: Described(shape, tensors.DTYPES[dtype]) for n, (dtype, shape, _) in header.tensors.items()}


def _check_entries(layers: list[Any], described: Mapping[str, Described]) -> None:
    taken: set[str] = set()
    for entry in layers:
        for kind, one in _walk(entry):
            if kind == "PackedKVCache":
                description = checked(one["state"])
                taken.update(_prefixed(one, description, described, taken))
            else:
                _native(one, described, taken)
    if len(taken) != len(described):
        left = [name for name in described if name not in taken]
        raise FormatError(f"the file has arrays that no cache names: {shown(', '.join(left))}")


def _walk(entry: Any, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every cache of an entry that is no list of caches, with its class."""
    kind = entry.get("class") if isinstance(entry, dict) else None
    if kind == "CacheList" and depth < DEEPEST:
        children = jsontext.record(entry, "a CacheList", "class", "caches")["caches"]
        if not isinstance(children, list) or not children:
            raise FormatError("a CacheList must have caches")
        for child in children:
            yield from _walk(child, depth + 1)
    elif kind == "PackedKVCache":
        yield kind, jsontext.record(entry, "a PackedKVCache", "class", "name", "state")
    elif isinstance(kind, str) and kind in native.CLASSES:
        yield kind, jsontext.record(entry, f"a {kind}", "class", "state")
    else:
        raise FormatError(_unknown(shown(kind)))


def _prefixed(
    entry: dict[str, Any], description: dict[str, Any], arrays: Mapping[str, Any], taken: set[str]
) -> dict[str, str]:
    """The names in the file of one of our caches' arrays, and in its description."""
    prefix, names = jsontext.text(entry["name"], "a cache's name", 100), description.get("arrays", [])
    found = {f"{prefix}.{name}": name for name in names if isinstance(name, str)}
    wrong = [name for name in found if name not in arrays or name in taken]
    if len(found) != len(names) or wrong:
        raise FormatError(f"arrays that are missing or named twice: {shown(', '.join(wrong) or names)}")
    return found


def _native(entry: dict[str, Any], arrays: Mapping[str, Any], taken: set[str]) -> Any:
    return native.make(entry["class"], native.decode(entry["state"], arrays, taken))


def _made(entry: dict[str, Any], arrays: Mapping[str, Any], taken: set[str]) -> Any:
    """The cache of a checked entry."""
    if entry["class"] == "CacheList":
        from mlx_lm.models import cache as known

        make: Any = known.CacheList
        return make(*(_made(child, arrays, taken) for child in entry["caches"]))
    if entry["class"] != "PackedKVCache":
        return _native(entry, arrays, taken)
    names = _prefixed(entry, entry["state"], arrays, taken)
    taken.update(names)
    cache = PackedKVCache.__new__(PackedKVCache)
    rebuild(cache, entry["state"], {short: arrays[name] for name, short in names.items()})
    return cache
