"""What a model's caches are given while it reads a text: keys after the rotary embedding, and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from vq_core.api.facts import Side
from vq_core.errors import HostError, SettingsError
from vq_core.hosts.mlx_lm.context import context_length, vocabulary
from vq_core.hosts.mlx_lm.layers import places
from vq_core.hosts.mlx_lm.prepare import handle_of
from vq_core.hosts.mlx_lm.versions import check_version

STEP = 512
"""Tokens of one call of the model."""


def observe(
    model: Any, tokens: Sequence[int], heard: Callable[[int, Side, mx.array], None], *, context: int, step: int = STEP
) -> Iterator[int]:
    """Have a model read tokens, in sequences of ``context`` that each begin with an empty cache of its own kind.

    Listened to are the caches that :func:`~vq_core.hosts.mlx_lm.compress` could pack.  Nothing of a step outlives it
    but what ``heard`` keeps, and the model's own cache of one sequence.

    Args:
        model: From :func:`~vq_core.hosts.mlx_lm.load`.
        tokens: The text.
        heard: Told each layer's new keys and values (1, H, n, D), n at most ``step``.
        context: Tokens of a sequence.
        step: Tokens of a call.

    Yields:
        The number of a step's tokens, after it.

    Raises:
        SettingsError: a model without layers, sequences of no token or beyond the model's context, tokens that the
            model does not know.
        HostError: an mlx-lm that vq does not know, a model that fails.
    """
    check_version()
    if not hasattr(model, "layers"):
        raise SettingsError(f"a model must have layers; got {type(model).__name__}")
    longest = context_length(getattr(model, "args", None))
    if context < 1 or (longest is not None and context > longest):
        raise SettingsError(f"sequences of {context} tokens: accepted are 1 to {longest or 'any number'}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary(model):
        raise SettingsError(f"the text has tokens that the model does not know: it knows {vocabulary(model)}")
    for begin in range(0, len(tokens), context):
        sequence = tokens[begin : begin + context]
        caches = _listening(model, heard)
        for at in range(0, len(sequence), step):
            part = sequence[at : at + step]
            try:
                model(mx.array([list(part)], mx.int32), cache=caches)
                # What the caches hold, and so the layers before the last; no logits.
                mx.eval([cache.state for cache in caches])
            except (SettingsError, HostError):
                raise
            except Exception as error:  # a model's own code, or the memory's end
                raise HostError(f"the model fails on the text: {type(error).__name__}: {error}") from error
            yield len(part)


def _listening(model: Any, heard: Callable[[int, Side, mx.array], None]) -> list[Any]:
    """Fresh caches of the model's own, those that could be packed telling what they are given."""
    from mlx_lm.models.cache import make_prompt_cache

    handle = handle_of(model)
    caches: list[Any] = make_prompt_cache(model) if handle is None else handle.plain_cache()
    everything: Any = SimpleNamespace(of=lambda layer, count: True, layers={})
    for place in places(caches, everything, "packed"):
        if not place.reason:
            _tell(place.at(caches), place.layer, heard)
    return caches


def _tell(cache: Any, layer: int, heard: Callable[[int, Side, mx.array], None]) -> None:
    update = cache.update_and_fetch

    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        heard(layer, "keys", keys)
        heard(layer, "values", values)
        return update(keys, values)

    cache.update_and_fetch = update_and_fetch
