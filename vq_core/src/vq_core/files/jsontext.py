"""JSON from somewhere else: a value, or one typed error."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from vq_core.errors import FormatError


def parse(text: str | bytes, what: str) -> Any:
    """Read JSON; ``what`` names it in errors.

    Raises:
        FormatError: no UTF-8, no JSON, a name given twice in one object, NaN or infinity, or nesting without end.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from None
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    except ValueError as error:  # JSON and UTF-8 errors, and whole numbers beyond Python's limit of digits
        raise FormatError(f"{what} is not valid JSON: {error}") from None


def dump(value: Any) -> str:
    """JSON in the one form that equal values share; ASCII, so that any text can be stored.

    Raises:
        ValueError: NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def whole(value: Any, what: str, low: int = 0, high: int = 2**31 - 1) -> int:
    """``value`` if it is a whole number within the bounds (a bool is none).

    Raises:
        FormatError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FormatError(f"{what} must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def wholes(value: Any, what: str, count: int | None = None) -> list[int]:
    """``value`` if it is a list of whole numbers from 0 on, of ``count`` where given.

    Raises:
        FormatError: it is not.
    """
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise FormatError(f"{what} must be a list of {'' if count is None else count} numbers, not {shown(value)}")
    return [whole(n, what) for n in value]


def record(value: Any, what: str, *keys: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """``value`` if it is an object with exactly these keys.

    Raises:
        FormatError: it is not.
    """
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be an object, not {shown(value)}")
    missing = [key for key in keys if key not in value]
    strange = [key for key in value if key not in keys and key not in optional]
    if missing or strange:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has {shown(', '.join(map(str, strange)))}, which nobody knows"] if strange else []
        raise FormatError(f"{what} {' and '.join(parts)}")
    return value


def text(value: Any, what: str, longest: int = 1000) -> str:
    """``value`` if it is text of a sensible length.

    Raises:
        FormatError: it is not.
    """
    if not isinstance(value, str) or len(value) > longest:
        raise FormatError(f"{what} must be text of at most {longest} letters, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value in an error message: short, and printable whatever it holds."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    line = ascii(value)
    return line if len(line) <= 80 else f"{line[:77]}..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise FormatError(f"{shown(twice)} is given twice")
    return found


def _refuse(name: str) -> NoReturn:
    raise FormatError(f"{name} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise FormatError(f"{shown(digits)} is out of range")
    return value
