"""What caches a model has: the measure for caches that come from a file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.api.facts import SIDES
from vq_core.cache.shell import PackedKVCache
from vq_core.cache.state import ARTIFACT, WAY_OUT
from vq_core.calibration.artifact import SETTING, read, same_but_for_the_file
from vq_core.errors import FormatError, SettingsError
from vq_core.files.jsontext import shown
from vq_core.hosts.mlx_lm import native
from vq_core.hosts.mlx_lm.prepare import CompressedModel, handle_of


@attrs.frozen(eq=False)
class Expected:
    """A model's caches.

    Attributes:
        model: The model.
        handle: What :func:`~vq_core.compress` returned for it, ``None`` for a model that is not prepared.
        caches: Fresh ones, as the model makes them.
        tried: The model's own caches after a trial run of its graph, which tells their shapes without evaluating
            anything; ``None`` for a model that cannot be tried out.
    """

    model: Any
    handle: CompressedModel | None
    caches: Sequence[Any]
    tried: Sequence[Any] | None

    def differences(self, layers: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any]) -> list[str]:
        """What keeps saved layers, checked entries of a file, from being this model's; empty if nothing does."""
        if len(layers) != len(self.caches):
            return [f"{len(layers)} layers in the file, the model has {len(self.caches)}"]
        found = []
        for i, (entry, cache) in enumerate(zip(layers, self.caches, strict=True)):
            tried = None if self.tried is None else self.tried[i]
            found += [f"layer {i}: {each}" for each in self._layer(entry, cache, tried, arrays)]
        return found

    def _layer(self, entry: Mapping[str, Any], cache: Any, tried: Any, arrays: Mapping[str, Any]) -> list[str]:
        kind, wanted = entry["class"], type(cache).__name__
        if kind == wanted == "CacheList":
            children = entry["caches"]
            if len(children) != len(cache.caches):
                return [f"{len(children)} caches in the list, the model has {len(cache.caches)}"]
            pairs = enumerate(zip(children, cache.caches, strict=True))
            each = [(i, self._layer(e, c, tried and tried.caches[i], arrays)) for i, (e, c) in pairs]
            return [f"cache {i}: {text}" for i, texts in each for text in texts]
        sliding = entry["state"].get("sliding") if kind == "PackedKVCache" else None
        if kind != wanted and not self._stands_for(kind, wanted, sliding, cache):
            made = " (it is prepared by compress)" if wanted == "PackedKVCache" else ""
            return [f"{kind} in the file, the model makes {wanted}{made}"]
        if kind == "PackedKVCache":
            found = _policy(entry["state"], cache) if isinstance(cache, PackedKVCache) else []
            return found + _told(_packed_shape(entry["state"]), _shape(cache) or _shape(tried))
        held = native.make(kind, native.decode(entry["state"], arrays, set()))
        found = [
            f"{name} is {getattr(held, name)}, the model's {getattr(cache, name)}"
            for name in ("keep", "max_size", "chunk_size")
            if kind == wanted and getattr(held, name, None) != getattr(cache, name, None)
        ]
        if kind == "ArraysCache":
            return found + _slots(held, tried if tried is not None else cache)
        return found + _told(_shape(held), _shape(tried))

    def _stands_for(self, kind: str, wanted: str, sliding: int | None, cache: Any) -> bool:
        """Whether one class may hold what the model makes another one for."""
        if wanted == "RotatingKVCache":
            return self.handle is None and sliding == cache.max_size and not cache.keep
        if wanted != "KVCache" or sliding is not None:
            return False
        if kind == "PackedKVCache":  # on a prepared model, a layer that is not ours was left out on purpose
            return self.handle is None
        # mlx-lm's kv_bits, and its max_kv_size where the model makes no caches itself.
        return kind == "QuantizedKVCache" or (
            kind == "RotatingKVCache" and self.handle is None and not hasattr(self.model, "make_cache")
        )

    def with_files_of_the_model(self, layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Entries that differ in nothing, files of learnt constants named where the model has them."""
        return [self._named(entry, cache) for entry, cache in zip(layers, self.caches, strict=True)]

    def _named(self, entry: dict[str, Any], cache: Any) -> dict[str, Any]:
        if entry["class"] == "CacheList":
            return entry | {"caches": [self._named(e, c) for e, c in zip(entry["caches"], cache.caches, strict=True)]}
        if not isinstance(cache, PackedKVCache) or entry["class"] != "PackedKVCache":
            return entry
        sides = {side: cache.policy.text[side] for side in SIDES}
        return entry | {"state": entry["state"] | {"policy": entry["state"]["policy"] | sides}}

    def adopt(self, caches: list[Any]) -> list[Any]:
        """The caches, ours with what the handle gives its own; the handle reports them as those made last.

        Raises:
            FormatError: a method's constants differ by layer, and the file's are not of this layer.
        """
        if self.handle is None:
            return caches
        pairs = zip(caches, self.caches, strict=True)
        adopted = [self._adopted(cache, made, f"layer {i}") for i, (cache, made) in enumerate(pairs)]
        self.handle.adopt(adopted)
        return adopted

    def _adopted(self, cache: Any, made: Any, where: str) -> Any:
        if type(cache).__name__ == "CacheList":
            pairs = enumerate(zip(cache.caches, made.caches, strict=True))
            return type(cache)(*(self._adopted(c, m, f"{where}, cache {i}") for i, (c, m) in pairs))
        if not isinstance(cache, PackedKVCache):
            return cache
        if cache._history is None:
            return made
        if made._history is not None:
            for side, bound in made._history.bound.items():
                ctx = cache._history.bound[side].ctx
                if ctx != bound.ctx:
                    raise FormatError(f"{where}: the {side} were packed for {ctx}, the model's are {bound.ctx}")
            cache._history.bound = dict(made._history.bound)
        made._history = cache._history
        return made


def expected(model: Any) -> Expected:
    """The caches of a model, or of what :func:`~vq_core.compress` returned.

    Raises:
        SettingsError: neither of them.
    """
    from mlx_lm.models.cache import make_prompt_cache

    handle = model if isinstance(model, CompressedModel) else handle_of(model)
    if handle is not None:
        model = handle.model if model is handle else model
        return Expected(model, handle, handle.fresh(), _tried(model, handle.plain_cache()))
    if not hasattr(model, "layers") or not hasattr(model, "parameters"):
        raise SettingsError(
            f"model must be a model, the first of what mlx_lm.load returns, or what compress returned; "
            f"got {type(model).__name__}"
        )
    return Expected(model, None, make_prompt_cache(model), _tried(model, make_prompt_cache(model)))


def _tried(model: Any, caches: list[Any]) -> list[Any] | None:
    try:
        model(mx.zeros((1, 2), mx.int32), cache=caches)
    except Exception as error:  # a stranger's model, called in another way: whatever it raises, it is said
        warnings.warn(
            f"the model could not be tried out ({type(error).__name__}: {error}); head sizes and dtypes of its native "
            "layers are not checked against the file's",
            RuntimeWarning, stacklevel=4,
        )  # fmt: skip
        return None
    return caches


def _policy(state: Mapping[str, Any], cache: PackedKVCache) -> list[str]:
    was, now = state["policy"], cache.policy.text
    wrong = [name for name in now if name not in SIDES and was[name] != now[name]]
    wrong += [side for side in SIDES if not same_but_for_the_file(was[side], getattr(cache.policy, side))]
    found = [f"{name} {was[name]!r} in the file, {now[name]!r} in the model" for name in now if name in wrong]
    for side in SIDES:
        digest = state["methods"][side].get(ARTIFACT)
        path = getattr(getattr(cache.policy, side).settings, SETTING, "")
        if digest and path and side not in wrong and read(path).digest != digest:
            found.append(
                f"the {side} were packed with the artifact of SHA-256 {shown(digest)}, {shown(path)} of the model is "
                f"{read(path).digest!r}: {WAY_OUT}"
            )
    if state["sliding"] != cache.sliding:
        found.append(f"a sliding window of {state['sliding']} in the file, {cache.sliding} in the model")
    if state["layer"] not in (None, cache.layer):
        found.append(f"saved as layer {state['layer']}")
    return found


def _packed_shape(state: Mapping[str, Any]) -> dict[str, Any] | None:
    return {k: v for k, v in state["shape"].items() if k != "rows"} if "shape" in state else None


def _shape(cache: Any) -> dict[str, Any] | None:
    """Heads, head sizes and dtype of a cache that has any."""
    if isinstance(cache, PackedKVCache):
        if cache._history is None:
            return None
        ctx = cache._history.bound["keys"].ctx
        return {"kv_heads": ctx.kv_heads, "key_dim": ctx.key_dim, "value_dim": ctx.value_dim, "dtype": ctx.dtype}
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None:
        return None
    group = getattr(cache, "group_size", 1) if isinstance(keys, list | tuple) else 1
    keys, values = (x[1] if isinstance(x, list | tuple) else x for x in (keys, values))
    return {
        "kv_heads": keys.shape[1], "key_dim": keys.shape[3] * group, "value_dim": values.shape[3] * group,
        "dtype": _name(keys.dtype),
    }  # fmt: skip


def _told(was: dict[str, Any] | None, now: dict[str, Any] | None) -> list[str]:
    if was is None or now is None:
        return []
    return [f"{name} {was[name]} in the file, {now[name]} in the model" for name in now if was[name] != now[name]]


def _slots(held: Any, made: Any) -> list[str]:
    if len(held.cache) != len(made.cache):
        return [f"{len(held.cache)} arrays in the file, the model has {len(made.cache)}"]
    pairs = [(a, b) for a, b in zip(held.cache, made.cache, strict=True) if a is not None and b is not None]
    wrong = [(a, b) for a, b in pairs if (a.ndim, a.dtype) != (b.ndim, b.dtype)]
    return [
        f"an array {a.shape} {_name(a.dtype)} in the file, {b.shape} {_name(b.dtype)} in the model" for a, b in wrong
    ]


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
