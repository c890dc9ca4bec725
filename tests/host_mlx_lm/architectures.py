"""What becomes of each architecture's caches, found by running it: for the tests and for docs/results."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx

from vq_core.hosts.mlx_lm import LayerEntry, ModelReport

from .configurations import PLACES
from .models import prompt

PREFILL, CHUNK, STEPS = 40, 32, 10
TOKENS = PREFILL + CHUNK + STEPS

DENSE = "the model computes on the fetched keys and values itself: packed at rest, read densely"
LATENT = (
    "a latent cache, from which the model derives keys and values: packed at rest; single tokens attend to the "
    "latent's codes, their rotary part and longer chunks are read densely"
)
_REASONS = {
    "P": "",
    "D": DENSE,
    "L": LATENT,
    "F": "RotatingKVCache: a sliding window of {} tokens, bounded already; another layer reads its tokens again",
    "W": "RotatingKVCache: a sliding window of {} tokens, bounded already",
    "C": "ChunkedKVCache: attention within chunks, bounded already",
    "A": "ArraysCache: recurrent state, not keys and values",
    "I": "KVCache: its values have no width, so it is an index of keys, not keys and values",
    "O": "KVCache: the model writes over its values, so it is an index of keys, not keys and values",
}
_STATUSES = {"P": "packed", "D": "dense", "L": "dense"}


def expected(name: str) -> list[tuple[str, str, str]]:
    """Place, status and reason of each cache of an architecture, without a dense reading's bytes."""
    found = []
    for layer, letters in enumerate(PLACES[name].split()):
        for child, kind in enumerate(letters.removesuffix("+").split("+")):
            place = f"{layer}.{child}" if "+" in letters else str(layer)
            found.append((place, _STATUSES.get(kind[0], "native"), _REASONS[kind[0]].format(kind[1:])))
    return found


def told(report: ModelReport) -> list[tuple[str, str, str]]:
    """The same of a report."""
    return [(e.place, e.status, reason(e)) for e in report.layers]


def reason(entry: LayerEntry) -> str:
    """An entry's reason without a dense reading's or a packed window's bytes, which are checked for themselves."""
    found = re.sub(r"; a dense reading of all tokens takes [\d,]+ bytes$", "", entry.reason)
    return re.sub(r"; packed it would hold up to [\d,]+ bytes against [\d,]+$", "", found)


def follow(
    model: Any, caches: list[Any], rows: int = 1, prefill: int = PREFILL, chunk: int = CHUNK
) -> tuple[list[list[int]], mx.array]:
    """Prefill, a second chunk and ten greedy steps.

    Returns:
        Tokens of each step, and the log-probabilities of all (12, rows, vocabulary).
    """
    ids = mx.stack([prompt(prefill + chunk, seed=1 + row) for row in range(rows)])
    logits = []
    for begin, end in ((0, prefill), (prefill, prefill + chunk)):
        logits.append(model(ids[:, begin:end], cache=caches)[:, -1])
        mx.eval(logits[-1], [c.state for c in caches])
    tokens: list[Any] = []
    for _ in range(STEPS):
        tokens.append(logits[-1].argmax(axis=-1))
        logits.append(model(tokens[-1][:, None], cache=caches)[:, -1])
    found = mx.stack(logits).astype(mx.float32)
    return [t.tolist() for t in tokens], found - mx.logsumexp(found, axis=-1, keepdims=True)


def apart(a: mx.array, b: mx.array) -> float:
    """The largest difference."""
    return float(mx.abs(a - b).max())


def inner(caches: list[Any]) -> list[Any]:
    """All caches, those of layers that have several one by one."""
    return [c for cache in caches for c in getattr(cache, "caches", (cache,))]
