"""A cache as a flat list: one text leaf that says everything but the arrays, then the arrays.

mlx-lm saves a state whose leaves are arrays and scalars, turns tuples into lists and drops empty containers, so
the state is a plain list and all structure stands in the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from vq_core.api.facts import Rope
from vq_core.cache.history import History
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.store import PageStore
from vq_core.errors import FormatError

if TYPE_CHECKING:
    from vq_core.cache.shell import PackedKVCache

STATE_VERSION = 1
WINDOW = ("keys", "values", "sink_keys", "sink_values")
COUNTS = ("counts", "approximate", "sinks")


def dump(cache: PackedKVCache) -> list[Any]:
    """The state of a cache."""
    header: dict[str, Any] = {
        "vq": STATE_VERSION, "policy": cache.policy.text, "layer": cache.layer, "model": cache._model,
        "rope": cache._rope and attrs.asdict(cache._rope), "sliding": cache.sliding,
    }  # fmt: skip
    history, arrays = cache._history, []
    if history is not None:
        ctx = history.bound["keys"].ctx
        header["shape"] = {
            "kv_heads": ctx.kv_heads, "key_dim": ctx.key_dim, "value_dim": ctx.value_dim,
            "dtype": ctx.dtype, "rows": history.rows,
        }  # fmt: skip
        header["methods"] = {
            side: {"distribution": b.record.distribution, "version": b.record.version}
            for side, b in history.bound.items()
        }
        window = history.window
        header["window"] = {"counts": window.counts, "approximate": window.approximate, "sinks": window.sinks}
        header["dropped"] = history.dropped
        header["stores"] = {s: {"tokens": t.tokens, "owned": t.owned} for s, t in history.stores.items()}
        names = []
        for name in WINDOW:
            array = getattr(window, name)
            if array is not None:
                names.append(f"window.{name}")
                arrays.append(array)
        for side, store in history.stores.items():
            for name, array in (store.paged | store.sequence).items():
                names.append(f"{side}.{name}")
                arrays.append(array)
        header["arrays"] = names
    return [json.dumps(header), *arrays]


def restore(cache: PackedKVCache, state: Sequence[Any]) -> None:
    """Make ``cache`` what ``state`` describes.

    Raises:
        FormatError: not a state of ours, of another version, or arrays that do not fit the description.
        SettingsError, PluginError: the methods named are not installed or refuse.
    """
    text, *arrays = state
    if not isinstance(text, str):
        raise FormatError("this is not the state of a PackedKVCache: its first leaf is no text")
    header = json.loads(text)
    if not isinstance(header, dict) or header.get("vq") != STATE_VERSION:
        raise FormatError(f"cache state of version {header.get('vq')!r}; this vq-core reads version {STATE_VERSION}")
    if not isinstance(header["layer"], int | None):
        raise FormatError(f"layer {header['layer']!r} is no index")
    rope = header["rope"] and Rope(**header["rope"])
    cache._setup(LayerPolicy.make(**header["policy"]), header["layer"], rope, header["model"], False, header["sliding"])
    if "shape" not in header:
        return
    shape = dict(header["shape"])
    shape["dtype"] = getattr(mx, shape["dtype"])
    cache.prepare_for(**shape)
    history = cache._history
    assert history is not None
    for side, bound in history.bound.items():
        was = header["methods"][side]
        if was != {"distribution": bound.record.distribution, "version": bound.record.version}:
            raise FormatError(
                f"{side} were packed by {was['distribution']} {was['version']}; installed is "
                f"{bound.record.distribution} {bound.record.version}"
            )
    history.dropped = header["dropped"]
    held = dict(zip(header["arrays"], arrays, strict=True))
    for name in COUNTS:
        setattr(history.window, name, header["window"][name])
    for name in WINDOW:
        setattr(history.window, name, held.pop(f"window.{name}", None))
    for side, store in history.stores.items():
        store.tokens, store.owned = header["stores"][side]["tokens"], header["stores"][side]["owned"]
        for field in store.layout.fields:
            array = held.pop(f"{side}.{field.name}", None)
            if array is None:
                continue
            if array.shape[1:] != (store.heads, *field.shape):
                raise FormatError(f"{side}.{field.name} has shape {array.shape}; its rows must be {field.shape}")
            (store.paged if field.axis is not None else store.sequence)[field.name] = array
        store.capacity = next((a.shape[0] for a in store.paged.values()), 0)
    if held:
        raise FormatError(f"arrays that the layout does not name: {', '.join(held)}")
    _check_window(history)
    for side, store in history.stores.items():
        _check_store(side, store, history)


def _check_window(history: History) -> None:
    window, ctx = history.window, history.bound["keys"].ctx
    rows = len(history.stores["keys"].tokens)
    if not len(window.counts) == len(window.approximate) == len(window.sinks) == rows:
        raise FormatError(f"the window's counts must have one number for each of {rows} rows")
    _check_dropped(history, rows)
    for approximate, count in zip(window.approximate, window.counts, strict=True):
        if not 0 <= approximate <= count:
            raise FormatError(f"{approximate} approximate tokens in a window of {count}")
    if any(n not in (0, history.sinks) for n in window.sinks):
        raise FormatError(f"{window.sinks} sink tokens; a row has none or {history.sinks}")
    for name, counts, dim in (
        ("keys", window.counts, ctx.key_dim), ("values", window.counts, ctx.value_dim),
        ("sink_keys", window.sinks, ctx.key_dim), ("sink_values", window.sinks, ctx.value_dim),
    ):  # fmt: skip
        array = getattr(window, name)
        wanted = (rows, ctx.kv_heads, array.shape[2] if array is not None and array.ndim == 4 else 0, dim)
        if array is None:
            fits = not any(counts)
        else:
            fits = array.shape == wanted and wanted[2] >= max(counts) and array.dtype == getattr(mx, ctx.dtype)
        if not fits:
            found = "missing" if array is None else f"{array.shape} {array.dtype}"
            raise FormatError(f"window.{name} is {found}; it must hold {counts} tokens, (B, H, W, D) {ctx.dtype}")


def _check_dropped(history: History, rows: int) -> None:
    window = history.sliding
    if len(history.dropped) != rows or any(
        d and (window is None or d < 0 or d % history.unit or d > t + 1 - window)
        for d, t in zip(history.dropped, history.lengths, strict=False)
    ):
        raise FormatError(f"{history.dropped} dropped tokens do not fit rows of {history.lengths}, window {window}")


def _check_store(side: str, store: PageStore, history: History) -> None:
    page = store.layout.page
    pages = [-(-n // page) for n in store.tokens]
    numbers = sorted(number for owned in store.owned for number in owned)
    if (
        store.tokens != history.packed
        or any(n < 0 or n % history.block for n in store.tokens)
        or [len(owned) for owned in store.owned] != pages
        or numbers != list(range(sum(pages)))
        or store.capacity < sum(pages)
    ):
        raise FormatError(f"{side}: {store.tokens} tokens do not fit pages {store.owned} of {store.capacity}")
    for field in store.layout.fields:
        array = store.paged.get(field.name) if field.axis is not None else store.sequence.get(field.name)
        if array is None and not any(store.tokens):
            continue
        length = store.capacity if field.axis is not None else len(store.tokens)
        accepted = [getattr(mx, dtype) for dtype in (field.dtype, field.wide) if dtype]
        if array is None or array.shape[0] != length or array.dtype not in accepted:
            found = "missing" if array is None else f"{array.shape} {array.dtype}"
            raise FormatError(f"{side}.{field.name} is {found}; it must be {length} rows of {field.dtype}")
