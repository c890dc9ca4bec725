"""Files of learnt constants: whose they are, and whether they may serve a layer side.

A file is one method's with one set of settings, of one model.  It has an entry for each layer side, and says of each
for how many heads of what size it was learnt.  A file without a model (:mod:`vq_core.calibration.stand_in`) serves
caches outside of models, and no other.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from vq_core.api.calibration import Artifact
from vq_core.api.facts import SIDES, PrepareContext
from vq_core.api.settings import build_settings, format_choice, format_value, parse_choice
from vq_core.errors import FormatError, SettingsError, UnsupportedShapeError
from vq_core.files import jsontext
from vq_core.files.jsontext import shown

if TYPE_CHECKING:
    import mlx.core as mx

    from vq_core.plugins.choice import SideChoice
    from vq_core.plugins.records import MethodRecord

FORMAT_NAME, FORMAT_VERSION = "vq-calibration", 1
DESCRIPTION = ("method", "settings", "model", "learnt", "entries")
LEARNT = ("vq_core", "tokens", "text", "samples", "seed", "rounds")
ENTRY = ("layer", "side", "kv_heads", "head_dim", "arrays")
SETTING = "artifact"
HINT = "; vq calibrate makes one"


@attrs.frozen
class Place:
    """The layer side that an entry is for; without a layer outside of models."""

    layer: int | None
    side: str
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, ctx: PrepareContext) -> Place:
        """Of a side that is to be prepared."""
        return cls(ctx.layer, ctx.side, ctx.kv_heads, ctx.head_dim)


@attrs.frozen(eq=False)
class Learnt:
    """A file's content.

    Attributes:
        method: Name, distribution and version of the method.
        settings: Its settings in text form, without the file's own name.
        model: The model's identity; ``None``: of no model.
        learnt: How it was made: tokens read, hash of the text, samples, seed, rounds, version of vq-core.
        entries: The arrays of each layer side.
        digest: SHA-256 of all of it.
    """

    method: Mapping[str, str]
    settings: str
    model: str | None
    learnt: Mapping[str, Any]
    entries: Mapping[Place, Mapping[str, mx.array]]
    digest: str = ""


def plain_settings(settings: Any) -> Any:
    """The settings without the name of a file."""
    return attrs.evolve(settings, **{SETTING: ""})


def settings_text(settings: Any) -> str:
    """The settings that shape what is learnt, in text form."""
    pairs = format_choice("", settings).removeprefix(":").split(",")
    return ",".join(pair for pair in pairs if pair.partition("=")[0] != SETTING)


def elsewhere(text: str, path: str) -> str:
    """A method's text form with another file; settings are as the text spells them."""
    choice = parse_choice(text)
    pairs = (f"{name}={format_value(path if name == SETTING else value)}" for name, value in choice.options)
    return f"{choice.label}:{','.join(pairs)}"


def same_but_for_the_file(was: str, now: SideChoice) -> bool:
    """Whether a text form, every setting spelt out, is a choice's but for where its file lies: what is in the file is
    compared by digests."""
    from vq_core.plugins.registry import resolve

    facts = resolve(now.label).facts
    if facts is None or not facts.capabilities.needs_calibration:
        return was == now.text
    try:
        return elsewhere(was, "") == elsewhere(now.text, "")
    except SettingsError:
        return False


# ---- writing and reading


def write(path: str | os.PathLike[str], content: Learnt) -> str:
    """Write a file whole or not at all; equal content gives equal bytes.

    Returns:
        Its digest.

    Raises:
        SettingsError: a path that cannot be written.
    """
    from vq_core.files import tensors

    entries: list[dict[str, Any]] = []
    arrays: dict[str, mx.array] = {}
    for number, (place, held) in enumerate(content.entries.items()):
        entries.append(attrs.asdict(place) | {"arrays": sorted(held)})
        arrays |= {f"{number}.{name}": held[name] for name in sorted(held)}
    description = {
        "method": dict(content.method), "settings": content.settings, "model": content.model,
        "learnt": dict(content.learnt), "entries": entries,
    }  # fmt: skip
    tensors.write(path, tensors.Format(FORMAT_NAME, FORMAT_VERSION), description, arrays)
    return read(path).digest


