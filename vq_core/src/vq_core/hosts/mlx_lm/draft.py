"""Speculative decoding: whether a draft model can be used, and what it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.cache.shell import PackedKVCache
from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm.prepare import CompressedModel
from vq_core.hosts.mlx_lm.report import ModelReport
from vq_core.plugins.registry import resolve

PREFILL = 512
"""Tokens that a draft reads at once; the step of mlx-lm's speculative prefill."""


@attrs.frozen(eq=False)
class Draft:
    """A small model that proposes tokens, which the large one accepts or not.

    Attributes:
        model, tokenizer: As loaded.
        handle: A model prepared by :func:`~vq_core.hosts.mlx_lm.compress`; ``None``: the model's own caches.
        num_tokens: Tokens proposed at a time.
        config: The model's config.json, for the length of its context.
    """

    model: Any
    tokenizer: Any
    handle: CompressedModel | None = None
    num_tokens: int = 3
    config: Mapping[str, Any] | None = None


@attrs.define
class DraftRun:
    """What the draft did in one generation.

    Attributes:
        num_tokens: Tokens proposed at a time.
        accepted: New tokens that the draft had proposed.
        held: Bytes of its caches when generation ended, spare capacity included.
        report: Of its packed caches; ``None`` for its own.
    """

    num_tokens: int
    accepted: int = 0
    held: int = 0
    report: ModelReport | None = None


def check_draft(draft: Draft, tokenizer: Any) -> None:
    """Raise :class:`SettingsError` where the draft's vocabulary is not the model's, or the count is none."""
    if isinstance(draft.num_tokens, bool) or not isinstance(draft.num_tokens, int) or draft.num_tokens < 1:
        raise SettingsError(f"the number of draft tokens must be 1 or more; got {draft.num_tokens!r}")
    ours, theirs = tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs and tokenizer.vocab_size == draft.tokenizer.vocab_size:
        return
    differing = sum(theirs.get(text) != token for text, token in ours.items())
    raise SettingsError(
        f"the draft model has another vocabulary: {len(theirs)} entries against {len(ours)}, of which {differing} "
        "are missing or have another number; a draft must share the model's tokenizer"
    )


def check_rewind(caches: Sequence[Any], model: Any, length: int | None, whose: str) -> None:
    """Raise :class:`SettingsError` where mlx-lm could not take rejected tokens out of these caches again.

    mlx-lm asks the caches before the first token only; one that stops being trimmable later would keep
    rejected tokens, silently.

    Args:
        caches: One a layer.
        model: The model whose caches they are.
        length: Most tokens that they will hold; ``None``: nobody knows, so that no window is accepted.
        whose: The model in words.
    """
    if len(caches) != len(model.layers):
        raise SettingsError(
            f"speculative decoding: {whose} has {len(model.layers)} layers and {len(caches)} caches, which mlx-lm "
            "cannot tell apart from the other model's; leave the draft model out"
        )
    reasons: dict[str, list[int]] = {}
    for layer, cache in enumerate(caches):
        if reason := _not_rewound(cache, length):
            reasons.setdefault(reason, []).append(layer)
    if reasons:
        named = "; ".join(f"layers {', '.join(map(str, layers))}: {reason}" for reason, layers in reasons.items())
        raise SettingsError(
            f"speculative decoding takes rejected tokens out of the caches again, which {whose} does not allow "
            f"({named}); leave the draft model out, or choose another method where the method is the reason"
        )


def _not_rewound(cache: Any, length: int | None) -> str:
    name = type(cache).__name__
    if isinstance(cache, PackedKVCache):
        for side in (cache.policy.keys, cache.policy.values):
            facts = resolve(side.label).facts
            if facts is not None and not facts.capabilities.trimmable:
                return f"the method {side.text} cannot drop packed tokens"
    for inner in getattr(cache, "caches", ()):
        if reason := _not_rewound(inner, length):
            return reason
    # Either kind says that it cannot be trimmed once its window has turned over; mlx-lm then drops nothing, silently.
    window = cache.sliding if isinstance(cache, PackedKVCache) else getattr(cache, "max_size", None)
    if isinstance(window, int) and length is None:
        return f"{name}, a window of {window} tokens that a text may overrun"
    if isinstance(window, int) and length is not None and window <= length:
        return f"{name}, a window of {window} tokens that {length} tokens overrun"
    return "" if cache.is_trimmable() else name


def read(model: Any, caches: list[Any], tokens: Sequence[int]) -> None:
    """Have a model read tokens into its caches."""
    ids = mx.array(list(tokens), mx.uint32)
    for start in range(0, ids.size, PREFILL):
        model(ids[start : start + PREFILL][None], cache=caches)
        mx.eval([cache.state for cache in caches])
