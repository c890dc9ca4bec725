"""Teacher-forced divergence between two caches of one model.

The current chunk is attended exactly, so one forward pass over a text measures nothing.  Here the text is fed one
token a step after a prefill, to both caches in turn, so that every scored token reads packed history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

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
    model: Any, tokens: Sequence[int], reference: list[Any], tested: list[Any], *, prefill: int = PREFILL
) -> Divergence:
    """Compare two caches on one text.

    Args:
        model: Called as ``model(tokens, cache=caches)``, giving logits (1, L, vocabulary).
        tokens: The text.
        reference: Empty caches, one a layer, such as the model's own.
        tested: Empty caches, one a layer.
        prefill: Tokens fed at once before scoring begins, at least 1.

    Raises:
        SettingsError: a text too short to score, or so short that no scored token reads packed history.
    """
    if not 1 <= prefill < len(tokens) - 1:
        raise SettingsError(f"{len(tokens)} tokens leave nothing to score after a prefill of {prefill}")
    ids = mx.array(list(tokens), mx.int32)[None]
    for caches in (reference, tested):
        mx.eval(model(ids[:, :prefill], cache=caches), [c.state for c in caches])
    ours = [c for c in tested if isinstance(c, PackedKVCache)]
    sums = {"kl": 0.0, "same": 0.0, "tested": 0.0, "reference": 0.0}
    attended = packed = 0
    last = len(tokens) - 1
    for i in range(prefill, last):
        step, target = ids[:, i : i + 1], ids[0, i + 1]
        p, q = (_log_probabilities(model(step, cache=caches)) for caches in (reference, tested))
        found = mx.stack(
            [(mx.exp(p) * (p - q)).sum(), (p.argmax() == q.argmax()).astype(mx.float32), -q[target], -p[target]]
        ).tolist()
        for name, value in zip(("kl", "same", "tested", "reference"), found, strict=True):  # type: ignore[arg-type]
            sums[name] += float(value)
        for cache in ours:
            report = cache.report()
            attended, packed = attended + report.tokens, packed + report.packed
    if ours and not packed:
        raise SettingsError(
            "no scored token read packed history: give a longer text or a smaller residual, or the figures mean nothing"
        )
    n = last - prefill
    return Divergence(
        kl=sums["kl"] / n,
        top1=sums["same"] / n,
        perplexity=math.exp(sums["tested"] / n),
        reference_perplexity=math.exp(sums["reference"] / n),
        tokens=n,
        packed_share=packed / attended if attended else 0.0,
    )


def _log_probabilities(logits: mx.array) -> mx.array:
    x = logits[0, -1].astype(mx.float32)
    return x - mx.logsumexp(x)