def read(path: str | os.PathLike[str]) -> Learnt:
    """A whole file, every byte checked; kept until the file is another one.

    Raises:
        FormatError: no file, a damaged one, one of another format or version.
    """
    name = os.path.expanduser(os.fspath(path))
    try:
        found = os.stat(name)
        content = _read(os.path.realpath(name), found.st_ino, found.st_size, found.st_mtime_ns)
        _seen[content.digest] = os.fspath(path)
        return content
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
    raise FormatError(f"the artifact {shown(str(path))} cannot be read: {said}{HINT}")


def with_digest(digest: str) -> str | None:
    """Where a file of this content lies, if one was read in this process and still is there."""
    path = _seen.get(digest)
    try:
        return path if path is not None and read(path).digest == digest else None
    except FormatError:
        return None


_seen: dict[str, str] = {}
"""By digest the last file of that content, a line of text each."""


@functools.lru_cache(8)
def _read(name: str, inode: int, size: int, changed: int) -> Learnt:
    from vq_core.files import tensors

    with tensors.Reader(name, tensors.Format(FORMAT_NAME, FORMAT_VERSION)) as reader:
        content = _checked(reader.header.description)
        whole = jsontext.dump(content) + reader.header.data_sha256
        arrays = reader.tensors()
    entries: dict[Place, dict[str, mx.array]] = {}
    for number, entry in enumerate(content["entries"]):
        place = Place(entry["layer"], entry["side"], entry["kv_heads"], entry["head_dim"])
        names = {key: f"{number}.{key}" for key in entry["arrays"]}
        if place in entries or any(key not in arrays for key in names.values()):
            raise FormatError(f"entry {number}, {_said(place)}, is there twice, or without its arrays")
        entries[place] = {key: arrays[of] for key, of in names.items()}
    if sum(map(len, entries.values())) != len(arrays):
        raise FormatError("it has arrays that no entry names")
    digest = hashlib.sha256(whole.encode()).hexdigest()
    return Learnt(content["method"], content["settings"], content["model"], content["learnt"], entries, digest)


def _checked(description: Any) -> dict[str, Any]:
    content = jsontext.record(description, "the description of an artifact", *DESCRIPTION)
    for name, value in jsontext.record(content["method"], "its method", "name", "distribution", "version").items():
        jsontext.text(value, f"the {name} of its method", 200)
    jsontext.text(content["settings"], "its settings")
    if content["model"] is not None:
        jsontext.text(content["model"], "its model")
    jsontext.record(content["learnt"], "how it was learnt", *LEARNT)
    if not isinstance(content["entries"], list) or not content["entries"]:
        raise FormatError("an artifact must have entries")
    for entry in content["entries"]:
        jsontext.record(entry, "an entry", *ENTRY)
        if entry["layer"] is not None:
            jsontext.whole(entry["layer"], "the layer of an entry")
        if entry["side"] not in SIDES:
            raise FormatError(f"the side of an entry must be keys or values, not {shown(entry['side'])}")
        for name in ("kv_heads", "head_dim"):
            jsontext.whole(entry[name], f"{name} of an entry", low=1)
        if not isinstance(entry["arrays"], list) or not all(isinstance(a, str) for a in entry["arrays"]):
            raise FormatError("the arrays of an entry must be names")
    return content


# ---- whether it may serve


