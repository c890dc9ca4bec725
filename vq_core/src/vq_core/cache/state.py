"""A cache as a description, plain JSON, and named arrays: what any file of it holds.

mlx-lm saves a state whose leaves are arrays and scalars, turns tuples into lists and drops empty containers, so
for it the state is a flat list: the description as one text leaf, then the arrays in the order that it names.

A description may come from a file that somebody has damaged or made up.  So every number is checked against the
arrays, whose bytes are there, before a method is bound to it, let alone memory taken for it.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from vq_core.api.facts import SIDES, Rope
from vq_core.api.layout import Layout
from vq_core.api.settings import parse_choice
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.state_checks import check_arrays, check_dropped, check_store, check_window
from vq_core.calibration import artifact
from vq_core.errors import FormatError, SettingsError, VQError
from vq_core.files import jsontext
from vq_core.files.jsontext import shown
from vq_core.plugins.device import form_named, reorder
from vq_core.plugins.registry import find, resolve

if TYPE_CHECKING:
    from vq_core.cache.shell import PackedKVCache
    from vq_core.kernels.device_form import DeviceForm
    from vq_core.plugins.binding import BoundSide

STATE_VERSION = 2
WINDOW = ("keys", "values", "sink_keys", "sink_values")
COUNTS = ("counts", "approximate", "sinks")
ALWAYS = ("vq", "policy", "methods", "layer", "model", "rope", "sliding")
FILLED = ("shape", "layout", "window", "dropped", "stores", "arrays")
POLICY = tuple(field.name for field in attrs.fields(LayerPolicy) if field.name != "kernels")
FORM = "device_form"
"""Of a state alone, never of a file of ours: for each side the device form that its pages are in, or an empty text."""
ARTIFACT = "artifact"
"""Of a method whose constants were learnt: the digest of the file that they came from."""
SHAPE = ("kv_heads", "key_dim", "value_dim", "dtype", "rows")


def describe(cache: PackedKVCache, as_held: bool = False) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """A cache's description and its arrays; a cache without tokens is described by its policy alone.

    Pages are in canonical order, whatever the order in which they are held; with ``as_held`` they stay in a device
    form, which the description then names.
    """
    arrays = _arrays(cache, as_held)
    return _lasting(cache, as_held) | _changing(cache, arrays), arrays


def _lasting(cache: PackedKVCache, as_held: bool) -> dict[str, Any]:
    """What stays as a cache grows."""
    description: dict[str, Any] = {
        "vq": STATE_VERSION, "policy": cache.policy.text, "layer": cache.layer, "model": cache._model,
        "rope": cache._rope and attrs.asdict(cache._rope), "sliding": cache.sliding,
    }  # fmt: skip
    history = cache._history
    records: dict[str, Any]
    if history is None or cache.empty():
        records = {side: resolve(getattr(cache.policy, side).label) for side in SIDES}
    else:
        records = {side: bound.record for side, bound in history.bound.items()}
    description["methods"] = {s: {"distribution": r.distribution, "version": r.version} for s, r in records.items()}
    if history is None or cache.empty():
        return description
    for side, bound in history.bound.items():
        if bound.artifact:  # the settings name a file; what was in it is part of what the codes mean
            description["methods"][side][ARTIFACT] = bound.artifact
    ctx = history.bound["keys"].ctx
    description["shape"] = {
        "kv_heads": ctx.kv_heads, "key_dim": ctx.key_dim, "value_dim": ctx.value_dim,
        "dtype": ctx.dtype, "rows": history.rows,
    }  # fmt: skip
    description["layout"] = {side: layout_text(bound.canonical) for side, bound in history.bound.items()}
    if as_held and any(bound.held for bound in history.bound.values()):
        description[FORM] = {s: b.held.form.name if b.held else "" for s, b in history.bound.items()}
    return description


def _changing(cache: PackedKVCache, arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    """What a step changes."""
    history = cache._history
    if history is None or cache.empty():
        return {}
    return {
        "window": {name: getattr(history.window, name) for name in COUNTS},
        "dropped": history.dropped,
        "stores": {s: {"tokens": t.tokens, "owned": t.owned} for s, t in history.stores.items()},
        "arrays": list(arrays),
    }


def _arrays(cache: PackedKVCache, as_held: bool) -> dict[str, mx.array]:
    """The arrays by name."""
    history = cache._history
    if history is None or cache.empty():
        return {}
    arrays = {f"window.{n}": a for n in WINDOW if (a := getattr(history.window, n)) is not None}
    for side, store in history.stores.items():
        held, bound = store.paged | store.sequence, history.bound[side]
        if bound.held is not None and not as_held:
            held = reorder(bound.held.form, bound, held, to_device=False)
        arrays |= {f"{side}.{name}": array for name, array in held.items()}
    return arrays


def dump(cache: PackedKVCache) -> list[Any]:
    """The state of a cache for mlx-lm: the description as text, then the arrays.

    As they are held: mlx-lm evaluates states while it generates, and both orders at once would be twice the memory.  It
    asks after each chunk of a prompt, so what lasts is written once.
    """
    history, arrays = cache._history, _arrays(cache, as_held=True)
    if history is None or cache.empty():
        return [json.dumps(_lasting(cache, as_held=True))]
    key = (history.bound, history.rows, cache.policy, cache.layer, cache._model, cache._rope, cache.sliding)
    if cache._lasting is None or any(a is not b for a, b in zip(cache._lasting[0], key, strict=True)):
        cache._lasting = (key, json.dumps(_lasting(cache, as_held=True)))
    return [f"{cache._lasting[1][:-1]}, {_text(_changing(cache, arrays))[1:]}", *arrays.values()]


_last: tuple[dict[str, Any], str] | None = None


def _text(changing: dict[str, Any]) -> str:
    """What changes, as JSON; the layers of a model mostly say the same one after the other."""
    global _last
    last = _last
    if last is None or last[0] != changing:
        _last = last = (copy.deepcopy(changing), json.dumps(changing))
    return last[1]


def restore(cache: PackedKVCache, state: Sequence[Any]) -> None:
    """Make ``cache`` what ``state``, from :func:`dump`, describes.

    Raises:
        As :func:`rebuild`.
    """
    if not isinstance(state, list | tuple) or not state or not isinstance(state[0], str):
        raise FormatError("this is not the state of a PackedKVCache: it must be a list that begins with text")
    description, arrays = jsontext.parse(state[0], "the state of a PackedKVCache"), state[1:]
    names = description.get("arrays", []) if isinstance(description, dict) else []
    if not isinstance(names, list) or len(names) != len(arrays) or not all(isinstance(n, str) for n in names):
        raise FormatError(f"the state of a PackedKVCache has {len(arrays)} arrays and names {shown(names)} of them")
    if len(set(names)) != len(names):
        raise FormatError("the state of a PackedKVCache names an array twice")
    rebuild(cache, description, dict(zip(names, arrays, strict=True)))


def rebuild(cache: PackedKVCache, description: Any, arrays: Mapping[str, Any]) -> None:
    """Make ``cache`` what a description and its arrays say.

    Raises:
        FormatError: not a description of ours, of another version, made by another version of a method or with
            another layout than the installed one's, or arrays that do not fit it.
        SettingsError: a method that is not installed, or settings that it does not accept.
        PluginError: a method that is installed and cannot be used.
    """
    try:
        _rebuild(cache, checked(description), arrays)
    except VQError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"this is not the state of a PackedKVCache: {error}") from error


def checked(description: Any) -> dict[str, Any]:
    """A description whose every entry has the type and range it must have; arrays and methods are not asked.

    Raises:
        FormatError: it has not.
    """
    what = "the state of a PackedKVCache"
    if not isinstance(description, dict):
        raise FormatError(f"{what} must be an object, not {shown(description)}")
    if description.get("vq") != STATE_VERSION or isinstance(description["vq"], bool | float):
        raise FormatError(
            f"cache state of version {shown(description.get('vq'))}; this vq-core reads version {STATE_VERSION}"
        )
    filled = (*FILLED, FORM) if FORM in description else FILLED
    jsontext.record(description, what, *ALWAYS, *(filled if "shape" in description else ()))
    if FORM in description:
        for side, form in jsontext.record(description[FORM], "the device forms", *SIDES).items():
            jsontext.text(form, f"the device form of the {side}", 100)
    policy = jsontext.record(description["policy"], "the policy", *POLICY)
    for name in ("keys", "values", "attention", "fallback"):
        jsontext.text(policy[name], f"the policy's {name}")
    for name in ("residual", "sink_tokens"):
        jsontext.whole(policy[name], f"the policy's {name}")
    for side, was in jsontext.record(description["methods"], "the methods", *SIDES).items():
        what = f"the method of the {side}"
        for name, value in jsontext.record(was, what, "distribution", "version", optional=(ARTIFACT,)).items():
            jsontext.text(value, f"the {name} of the method of the {side}", 200)
    if description["layer"] is not None:
        jsontext.whole(description["layer"], "the layer's index")
    if description["sliding"] is not None:
        jsontext.whole(description["sliding"], "the sliding window", low=1)
    if description["model"] is not None:
        jsontext.text(description["model"], "the model's name")
    if description["rope"] is not None:
        rope = jsontext.record(description["rope"], "rope", "kind", "base", "dims")
        jsontext.whole(rope["dims"], "the channels of rope")
        number = isinstance(rope["base"], int | float) and not isinstance(rope["base"], bool)
        if rope["kind"] not in ("half", "interleaved") or not number or not 0 < rope["base"] < 1e30:
            raise FormatError(f"rope must have a kind and a base of a known range, not {shown(list(rope.values()))}")
    if "shape" in description:
        _check_filled(description)
    return description


def _check_filled(description: dict[str, Any]) -> None:
    shape = jsontext.record(description["shape"], "the shape", *SHAPE)
    rows = jsontext.whole(shape["rows"], "the number of rows", low=1)
    window = jsontext.record(description["window"], "the window", *COUNTS)
    for name in COUNTS:
        jsontext.wholes(window[name], f"the window's {name}", rows)
    jsontext.wholes(description["dropped"], "the dropped tokens", rows)
    for side, store in jsontext.record(description["stores"], "the stores", *SIDES).items():
        jsontext.record(store, f"the store of the {side}", "tokens", "owned")
        jsontext.wholes(store["tokens"], f"the tokens of the {side}", rows)
        if not isinstance(store["owned"], list) or len(store["owned"]) != rows:
            raise FormatError(f"the pages of the {side} must be {rows} lists")
        for owned in store["owned"]:
            jsontext.wholes(owned, f"the pages of the {side}")
    jsontext.record(description["layout"], "the layouts", *SIDES)
    if not isinstance(description["arrays"], list):
        raise FormatError("the names of the arrays must be a list")


def policy_of(description: Mapping[str, Any]) -> LayerPolicy:
    """The policy of a checked description, its methods being those that packed.

    Raises:
        SettingsError: a method that is not installed; the message has the pip line. Settings that it refuses.
        PluginError: a method that is installed and cannot be used.
        FormatError: another distribution or version of the method is installed.
    """
    for side in SIDES:
        label, was = parse_choice(description["policy"][side]).label, description["methods"][side]
        needed = f"{was['distribution']} {was['version']}"
        way_out = f"pip install '{was['distribution']}=={was['version']}'"
        try:
            find(label)
        except SettingsError as error:
            raise SettingsError(
                f"the {side} were packed by method {label!r} of {needed}, which is not installed: {way_out} ({error})"
            ) from error
        record = resolve(label)
        if (record.distribution, record.version) != (was["distribution"], was["version"]):
            raise FormatError(
                f"the {side} were packed by method {label!r} of {needed}; installed is {record.distribution} "
                f"{record.version}: {way_out}, or make the cache again"
            )
    return LayerPolicy.make(**description["policy"])


def _rebuild(cache: PackedKVCache, description: dict[str, Any], arrays: Mapping[str, Any]) -> None:
    rope = description["rope"] and Rope(**description["rope"])
    named = description.get("arrays", [])
    if sorted(named) != sorted(arrays):
        raise FormatError(f"the state of a PackedKVCache names {shown(named)} arrays and has {shown(list(arrays))}")
    description = _at_hand(description)
    cache._setup(
        policy_of(description), description["layer"], rope, description["model"], sliding=description["sliding"]
    )
    if "shape" not in description:
        return
    check_arrays(description, arrays)
    shape = description["shape"]
    cache.prepare_for(**(shape | {"dtype": getattr(mx, shape["dtype"])}))
    history, held = cache._history, dict(arrays)
    assert history is not None
    for side, bound in history.bound.items():
        _check_artifact(side, description["methods"][side].get(ARTIFACT, ""), bound)
        was, now = description["layout"][side], layout_text(bound.canonical)
        if was != now:
            raise FormatError(
                f"the {side} were packed with another layout than the installed method's: {_differences(was, now)}"
            )
    for name in COUNTS:
        setattr(history.window, name, list(description["window"][name]))
    for name in WINDOW:
        setattr(history.window, name, held.pop(f"window.{name}", None))
    layouts: dict[str, Layout] = {}
    forms: dict[str, DeviceForm | None] = {}
    for side, store in history.stores.items():
        entry = description["stores"][side]
        store.gone = list(description["dropped"])
        store.tokens, store.owned = list(entry["tokens"]), [list(o) for o in entry["owned"]]
        form = _form(bound := history.bound[side], side, description.get(FORM, {}).get(side, ""))
        layouts[side] = bound.canonical if form is None else form.layout(bound.state)
        for field in layouts[side].fields:
            array = held.pop(f"{side}.{field.name}", None)
            if array is not None:
                (store.paged if field.axis is not None else store.sequence)[field.name] = array
        store.capacity = next((a.shape[0] for a in store.paged.values() if a.ndim), 0)
        forms[side] = form
    if held:
        raise FormatError(f"arrays that the layout does not name: {shown(', '.join(held))}")
    check_window(history)
    check_dropped(history)
    for side, store in history.stores.items():
        check_store(side, store, history, layouts[side])
        bound, form = history.bound[side], forms[side]
        mine = None if bound.held is None else bound.held.form
        if form is not mine and form is not None:
            store.paged = reorder(form, bound, store.paged, to_device=False)
        if form is not mine and mine is not None:
            store.paged = reorder(mine, bound, store.paged, to_device=True)


WAY_OUT = (
    "put the file back that was there when they were packed, wherever it lies: compress the model with it (artifact=) "
    "before the cache is loaded; or make the cache again"
)


def _at_hand(description: dict[str, Any]) -> dict[str, Any]:
    """The description with files of learnt constants named where they lie now; a file is known by its content."""
    policy = dict(description["policy"])
    for side in SIDES:
        digest = description["methods"][side].get(ARTIFACT)
        if not digest:
            continue
        path = dict(parse_choice(policy[side]).options).get(artifact.SETTING, "")
        try:
            if artifact.read(path).digest == digest:
                continue
            said = ""
        except FormatError as error:
            said = str(error).removesuffix(artifact.HINT)
        place = artifact.with_digest(digest)
        if place is not None:
            policy[side] = artifact.elsewhere(policy[side], place)
        elif said:
            raise FormatError(f"the {side} were packed with the artifact of SHA-256 {shown(digest)}; {said}: {WAY_OUT}")
    return description | {"policy": policy}


def _check_artifact(side: str, was: str, bound: BoundSide) -> None:
    if was == bound.artifact:
        return
    raise FormatError(
        f"the {side} were packed with the artifact of SHA-256 {shown(was)}, that of {bound.choice.text} is "
        f"{bound.artifact!r}: {WAY_OUT}"
    )


def _form(bound: BoundSide, side: str, name: str) -> DeviceForm | None:
    """The device form of a state's pages; ``None`` where they are in canonical order."""
    if not name:
        return None
    if bound.held is not None and bound.held.form.name == name:
        return bound.held.form
    found = form_named(bound, name)
    if found is None:
        raise FormatError(f"the {side} are in the device form {shown(name)}, which the installed method has not")
    return found


