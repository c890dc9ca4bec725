"""What the arrays of a described cache must be: first against the description, then against the bound layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from vq_core.api.layout import Layout
from vq_core.cache.history import History
from vq_core.cache.store import PageStore
from vq_core.errors import FormatError
from vq_core.files import jsontext
from vq_core.files.jsontext import shown

LARGEST_HEAD = 4096
LARGEST_WIDTH = 2**17
"""Head size, and heads times head size, that are believed: binding a method takes memory in proportion to them,
and a window without tokens has no bytes to check them by."""


def check_arrays(description: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Before a method is bound: the shape that it would be bound to is that of the arrays.

    Raises:
        FormatError: it is not.
    """
    shape = description["shape"]
    heads = jsontext.whole(shape["kv_heads"], "the number of heads", 1, LARGEST_WIDTH)
    for name in ("key_dim", "value_dim"):
        jsontext.whole(shape[name], f"{name}", 1, min(LARGEST_HEAD, LARGEST_WIDTH // heads))
    if shape["dtype"] not in ("float16", "bfloat16", "float32"):
        raise FormatError(f"keys and values of {shown(shape['dtype'])}; a cache holds float16, bfloat16 or float32")
    for name, array in arrays.items():
        if not isinstance(array, mx.array):
            raise FormatError(f"{shown(name)} is no array but {type(array).__name__}")
        if array.ndim < 2 or array.shape[1] != heads:
            raise FormatError(f"{shown(name)} has shape {array.shape}; its second axis must be the {heads} heads")
    for name, dim in (("keys", shape["key_dim"]), ("values", shape["value_dim"])):
        array = arrays.get(f"window.{name}")
        if array is None or array.ndim != 4 or (array.shape[0], array.shape[3]) != (shape["rows"], dim):
            found = "missing" if array is None else array.shape
            raise FormatError(f"window.{name} is {found}; it must be {shape['rows']} rows of head size {dim}")


def check_window(history: History) -> None:
    """The window's counts fit its arrays.

    Raises:
        FormatError: they do not.
    """
    window, ctx = history.window, history.bound["keys"].ctx
    rows = history.rows
    for approximate, count in zip(window.approximate, window.counts, strict=True):
        if approximate > count:
            raise FormatError(f"{approximate} approximate tokens in a window of {count}")
    wanted_sinks = [history.sinks if packed else 0 for packed in history.packed]
    if window.sinks != wanted_sinks:
        raise FormatError(f"{window.sinks} sink tokens; rows of {history.packed} packed tokens have {wanted_sinks}")
    for name, counts, dim in (
        ("keys", window.counts, ctx.key_dim), ("values", window.counts, ctx.value_dim),
        ("sink_keys", window.sinks, ctx.key_dim), ("sink_values", window.sinks, ctx.value_dim),
    ):  # fmt: skip
        array = getattr(window, name)
        if array is None:
            fits = not any(counts)
        else:
            fits = array.ndim == 4 and array.dtype == getattr(mx, ctx.dtype)
            fits = fits and (*array.shape[:2], array.shape[3]) == (rows, ctx.kv_heads, dim)
            if "sink" in name:
                fits = fits and array.shape[2] == history.sinks and any(counts)
            else:
                fits = fits and array.shape[2] >= max(counts)
        if not fits:
            found = "missing" if array is None else f"{array.shape} {array.dtype}"
            raise FormatError(f"window.{name} is {found}; it must hold {counts} tokens, (B, H, W, D) {ctx.dtype}")
    widths = {array.shape[2] for array in (window.keys, window.values) if array is not None}
    if len(widths) != 1:
        raise FormatError(f"the window's keys and values are of {sorted(widths)} tokens; they must agree")


def check_dropped(history: History) -> None:
    """What a sliding window has dropped is whole pages, and leaves all that the next token attends to.

    Raises:
        FormatError: it is not, or does not.
    """
    window = history.sliding
    for dropped, length in zip(history.dropped, history.lengths, strict=True):
        if dropped and (window is None or dropped % history.unit or dropped > length + 1 - window):
            raise FormatError(f"{dropped} tokens dropped of {length} do not fit a sliding window of {window}")


def check_store(side: str, store: PageStore, history: History, layout: Layout) -> None:
    """A store's counts fit its pages, its pages its arrays, its arrays the layout that they are in.

    Raises:
        FormatError: they do not.
    """
    page = layout.page
    pages = [-(-n // page) for n in store.tokens]
    if (
        store.tokens != history.packed
        or any(n % history.block for n in store.tokens)
        or [len(owned) for owned in store.owned] != pages
        or store.capacity < sum(pages)
        or sorted(number for owned in store.owned for number in owned) != list(range(sum(pages)))
    ):
        raise FormatError(
            f"{side}: {shown(str(store.tokens))} tokens do not fit pages {shown(str(store.owned))} of {store.capacity}"
        )
    for field in layout.fields:
        array = store.paged.get(field.name) if field.axis is not None else store.sequence.get(field.name)
        if array is None and not any(store.tokens):
            continue
        length = store.capacity if field.axis is not None else len(store.tokens)
        accepted = [getattr(mx, dtype) for dtype in (field.dtype, field.wide) if dtype]
        wanted = (length, store.heads, *field.shape)
        if array is None or array.shape != wanted or array.dtype not in accepted:
            found = "missing" if array is None else f"{array.shape} {array.dtype}"
            raise FormatError(f"{side}.{field.name} is {found}; it must be {wanted} {field.dtype}")
