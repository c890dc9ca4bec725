"""Every array that an object leads to: what is evaluated, counted, and never copied."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx


def state_arrays(state: Any, leave: tuple[type, ...] = ()) -> list[mx.array]:
    """All MLX arrays reachable from an object, each once; objects of the classes ``leave`` are not entered.

    Functions are entered through what they have bound: closures, defaults, arguments of ``partial``, ``self``.
    """
    found: dict[int, mx.array] = {}
    seen: set[int] = set()
    todo = [state]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, leave):
            continue
        seen.add(id(item))
        if isinstance(item, mx.array):
            found[id(item)] = item
        else:
            todo.extend(_parts(item))
    return list(found.values())


def _parts(item: Any) -> Iterator[Any]:
    """What an object holds."""
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from (item.__defaults__, item.__kwdefaults__)
        for cell in item.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is bound later
                yield cell.cell_contents
    elif not isinstance(item, type | types.ModuleType):
        yield from getattr(item, "__dict__", {}).values()
        for base in type(item).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                private = name.startswith("__") and not name.endswith("__")
                yield getattr(item, f"_{base.__name__.lstrip('_')}{name}" if private else name, None)
