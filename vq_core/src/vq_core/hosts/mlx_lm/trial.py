"""The trial run: call the model on a few tokens without evaluating anything.

The graph alone tells each layer's heads, sizes and dtype, so the methods are bound, and refuse what they cannot
do, before the first token.  It also shows whether what a cache returns goes to attention and nowhere else: then no
dense side needs to be built at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx

from vq_core.errors import SettingsError, VQError
from vq_core.hosts.mlx_lm.layers import OURS, Place

Dense = Literal["auto", "lazy", "strict"]
TRIED = (64, 2, 1)
"""Lengths of the trial run's chunks: models branch on one token against several, and on short against long."""
_NOT_STRICT = "dense='strict': the model does more with keys and values than attend"

Fresh = Callable[[], list[Any]]


def try_out(model: Any, places: Sequence[Place], fresh: Fresh, dense: Dense) -> list[str]:
    """Learn shapes and ways of reading into the places.

    Args:
        model: Called as ``model(tokens, cache=caches)``.
        places: Where its caches stand.
        fresh: Makes empty caches, one a layer, as the places say.
        dense: As for :func:`~vq_core.hosts.mlx_lm.compress`.

    Returns:
        Notes for the report.

    Raises:
        VQError: what a method refuses, or ``dense="strict"`` where the model does more than attend.
    """
    watched = _watch(model, places, fresh)
    if dense != "lazy":
        seen = _dry_run(model, places, fresh, strict=True)
        if isinstance(seen, list):
            _learn(places, seen, watched, dense, strict=True)
            left = list(dict.fromkeys(p.layer for p in places if p.shape and not p.strict))
            if left and dense == "strict":
                raise SettingsError(f"{_NOT_STRICT} in layers {left}; leave dense= out, or those layers by layers=")
            return []
        if dense == "strict":
            raise SettingsError(f"{_NOT_STRICT}: {seen}")
    seen = _dry_run(model, places, fresh, strict=False)
    if isinstance(seen, list):
        _learn(places, seen, watched, dense, strict=False)
        return []
    return [f"the model could not be tried out ({seen}); shapes are checked as they come"]


def _call(model: Any, caches: list[Any]) -> None:
    for length in TRIED:
        model(mx.zeros((1, length), mx.int32), cache=caches)


def _watch(model: Any, places: Sequence[Place], fresh: Fresh) -> dict[int, Any]:
    """What a layer with several caches keeps in each: keys and values, or keys to choose tokens by.

    The second kind's keys are compared exactly and its values mean nothing; such a cache stays the model's own.
    Layers with one cache keep keys and values in it, so only the others are watched, with the model's own class.

    Returns:
        The watching caches, by the number of the place.
    """
    doubtful = {i: p for i, p in enumerate(places) if p.child is not None and p.native == "KVCache" and not p.reason}
    if not doubtful:
        return {}
    from vq_core.hosts.mlx_lm.watch import Watching

    caches = fresh()
    watched = {i: Watching() for i in doubtful}
    for i, place in doubtful.items():
        place.put(caches, watched[i])
    try:
        _call(model, caches)
    except Exception as error:
        why = f"which of the layer's caches hold keys and values is not known ({type(error).__name__}: {error})"
        for place in doubtful.values():
            place.reason = why
        return {}
    for i, place in doubtful.items():
        place.reason = watched[i].verdict()
    return watched


def _dry_run(model: Any, places: Sequence[Place], fresh: Fresh, strict: bool) -> list[Any] | str:
    for place in places:
        place.strict = strict
    caches = fresh()
    try:
        _call(model, caches)
    except VQError as error:
        waiting = [p for p in places if isinstance(p.at(caches), OURS) and not p.at(caches).reads.updates]
        where = f"{waiting[0].name} (leave it as it is by layers={{{waiting[0].layer}: None}}): " if waiting else ""
        raise type(error)(f"{where}{error}") from error
    except Exception as error:  # a model that touches keys in its own way; recorded and handled by the caller
        return f"{type(error).__name__}: {error}"
    return caches


def _learn(places: Sequence[Place], caches: list[Any], watched: dict[int, Any], dense: Dense, strict: bool) -> None:
    for i, place in enumerate(places):
        cache = place.at(caches)
        if not isinstance(cache, OURS):
            continue
        if cache._history is None:
            place.reason = "the model never updates this layer's cache"
            continue
        if i in watched and watched[i].one_array and cache.reads.lost == cache.reads.updates:
            place.reason = f"{place.native}: one array stored as keys and as values, and no attention reads it"
            continue
        place.reason = "" if place.settle is None else place.settle(cache)
        if place.reason:
            continue
        ctx = cache._history.bound["keys"].ctx
        place.shape = {
            "kv_heads": ctx.kv_heads, "key_dim": ctx.key_dim, "value_dim": ctx.value_dim,
            "dtype": getattr(mx, ctx.dtype),
        }  # fmt: skip
        # At a length that was not tried a model may do something else, so there the dense side is left to be asked for.
        place.strict_lengths = TRIED if dense == "auto" else None
        clean = not cache.reads.lost and not cache.reads.dense
        place.strict = strict and clean
        if cache.reads.lost:
            place.dense = "the model computes on the fetched keys and values itself: packed at rest, read densely"
            if cache.reads.latent:
                place.dense = (
                    "a latent cache, from which the model derives keys and values: packed at rest; single tokens "
                    "attend to the latent's codes, their rotary part and longer chunks are read densely"
                )
