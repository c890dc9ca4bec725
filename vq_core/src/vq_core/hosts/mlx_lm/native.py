"""mlx-lm's own cache classes as JSON and arrays, each by its name on a list, each state checked before it is used.

A state is checked by shapes alone, so that a file's header can be judged before its arrays are read: then
:class:`Described` stands for an array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.errors import FormatError
from vq_core.files import jsontext
from vq_core.files.jsontext import shown

FLOATS = (mx.float16, mx.bfloat16, mx.float32)
GROUPS, BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
LONGEST = 2**30
"""Positions that are believed of a cache that forgets its oldest tokens, so holds no arrays to tell them by."""
COUNTERS = (mx.int32, mx.int64, mx.uint32, mx.uint64)


@attrs.frozen
class Described:
    """An array that a header describes and that is not there yet."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


def encode(state: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """A state as JSON; its arrays go to ``arrays`` under names that begin with ``name``.

    Raises:
        FormatError: something else than arrays, whole numbers, ``None`` and lists of these.
    """
    if isinstance(state, mx.array):
        arrays[name] = state
        return {"array": name}
    if isinstance(state, list | tuple):
        return [encode(item, f"{name}.{i}", arrays) for i, item in enumerate(state)]
    if state is None or (isinstance(state, int) and not isinstance(state, bool)):
        return state
    raise FormatError(f"{name} is {type(state).__name__}; a state holds arrays, whole numbers and None")


def decode(state: Any, arrays: Mapping[str, Any], taken: set[str], depth: int = 0) -> Any:
    """What :func:`encode` was given, lists for tuples; the names of the arrays go to ``taken``.

    Raises:
        FormatError: not what :func:`encode` makes, an array that is missing or is used twice.
    """
    if isinstance(state, dict):
        name = jsontext.record(state, "an array's place", "array")["array"]
        if not isinstance(name, str) or name not in arrays or name in taken:
            raise FormatError(f"array {shown(name)} is missing or named twice")
        taken.add(name)
        return arrays[name]
    if isinstance(state, list) and depth < 4:
        return [decode(item, arrays, taken, depth + 1) for item in state]
    if state is None or (isinstance(state, int) and not isinstance(state, bool)):
        return state
    raise FormatError(f"{shown(state)} in the state of a cache")


def make(name: str, state: Any) -> Any:
    """A cache of mlx-lm's class ``name``, one of :data:`CLASSES`, with a decoded state.

    Raises:
        FormatError: a state that no such cache has.
    """
    count, maker = CLASSES[name]
    if not isinstance(state, list) or len(state) != count:
        raise FormatError(f"the state of a {name} must be a list of {count}, not {shown(state)}")
    return maker(name, state)


def _module() -> Any:
    from mlx_lm.models import cache

    return cache


def _filled(cache: Any, state: Sequence[Any]) -> Any:
    cache.state = state
    return cache


def _is_array(value: Any) -> bool:
    return isinstance(value, mx.array | Described)


def _pair(name: str, keys: Any, values: Any) -> int | None:
    """Tokens that keys and values (B, H, S, D) have room for; ``None`` for an empty cache."""
    if keys is None and values is None:
        return None
    for side, x in (("keys", keys), ("values", values)):
        if not _is_array(x) or x.ndim != 4 or x.dtype not in FLOATS or 0 in x.shape[:2]:
            raise FormatError(f"the {side} of a {name} must be floating-point (B, H, S, D), not {_told(x)}")
    if keys.shape[:3] != values.shape[:3]:
        raise FormatError(f"the keys {keys.shape} and values {values.shape} of a {name} must agree in B, H and S")
    return int(keys.shape[2])


def _told(x: Any) -> str:
    return f"{x.shape} {x.dtype}" if _is_array(x) else shown(x)


def _within(name: str, offset: Any, room: int | None) -> int:
    return jsontext.whole(offset, f"the offset of a {name}", 0, room or 0)


def _plain(name: str, state: list[Any]) -> Any:
    keys, values, offset = state
    _within(name, offset, _pair(name, keys, values))
    return _filled(_module().KVCache(), state)


def _concatenated(name: str, state: list[Any]) -> Any:
    cache = _module().ConcatenateKVCache()
    return cache if _pair(name, *state) is None else _filled(cache, state)


def _rotating(name: str, state: list[Any]) -> Any:
    keys, values, offset, keep, size, index = state
    room = _pair(name, keys, values)
    jsontext.whole(size, f"the size of a {name}", 1)
    jsontext.whole(keep, f"the kept tokens of a {name}", 0, size - 1)
    jsontext.whole(index, f"the place in a {name}", 0, room or 0)
    jsontext.whole(offset, f"the offset of a {name}", 0, 0 if room is None else LONGEST)
    if room is not None and offset > room and room < size:
        raise FormatError(f"a {name} of {size} tokens that has seen {offset} and holds {room}")
    return _filled(_module().RotatingKVCache(size, keep), state)


def _chunked(name: str, state: list[Any]) -> Any:
    keys, values, offset, size, start = state
    room = _pair(name, keys, values)
    jsontext.whole(size, f"the size of a {name}", 1)
    jsontext.whole(start, f"the start of a {name}", 0, LONGEST)
    jsontext.whole(offset, f"the offset of a {name}", start, start + (room or 0))
    return _filled(_module().ChunkedKVCache(size), state)


def _arrays(name: str, state: list[Any]) -> Any:
    held, *counters = state
    if not isinstance(held, list) or not held or any(a is not None and not _is_array(a) for a in held):
        raise FormatError(f"a {name} must hold a list of arrays, not {shown(held)}")
    for a in held:
        if a is not None and (not a.ndim or not a.shape[0]):
            raise FormatError(f"an array of a {name} must have the rows in front, not {a.shape}")
    for a in counters:
        if a is not None and not (_is_array(a) and a.ndim == 1 and a.dtype in COUNTERS):
            raise FormatError(f"the padding and lengths of a {name} must be one number a row, not {_told(a)}")
    rows = {a.shape[0] for a in (*held, *counters) if a is not None}
    if len(rows) > 1:
        raise FormatError(f"the arrays of a {name} have {sorted(rows)} rows; they must agree")
    return _filled(_module().ArraysCache(len(held)), state)


def _quantized(name: str, state: list[Any]) -> Any:
    keys, values, offset, group, bits = state
    if group not in GROUPS or bits not in BITS:
        raise FormatError(
            f"a {name} of {shown(bits)} bits in groups of {shown(group)}; MLX has bits of {BITS}, groups of {GROUPS}"
        )
    rooms = {_triple(name, side, x, group, bits) for side, x in (("keys", keys), ("values", values)) if x is not None}
    if len(rooms) > 1 or (keys is None) != (values is None):
        raise FormatError(f"the keys and values of a {name} must agree in B, H and S")
    room = next(iter(rooms), (0, 0, 0))[2]
    _within(name, offset, room)
    made = [x if x is None else tuple(x) for x in (keys, values)]
    return _filled(_module().QuantizedKVCache(group, bits), [*made, offset, group, bits])


def _triple(name: str, side: str, x: Any, group: int, bits: int) -> tuple[int, ...]:
    what = f"the {side} of a {name}"
    if not isinstance(x, list) or len(x) != 3 or not all(_is_array(a) and a.ndim == 4 for a in x):
        raise FormatError(f"{what} must be three arrays (B, H, S, .)")
    codes, scales, biases = x
    fits = codes.shape[:3] == scales.shape[:3] and scales.shape == biases.shape and scales.dtype == biases.dtype
    fits = fits and codes.dtype == mx.uint32 and scales.dtype in FLOATS and 0 not in scales.shape[:2]
    if not fits or codes.shape[3] * 32 != scales.shape[3] * group * bits:
        raise FormatError(f"{what} do not fit {bits} bits in groups of {group}: {', '.join(map(_told, x))}")
    return tuple(codes.shape[:3])


CLASSES: Mapping[str, tuple[int, Callable[[str, list[Any]], Any]]] = {
    "KVCache": (3, _plain),
    "ConcatenateKVCache": (2, _concatenated),
    "QuantizedKVCache": (5, _quantized),
    "RotatingKVCache": (6, _rotating),
    "ChunkedKVCache": (5, _chunked),
    "ArraysCache": (3, _arrays),
}
"""By name: leaves of the state, and what makes a cache of it. ``CacheList`` is put together from its children."""