@functools.lru_cache(256)
def layout_text(layout: Layout) -> dict[str, Any]:
    """A layout as JSON holds it; shared, because hosts ask for states often, so not to be changed."""
    fields = [attrs.asdict(field) | {"shape": list(field.shape)} for field in layout.fields]
    return {"block": layout.block, "page": layout.page, "fields": fields}


def _differences(was: Any, now: dict[str, Any]) -> str:
    if not isinstance(was, dict) or not isinstance(was.get("fields"), list):
        return f"{shown(was)} is no layout"
    found = [f"{k} {shown(was.get(k))}, now {now[k]}" for k in ("block", "page") if was.get(k) != now[k]]
    before = {f.get("name"): f for f in was["fields"] if isinstance(f, dict) and isinstance(f.get("name"), str)}
    after = {f["name"]: f for f in now["fields"]}
    found += [f"field {shown(n)} is in the file only" for n in before if n not in after]
    found += [f"field {n!r} is new" for n in after if n not in before]
    for name, field in after.items():
        old = before.get(name, field)
        found += [f"{name}.{k} {_plain(old.get(k))}, now {_plain(v)}" for k, v in field.items() if old.get(k) != v]
    return "; ".join(found) or "the order of its fields"


def _plain(value: Any) -> str:
    return shown(str(value)).strip("'\"")
