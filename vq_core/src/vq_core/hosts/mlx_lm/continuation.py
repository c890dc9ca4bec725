"""Where a generation ended: its caches and what the next prompt needs to know, in memory or in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import attrs

from vq_core.errors import CacheStateError, FormatError, SettingsError
from vq_core.files import jsontext
from vq_core.hosts.mlx_lm.chat import Ending, State, check_arguments
from vq_core.hosts.mlx_lm.context import vocabulary
from vq_core.hosts.mlx_lm.handle import CompressedModel

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
        """For a file.

        Raises:
            SettingsError: arguments of the template that no JSON can hold.
        """
        facts = {
            "version": VERSION, "count": self.count, "tokens": self.tokens, "state": self.ending.state,
            "last": self.ending.last, "template": self.template, "model": self.model,
        }  # fmt: skip
        try:
            check_arguments(self.template, "the cache cannot be saved")
            return {KEY: json.dumps(facts, allow_nan=False)}
        except (TypeError, ValueError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(
                f"the cache cannot be saved: JSON has no place for an argument of the chat template ({error})"
            ) from error

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
    last = [] if found.ending.last is None else [found.ending.last]
    owner = model.model if isinstance(model, CompressedModel) else model
    check_tokens([*(found.tokens or []), *last], owner, f"{file}: the entry {KEY!r} of its metadata")
    found.caches = caches
    return found


def check_tokens(tokens: Sequence[int], model: Any, what: str) -> None:
    """Raise :class:`FormatError` where tokens that were read from somewhere are not among those that a model knows."""
    if not tokens:
        return
    known = vocabulary(model)
    if wrong := next((token for token in tokens if not 0 <= token < known), None):
        raise FormatError(
            f"{what} names the token {jsontext.shown(wrong)}, and {type(model).__name__} knows 0 to {known - 1}"
        )


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


def check_target(path: str | Path, what: str = "the cache") -> None:
    """Raise :class:`SettingsError` if a file cannot be written there; what is there stays as it is.

    A symbolic link is followed, one that leads to no file yet too: the link itself is never touched.
    """
    file = Path(path).expanduser()
    try:
        file = Path(os.path.realpath(file))
        if file.is_symlink():
            raise SettingsError(f"{what} cannot be saved: the symbolic link {file} leads in a circle")
        if file.is_dir():
            raise SettingsError(f"{what} cannot be saved: {file} is a folder; name a file in it")
        if not file.parent.is_dir():
            raise SettingsError(f"{what} cannot be saved: there is no folder {file.parent}; make it first")
        there = file.exists()
        if there and not file.is_file():  # opening a pipe waits for its reader, and a device keeps nothing
            raise SettingsError(f"{what} cannot be saved: {file} is a pipe, a device or a socket; name a file")
        # Only opening it tells: rights, a read-only disk, a name that is too long.
        with file.open("ab" if there else "xb"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        raise SettingsError(f"{what} cannot be saved to {file}: {error.strerror or error}") from error


def _read(text: str, file: Path) -> Continuation:
    what = f"{file}: the entry {KEY!r} of its metadata"
    facts = jsontext.parse(text, what)
    try:
        version, count, tokens = facts["version"], facts["count"], facts["tokens"]
        state, last, template, model = (facts[name] for name in ("state", "last", "template", "model"))
    except (KeyError, TypeError) as error:
        raise FormatError(f"{what} is damaged: {error!r}") from None
    if version != VERSION:
        raise FormatError(f"{what} has version {jsontext.shown(version)}; this vq reads version {VERSION}")
    right = (
        _whole(count)
        and (tokens is None or (isinstance(tokens, list) and len(tokens) == count and all(map(_whole, tokens))))
        and state in get_args(State)
        and (last is None or _whole(last))
        and isinstance(template, dict)
        and isinstance(model, str)
    )
    if not right:
        raise FormatError(f"{what} is damaged: values of the wrong kind")
    try:
        check_arguments(template, what)
    except SettingsError as error:
        raise FormatError(str(error)) from None
    return Continuation([], count, tokens, Ending(state, last), template, model)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
