"""Settings of methods: declaration, validation, and a text form that round-trips.

``kivi:bits=2,group_size=32`` names a method and some of its settings; what is left out has its default.  A
distribution in front (``vq-kivi:kivi:bits=2``) chooses between two that offer one name.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote, unquote

import attrs

from vq_core.errors import PluginError, SettingsError

_SAFE = "/._-+~"
"""What a value shows as it is; everything else that is no letter or digit is written as %XX, as in an address."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def setting(
    default: Any,
    *,
    accepted: Iterable[Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    help: str = "",
) -> Any:
    """One setting of a method: an attrs field that checks its value.

    Args:
        default: Value when the user gives none.
        accepted: The values allowed.
        minimum: Smallest value allowed.
        maximum: Largest value allowed.
        help: One line: what it does, and what it costs in bytes.
    """
    if default is None:
        raise PluginError("a setting needs a default of its own type, not None: choose a value that means 'none'")
    choices = None if accepted is None else tuple(accepted)
    if choices is not None:
        said = "one of " + ", ".join(map(str, choices))
    else:
        said = " and ".join(
            f"{word} {bound}" for word, bound in (("at least", minimum), ("at most", maximum)) if bound is not None
        )

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        kind = type(default)
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            fits = True
        if (
            not fits
            or value != value  # NaN passes every comparison
            or (choices is not None and value not in choices)
            or (minimum is not None and value < minimum)
            or (maximum is not None and value > maximum)
        ):
            wanted = said or f"a value of type {kind.__name__}"
            raise SettingsError(f"{attribute.name}={value!r} is not accepted: {attribute.name} must be {wanted}")

    return attrs.field(default=default, validator=check, metadata={"help": help, "accepted": said, "choices": choices})


@attrs.frozen
class MethodChoice:
    """A method with its settings still in text: ``[distribution:]name[:key=value,...]``."""

    name: str
    distribution: str | None = None
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """Name by which the registry is asked."""
        return f"{self.distribution}:{self.name}" if self.distribution else self.name


def canonical_name(name: str) -> str:
    """The one spelling of a method's name: lower case, ``_`` for ``-``, ``.`` and spaces."""
    return re.sub(r"[-_.\s]+", "_", name.strip()).lower()


def parse_choice(text: str) -> MethodChoice:
    """Split ``[distribution:]name[:key=value,...]``.

    Raises:
        SettingsError: if the text does not have that form.
    """
    form = "accepted: name, name:key=value,key=value or distribution:name:key=value"
    if not isinstance(text, str) or not text.strip():
        raise SettingsError(f"a method must be named by a text such as 'kivi:bits=2', got {text!r}")
    parts = [part.strip() for part in text.split(":")]
    options = ""
    if len(parts) > 1 and ("=" in parts[-1] or not parts[-1]):
        options = parts.pop()
    if len(parts) > 2 or not all(parts) or any("=" in part for part in parts):
        raise SettingsError(f"cannot read the method {text!r}; {form}")
    pairs: list[tuple[str, str]] = []
    for item in filter(None, (piece.strip() for piece in options.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or not key:
            raise SettingsError(f"cannot read {item!r} in the method {text!r}; {form}")
        if key in dict(pairs):
            raise SettingsError(f"{key!r} is given twice in the method {text!r}")
        pairs.append((key, unquote(value)))
    distribution = parts[0] if len(parts) == 2 else None
    return MethodChoice(canonical_name(parts[-1]), distribution, tuple(pairs))


def build_settings(method: str, cls: type, options: Iterable[tuple[str, str]]) -> Any:
    """Make a settings object from text pairs.

    Raises:
        SettingsError: for an unknown setting, a value that cannot be read, or one that is not accepted.
    """
    fields = {field.name: field for field in attrs.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, text in options:
        if key not in fields:
            raise SettingsError(f"method {method!r} has no setting {key!r}; it has: {', '.join(fields) or 'none'}")
        try:
            values[key] = _READERS.get(hints.get(key, str), str)(text)
        except ValueError:
            kind = getattr(hints[key], "__name__", hints[key])
            raise SettingsError(f"method {method!r}: cannot read {key}={text!r} as {kind}") from None
    try:
        return cls(**values)
    except SettingsError as error:
        raise SettingsError(f"method {method!r}: {error}") from None


def format_choice(name: str, settings: Any) -> str:
    """The text form with every setting spelt out; :func:`parse_choice` and :func:`build_settings` undo it."""
    pairs = ",".join(f"{f.name}={format_value(getattr(settings, f.name))}" for f in attrs.fields(type(settings)))
    return f"{name}:{pairs}" if pairs else name


def format_value(value: Any) -> str:
    """The text of one setting's value; what is no letter, digit or harmless sign is written as %XX."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote(str(value), safe=_SAFE)


def _read_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


_READERS: dict[Any, Callable[[str], Any]] = {bool: _read_bool, int: int, float: float, str: str}
