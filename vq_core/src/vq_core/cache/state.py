"""A cache as a flat list: one text leaf that says everything but the arrays, then the arrays.

mlx-lm saves a state whose leaves are arrays and scalars, turns tuples into lists and drops empty containers, so
the state is a plain list and all structure stands in the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vq_core.cache.policy import LayerPolicy
from vq_core.errors import FormatError

if TYPE_CHECKING:
    from vq_core.cache.shell import PackedKVCache

STATE_VERSION = 1
WINDOW = ("keys", "values", "sink_keys", "sink_values")


def dump(cache: PackedKVCache) -> list[Any]:
    """The state of a cache."""
    header: dict[str, Any] = {"vq": STATE_VERSION, "policy": cache.policy.text, "layer": cache.layer}
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
    cache._setup(LayerPolicy.make(**header["policy"]), header["layer"])
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
    held = dict(zip(header["arrays"], arrays, strict=True))
    for name, value in header["window"].items():
        setattr(history.window, name, value)
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
    cache._offset = max(history.lengths)
