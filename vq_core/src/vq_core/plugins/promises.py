"""What a layout promises of the rows that a method gives, and whether they keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vq_core.api.layout import Layout
from vq_core.errors import PluginError

Promise = tuple[tuple[str, tuple[int, ...], tuple[mx.Dtype, ...]], ...]
"""Of each field its name, shape and the dtypes that it may have."""


def checked(
    label: str, layout: Layout, rows: Mapping[str, mx.array], x: mx.array, paged: bool,
    known: dict[Any, Promise] | None = None,
) -> dict[str, mx.array]:  # fmt: skip
    """Rows of the paged fields, or those of the sequence, as the layout promises them for x (B, H, n, D).

    ``known``: what it has promised for the numbers of tokens before.
    """
    key = (x.shape[:3], paged)
    promise = None if known is None else known.get(key)
    if promise is None:
        promise = _promise(layout, x.shape[:3], paged)
        if known is not None:
            if len(known) >= MOST_PROMISES:
                known.clear()
            known[key] = promise
    found: dict[str, mx.array] = {}
    for name, wanted, dtypes in promise:
        got = rows.get(name)
        if got is None or got.shape != wanted or got.dtype not in dtypes:
            given = "nothing" if got is None else f"{got.shape} {got.dtype}"
            accepted = " or ".join(str(d).removeprefix("mlx.core.") for d in dtypes)
            raise PluginError(
                f"method {label!r}, field {name!r}: the layout promises {wanted} {accepted}, the method gave {given}"
            )
        found[name] = got
    return found


MOST_PROMISES = 64


def _promise(layout: Layout, tokens: tuple[int, ...], paged: bool) -> Promise:
    """For (B, H, n)."""
    found = []
    for field in layout.paged if paged else layout.sequence:
        shape = list(field.shape)
        if field.axis is not None:
            shape[field.axis] = layout.units(field, tokens[2])
        dtypes = tuple(getattr(mx, d) for d in (field.dtype, field.wide) if d is not None)
        found.append((field.name, (*tokens[:2], *shape), dtypes))
    return tuple(found)
