"""What a model's own caches are, which of them vq replaces, and why not the others.

A place is where one cache stands: a layer, or one of the several caches that a layer keeps in a ``CacheList``.
A further kind of native cache that can be packed is one more function in :data:`KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from vq_core.cache.policy import CachePolicy, LayerPolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm import hook
from vq_core.hosts.mlx_lm.sliding import Windows, why_not

STRICT: Any = hook.WhileInstalled()
SKIPPED = "skipped by layers="
OURS: tuple[type[Any], ...] = (PackedKVCache,)
"""Classes of our caches."""

Maker = Callable[["Place", LayerPolicy], Any]
"""Makes our cache for a place."""


@attrs.define(eq=False)
class Place:
    """What is known of one cache of the model.

    Attributes:
        layer: Index of the layer.
        child: Index within the layer's ``CacheList``; ``None`` where the layer has one cache.
        native: Class of the model's own cache.
        reason: Why it stays the model's own; empty where ours stands.
        make: Makes ours; ``None`` where nothing can.
        shape: Arguments of ``prepare_for``, once the model was tried out.
        strict: Whether what ours returns needs no dense side.
        strict_lengths: For chunks of these lengths alone; ``None``: of any length.
        dense: Why ours is read densely; empty where attention reads it.
        sliding: Tokens of the window, where ours would be a sliding one.
        model: The model's identity, where a method's constants are learnt from it.
        settle: After the trial run, given our cache there: why the place rather keeps the model's own, or nothing.
    """

    layer: int
    child: int | None
    native: str
    reason: str = ""
    make: Maker | None = None
    shape: dict[str, Any] | None = None
    strict: bool = False
    strict_lengths: tuple[int, ...] | None = None
    dense: str = ""
    sliding: int | None = None
    model: str | None = None
    settle: Callable[[Any], str] | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return f"layer {self.layer}" + ("" if self.child is None else f", cache {self.child}")

    def fresh(self, policy: LayerPolicy, trial: bool = False) -> Any:
        """An empty cache of ours for this place; for a trial run one that packs nothing."""
        assert self.make is not None
        cache = self.make(self, policy)
        if trial:
            cache.hold_all()
        if self.shape is not None:
            cache.prepare_for(**self.shape)
        return cache

    def at(self, caches: Sequence[Any]) -> Any:
        """The cache that stands here in a list of one cache a layer.

        Raises:
            SettingsError: another layer's structure than the model makes.
        """
        cache = caches[self.layer]
        if self.child is None:
            return cache
        inner = children(cache)
        if inner is None or self.child >= len(inner):
            raise SettingsError(
                f"layer {self.layer}: the model makes a CacheList with at least {self.child + 1} caches here, not "
                f"{type(cache).__name__}; give caches that make_cache has made"
            )
        return inner[self.child]

    def put(self, caches: list[Any], cache: Any) -> None:
        """Let a cache stand here."""
        if self.child is None:
            caches[self.layer] = cache
            return
        outer = caches[self.layer]
        outer.caches = (*outer.caches[: self.child], cache, *outer.caches[self.child + 1 :])


def places(caches: Sequence[Any], policy: CachePolicy, windows: Windows = "auto") -> list[Place]:
    """The places of a model's own caches, in order."""
    found = []
    for layer, cache in enumerate(caches):
        skipped = policy.of(layer, len(caches)) is None
        asked = any(policy.layers.get(index) is not None for index in (layer, layer - len(caches)))
        ways: Windows = "packed" if asked and windows == "auto" else windows
        inner = children(cache)
        if inner is None:
            found.append(_judge(Place(layer, None, type(cache).__name__), cache, skipped, ways))
        else:
            found += [_judge(Place(layer, i, type(c).__name__), c, skipped, ways) for i, c in enumerate(inner)]
    return found


def children(cache: Any) -> tuple[Any, ...] | None:
    """The caches of a layer that has several."""
    from mlx_lm.models.cache import CacheList

    return tuple(cache.caches) if type(cache) is CacheList else None


def _judge(place: Place, cache: Any, skipped: bool, windows: Windows) -> Place:
    for kind in KINDS:
        place.make = kind(cache, place, windows)
        if place.make is not None:
            place.reason = SKIPPED if skipped else ""
            return place
    place.reason = _why_native(cache)
    return place


def _ours(place: Place, policy: LayerPolicy, sliding: int | None = None) -> PackedKVCache:
    return PackedKVCache.from_policy(
        policy, layer=place.layer, model=place.model, strict=place.strict and STRICT,
        strict_lengths=place.strict_lengths, sliding=sliding,
    )  # fmt: skip


def _full_attention(cache: Any, place: Place, windows: Windows) -> Maker | None:
    from mlx_lm.models.cache import KVCache

    if type(cache) is not KVCache:
        return None
    return _ours


def _sliding_window(cache: Any, place: Place, windows: Windows) -> Maker | None:
    from mlx_lm.models.cache import RotatingKVCache

    # The first `keep` tokens of a ring never leave it; ours has no such tokens.
    if type(cache) is not RotatingKVCache or cache.keep or windows == "native":
        return None
    place.settle = lambda ours: why_not(ours, windows)
    place.sliding = cache.max_size

    def make(place: Place, policy: LayerPolicy) -> PackedKVCache:
        # The first tokens leave a sliding window, so sink tokens are for the other layers.
        return _ours(place, attrs.evolve(policy, sink_tokens=0), place.sliding)

    return make


KINDS: tuple[Callable[[Any, Place, Windows], Maker | None], ...] = (_full_attention, _sliding_window)
"""For a native cache, each gives the maker of ours, or ``None`` if the cache is not of its kind."""


def _why_native(cache: Any) -> str:
    name = type(cache).__name__
    if "Rotating" in name:
        return f"{name}: a sliding window of {getattr(cache, 'max_size', '?')} tokens, bounded already"
    if "Chunked" in name:
        return f"{name}: attention within chunks, bounded already"
    if "Arrays" in name:
        return f"{name}: recurrent state, not keys and values"
    return f"{name}: not a plain full-attention cache"


def by_layer(found: Sequence[Place]) -> Iterator[tuple[int, list[Place]]]:
    """Places grouped by their layer."""
    for layer in range(found[-1].layer + 1 if found else 0):
        yield layer, [p for p in found if p.layer == layer]
