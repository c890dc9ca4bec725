"""Teacher-forced divergence between two caches of one model.

The current chunk is attended exactly, so one forward pass over a text measures nothing.  Here the text is fed one
token a step after a prefill, to both caches in turn, so that every scored token reads packed history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.cache.shell import PackedKVCache
from vq_core.errors import SettingsError

PREFILL = 512


@attrs.frozen
class Divergence:
    """How a cache changes a model's predictions.

    Attributes:
        kl: Mean Kullback-Leibler divergence KL(reference || tested) of the next-token distributions, in nats.
        top1: Share of positions where both find the same most likely token.
        perplexity: Of the text under the tested cache.
        reference_perplexity: Of the text under the reference cache.
        tokens: Scored tokens.
        packed_share: Share of the attended keys that were packed, over all scored tokens and layers of ours.
    """

    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float
    tokens: int
    packed_share: float


def divergence(
    model: Any,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    reference: list[Any],
    tested: list[Any],
    *,
    prefill: int = PREFILL,
) -> Divergence:
    """Compare two caches on one text, or on several of one length side by side.

    A few hundred tokens tell KL. Perplexity depends on which tokens the text happens to have: a difference of one
    percent takes a thousand and more.

    Args:
        model: Called as ``model(tokens, cache=caches)``, giving logits (B, L, vocabulary).
        tokens: The text, or B texts of one length.
        reference: Empty caches, one a layer, such as the model's own.
        tested: Empty caches, one a layer.
        prefill: Tokens fed at once before scoring begins, at least 1.

    Raises:
        SettingsError: a text too short to score, texts of unequal length, or a text so short that no scored token
            reads packed history.
    """
    return divergences(model, tokens, reference, [tested], prefill=prefill)[0]


def divergences(
    model: Any,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    reference: list[Any],
    tested: Sequence[list[Any]],
    *,
    prefill: int = PREFILL,
    tell: Callable[[int], None] = lambda scored: None,
) -> list[Divergence]:
    """:func:`divergence` of several tested caches, the reference computed once.

    ``tell`` is called after each step with the tokens of a text scored so far.
    """
    ids = _checked(tokens, prefill)
    for caches in (reference, *tested):
        mx.eval(model(ids[:, :prefill], cache=caches), [c.state for c in caches])
    arms = [_Arm(caches) for caches in tested]
    loss = 0.0
    for i in range(prefill, ids.shape[1] - 1):
        step, target = ids[:, i : i + 1], ids[:, i + 1 : i + 2]
        p = _log_probabilities(model(step, cache=reference))
        loss -= float(np.array(mx.take_along_axis(p, target, axis=1).sum()))
        for arm in arms:
            arm.add(p, _log_probabilities(model(step, cache=arm.caches)), target)
        tell(i + 1 - prefill)
    return [arm.result(loss, (ids.shape[1] - 1 - prefill) * ids.shape[0]) for arm in arms]


def _checked(tokens: Sequence[Any], prefill: int) -> mx.array:
    """The texts, (B, length)."""
    texts: list[Any] = list(tokens) if any(isinstance(item, Sequence) for item in tokens) else [list(tokens)]
    lengths = {len(text) if isinstance(text, Sequence) else -1 for text in texts}
    if len(lengths) > 1:
        raise SettingsError("the texts of a batch must have one length")
    length = lengths.pop()
    if not 1 <= prefill < length - 1:
        raise SettingsError(f"{length} tokens leave nothing to score after a prefill of {prefill}")
    return mx.array(texts, mx.int32)


class _Arm:
    """Sums over the scored tokens of one tested cache."""

    def __init__(self, caches: list[Any]):
        self.caches = caches
        # A layer may keep several caches in a list of its own.
        single = [c for cache in caches for c in getattr(cache, "caches", (cache,))]
        self.ours = [c for c in single if isinstance(c, PackedKVCache)]
        self.sums = np.zeros(3)
        self.attended = self.packed = 0

    def add(self, p: mx.array, q: mx.array, target: mx.array) -> None:
        """One token of each text: log-probabilities (B, vocabulary) of both caches, and what came, (B, 1)."""
        same = (p.argmax(axis=-1) == q.argmax(axis=-1)).sum().astype(mx.float32)
        self.sums += np.array(mx.stack([_divergence(p, q), same, -mx.take_along_axis(q, target, axis=1).sum()]))
        for cache in self.ours:
            attended, packed = _read(cache)
            self.attended, self.packed = self.attended + attended, self.packed + packed

    def result(self, reference_loss: float, scored: int) -> Divergence:
        """The means."""
        if self.ours and not self.packed:
            raise SettingsError(
                "no scored token read packed history: give a longer text or a smaller residual, or the figures mean "
                "nothing"
            )
        kl, top1, loss = (float(x) / scored for x in self.sums)
        return Divergence(
            kl=kl,
            top1=top1,
            perplexity=math.exp(loss),
            reference_perplexity=math.exp(reference_loss / scored),
            tokens=scored,
            packed_share=self.packed / self.attended if self.attended else 0.0,
        )


def _divergence(p: mx.array, q: mx.array) -> mx.array:
    """KL(p || q) of log-probabilities; a token that the model rules out, with a logit of -inf, adds nothing."""
    return mx.where(p == -mx.inf, 0, mx.exp(p) * (p - q)).sum()


def _read(cache: PackedKVCache) -> tuple[int, int]:
    """Keys that the step of one token just done attended to, and how many of them packed: never the newest."""
    history = cache._history
    if history is None:
        return 0, 0
    attended = packed = 0
    for length, dropped, sinks, held in zip(
        history.lengths, history.dropped, history.window.sinks, history.packed, strict=True
    ):
        width = length if history.sliding is None else min(length, history.sliding)
        before = min(held, max(0, length - 1 - sinks) // history.block * history.block - dropped)
        # Of a sliding window's packed tokens those that are still attended to.
        attended, packed = attended + width, packed + max(0, before - (length - dropped - width))
    return attended, packed


def _log_probabilities(logits: mx.array) -> mx.array:
    x = logits[:, -1].astype(mx.float32)
    return x - mx.logsumexp(x, axis=-1, keepdims=True)