def artifact_of(record: MethodRecord, choice: SideChoice, ctx: PrepareContext) -> Artifact | None:
    """What was learnt for a layer side, from the file that the settings name; ``None`` where nothing is needed.

    Raises:
        SettingsError: no file is named, or one of another method, other settings, another model or other layers.
        FormatError: no file, a damaged one, one of another format or version.
        UnsupportedShapeError: a head size that the method refuses, or one of another number of heads or head size.
    """
    if record.facts is None or not record.facts.capabilities.needs_calibration:
        return None
    check_size(record, ctx.head_dim)
    path, wanted = getattr(choice.settings, SETTING), settings_text(choice.settings)
    command = f"vq calibrate MODEL --method {record.name}:{wanted} --text FILE --out FILE"
    if not path:
        raise SettingsError(
            f"method {choice.label!r} needs an artifact, constants learnt from the model: {command}, then "
            f"{record.name}:{wanted},{SETTING}=FILE"
        )
    where = f"the artifact {shown(path)}"
    try:
        file = read(path)
    except FormatError as error:
        said = str(error)
        said = said if said.startswith("the artifact") else f"{where}: {said}; make it again: {command}"
        raise FormatError(said) from None
    wrong = _whose(file, record, choice, ctx)
    if wrong:
        raise SettingsError(f"{where} {wrong}; make one: {command}")
    return Artifact(_entry(file, ctx, where, command), file.digest)


def check_size(record: MethodRecord, head_dim: int) -> None:
    """Before anything is asked for or learnt: no file would help.

    Raises:
        UnsupportedShapeError: a head size that is none of those that the method declares.
    """
    assert record.facts is not None
    able = record.facts.capabilities
    if able.head_dims is not None and head_dim not in able.head_dims:
        raise UnsupportedShapeError(
            f"method {record.name!r}: head size {head_dim} is refused with any artifact; accepted are {able.sizes}"
        )


def _whose(file: Learnt, record: MethodRecord, choice: SideChoice, ctx: PrepareContext) -> str:
    """Why a file is not this method's with these settings, or not this model's; nothing if it is."""
    owner = (file.method["distribution"], file.method["name"])
    if owner != (record.distribution, record.name):
        return f"is of the method {owner[1]!r} of {owner[0]}, not of {record.name!r} of {record.distribution}"
    facts = record.facts
    assert facts is not None
    try:
        options = parse_choice(f"{record.name}:{file.settings}").options
        same = build_settings(record.name, facts.settings, options) == plain_settings(choice.settings)
    except SettingsError:
        same = False
    if not same:
        return f"was learnt with {file.settings}, not with {settings_text(choice.settings)}: give the same settings"
    if file.model != ctx.model:
        whose = "no model (a stand-in)" if file.model is None else f"the model {file.model}"
        asked = "a cache of no model (vq_core.compress makes a model's)" if ctx.model is None else f"of {ctx.model}"
        return f"is of {whose}, not {asked}" if ctx.model else f"is of {whose}; this is {asked}"
    return ""


def _entry(file: Learnt, ctx: PrepareContext, where: str, command: str) -> Mapping[str, mx.array]:
    asked = Place.of(ctx)
    if asked in file.entries:
        return file.entries[asked]
    there = [p for p in file.entries if (p.layer, p.side) == (asked.layer, asked.side)]
    if there:
        raise UnsupportedShapeError(
            f"{where} has {_listed(there)}, and none for {_said(asked)}; make one of this model: {command}"
        )
    raise SettingsError(f"{where} has {_listed(list(file.entries))}, and none for {_said(asked)}; make one: {command}")


def _listed(places: Sequence[Place]) -> str:
    said = [_said(place) for place in places]
    return ", ".join(said) if len(said) <= 4 else f"{said[0]} and {len(said) - 1} more"


def _said(place: Place) -> str:
    layer = "" if place.layer is None else f"layer {place.layer}: "
    return f"{layer}{place.side} of {place.kv_heads} heads of {place.head_dim}"


def chosen(text: str) -> tuple[MethodRecord, Any]:
    """A method that needs calibration and its checked settings, from its text form without a file.

    Raises:
        SettingsError: a method that needs none, or a text that names a file.
    """
    from vq_core.plugins.registry import resolve

    choice = parse_choice(text)
    record = resolve(choice.label)
    assert record.facts is not None
    if not record.facts.capabilities.needs_calibration:
        raise SettingsError(f"method {choice.label!r} needs no calibration: use it as it is")
    settings = build_settings(choice.label, record.facts.settings, choice.options)
    if getattr(settings, SETTING):
        raise SettingsError(f"leave {SETTING}= out of the method {text!r}: calibrating makes the file")
    return record, settings
