"""Where a generation ended: its caches and what the next prompt needs to know, in memory or in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import attrs

from vq_core.errors import CacheStateError, FormatError, SettingsError
from vq_core.hosts.mlx_lm.chat import Ending, State

KEY = "continuation"
"""Name of our entry in a file's metadata."""
VERSION = 1


@attrs.define(eq=False)
class Continuation:
    """The end of a generation.  Going on from it changes its caches.

    Attributes:
        caches: One a layer; they hold ``count`` tokens.
        count: Tokens read: prompts and answers, every one of them.
        tokens: Those tokens; ``None`` where a file does not say.
        ending: Where in a conversation they stop.
        template: Arguments of the chat template, which the next turn uses unless it brings its own.
        model: Name of the model.
    """

    caches: list[Any]
    count: int
    tokens: list[int] | None = None
    ending: Ending = attrs.field(factory=lambda: Ending("unknown"))
    template: dict[str, Any] = attrs.Factory(dict)
    model: str = ""

    def metadata(self) -> dict[str, str]:
        """For a file."""
        facts = {
            "version": VERSION, "count": self.count, "tokens": self.tokens, "state": self.ending.state,
            "last": self.ending.last, "template": self.template, "model": self.model,
        }  # fmt: skip
        return {KEY: json.dumps(facts)}

    def save(self, path: str | Path, model: Any) -> None:
        """Write the caches to a file that :func:`resume` reads.

        Args:
            path: The file.
            model: The model, or its handle from :func:`~vq_core.hosts.mlx_lm.compress`.

        Raises:
            SettingsError: a file that cannot be written.
        """
        from vq_core import save_cache

        check_target(path)
        save_cache(Path(path).expanduser(), self.caches, model=model, metadata=self.metadata())


def resume(path: str | Path, model: Any) -> Continuation:
    """Read what :meth:`Continuation.save`, or ``vq_core.save_cache``, has written.

    Args:
        path: The file.
        model: The model that goes on, or its handle from :func:`~vq_core.hosts.mlx_lm.compress`.

    Raises:
        SettingsError: no such file; settings that differ from the file's.
        FormatError: a file that is not what it claims to be.
    """
    from vq_core import load_cache
    from vq_core.hosts.mlx_lm.saved import read_metadata

    file = check_source(path)
    caches = load_cache(file, model=model)
    lengths = {cache.offset for cache in caches if isinstance(getattr(cache, "offset", None), int)}
    if len(lengths) > 1:
        raise CacheStateError(f"{file}: the layers hold {sorted(lengths)} tokens; a continuation needs the same of all")
    length = lengths.pop() if lengths else None
    text = read_metadata(file).get(KEY)
    if text is None:
        if length is None:
            raise FormatError(f"{file} does not say how many tokens it holds, and no layer's cache counts them")
        return Continuation(caches, length)
    found = _read(text, file)
    if length is not None and found.count != length:
        raise FormatError(f"{file} says that it holds {found.count} tokens, and its caches hold {length}")
    found.caches = caches
    return found


def check_source(path: str | Path) -> Path:
    """The file to load; :class:`SettingsError` if there is none."""
    file = Path(path).expanduser()
    try:
        found = file.is_file()
    except OSError:  # a name that no file can have
        found = False
    if not found:
        raise SettingsError(f"no cache to load: {file} is not a file")
    return file


def check_target(path: str | Path) -> None:
    """Raise :class:`SettingsError` if a file cannot be written there; what is there stays as it is."""
    file = Path(path).expanduser()
    try:
        if file.is_dir():
            raise SettingsError(f"the cache cannot be saved: {file} is a folder; name a file in it")
        if not file.parent.is_dir():
            raise SettingsError(f"the cache cannot be saved: there is no folder {file.parent}; make it first")
        there = file.exists()
        # Only opening it tells: rights, a read-only disk, a name that is too long.
        with file.open("ab"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        raise SettingsError(f"the cache cannot be saved to {file}: {error.strerror or error}") from error


def _read(text: str, file: Path) -> Continuation:
    try:
        facts = json.loads(text)
        version, count, tokens = facts["version"], facts["count"], facts["tokens"]
        state, last, template, model = (facts[name] for name in ("state", "last", "template", "model"))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{file}: the entry {KEY!r} of its metadata is damaged: {error!r}") from None
    if version != VERSION:
        raise FormatError(f"{file}: its entry {KEY!r} has version {version!r}; this vq reads version {VERSION}")
    right = (
        _whole(count)
        and (tokens is None or (isinstance(tokens, list) and len(tokens) == count and all(map(_whole, tokens))))
        and state in get_args(State)
        and (last is None or _whole(last))
        and isinstance(template, dict)
        and isinstance(model, str)
    )
    if not right:
        raise FormatError(f"{file}: the entry {KEY!r} of its metadata is damaged: values of the wrong kind")
    return Continuation([], count, tokens, Ending(state, last), template, model)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
