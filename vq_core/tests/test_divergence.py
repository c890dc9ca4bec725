"""Divergence against the same figures computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.errors import SettingsError
from vq_core.evaluate.divergence import divergence

VOCABULARY = 7
TOKENS = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]


class Table:
    """A cache that is a table of logits by token, and remembers what it was fed."""

    def __init__(self, logits: np.ndarray):
        self.logits, self.fed, self.state = logits, [], []


def look_up(ids: mx.array, cache: Any) -> mx.array:
    cache[0].fed.append(ids.tolist())
    return mx.array(cache[0].logits)[ids]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.fixture
def tables() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    return rng.normal(size=(VOCABULARY,) * 2).astype(np.float32), rng.normal(size=(VOCABULARY,) * 2).astype(np.float32)


def test_against_hand_computation(tables: Any) -> None:
    reference, tested = map(Table, tables)
    found = divergence(look_up, TOKENS, [reference], [tested], prefill=4)
    steps, targets = TOKENS[4:-1], TOKENS[5:]
    p, q = (softmax(t[steps].astype(np.float64)) for t in tables)
    assert found.tokens == 5
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-5)
    assert found.top1 == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    at = (np.arange(5), targets)
    assert found.perplexity == pytest.approx(math.exp(-np.log(q[at]).mean()), rel=1e-5)
    assert found.reference_perplexity == pytest.approx(math.exp(-np.log(p[at]).mean()), rel=1e-5)
    assert found.packed_share == 0
    # One token a step after the prefill, to both, and never the last one.
    assert reference.fed == tested.fed == [[TOKENS[:4]], *([[t]] for t in steps)]


def test_the_same_cache_twice(tables: Any) -> None:
    found = divergence(look_up, TOKENS, [Table(tables[0])], [Table(tables[0])], prefill=1)
    assert (found.kl, found.top1, found.tokens) == (0, 1, len(TOKENS) - 2)
    assert found.perplexity == found.reference_perplexity


def test_texts_side_by_side(tables: Any) -> None:
    texts = [TOKENS, TOKENS[::-1], [t % 3 for t in TOKENS]]
    alone = [divergence(look_up, text, [Table(tables[0])], [Table(tables[1])], prefill=4) for text in texts]
    found = divergence(look_up, texts, [Table(tables[0])], [Table(tables[1])], prefill=4)
    assert found.tokens == 15
    for name in ("kl", "top1"):
        assert getattr(found, name) == pytest.approx(np.mean([getattr(one, name) for one in alone]), rel=1e-5)
    for name in ("perplexity", "reference_perplexity"):
        mean = math.exp(np.mean([math.log(getattr(one, name)) for one in alone]))
        assert getattr(found, name) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("texts", [[TOKENS, TOKENS[1:]], [TOKENS, []], [TOKENS, 3]], ids=str)
def test_texts_of_unequal_length(tables: Any, texts: Any) -> None:
    with pytest.raises(SettingsError, match="one length"):
        divergence(look_up, texts, [Table(tables[0])], [Table(tables[1])], prefill=4)


def test_half_precision_logits_are_compared_in_float32(tables: Any) -> None:
    def half(ids: mx.array, cache: Any) -> mx.array:
        return look_up(ids, cache).astype(mx.float16)

    arms = [Table(t) for t in tables]
    found = divergence(half, TOKENS, [arms[0]], [arms[1]], prefill=4)
    p, q = (softmax(t[TOKENS[4:-1]].astype(np.float16).astype(np.float64)) for t in tables)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-5)


def test_tokens_that_a_model_rules_out(tables: Any) -> None:
    """A logit of minus infinity on both sides adds nothing."""
    for table in tables:
        table[:, 0] = -np.inf
    found = divergence(look_up, TOKENS, [Table(tables[0])], [Table(tables[1])], prefill=4)
    p, q = (softmax(t[TOKENS[4:-1], 1:].astype(np.float64)) for t in tables)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-5)


@pytest.mark.parametrize(("prefill", "tokens"), [(0, 10), (-1, 10), (9, 10), (10, 10), (1, 2), (1, 1), (1, 0)])
def test_nothing_to_score(tables: Any, prefill: int, tokens: int) -> None:
    with pytest.raises(SettingsError, match=f"{tokens} tokens leave nothing to score after a prefill of {prefill}"):
        divergence(look_up, TOKENS[:tokens], [Table(tables[0])], [Table(tables[1])], prefill=prefill)


def attention(ids: mx.array, cache: Any) -> mx.array:
    """One layer without weights: the logits are what attention mixes."""
    x = mx.array(np.random.default_rng(0).normal(size=(VOCABULARY, 8)).astype(np.float32))[ids][:, None]
    keys, values = cache[0].update_and_fetch(x, x)
    mask = "causal" if ids.shape[1] > 1 else None
    return mx.fast.scaled_dot_product_attention(x, keys, values, scale=1.0, mask=mask)[:, 0, :, :VOCABULARY]


TEXT = [int(i) for i in np.random.default_rng(1).integers(0, VOCABULARY, 81)]


def test_the_share_of_packed_keys(echo: Callable[..., PackedKVCache]) -> None:
    """16 to 23 exact tokens: at length n, (n - 16) // 8 * 8 of n keys are packed."""
    make = lambda: echo(block=8, residual=16)  # noqa: E731
    found = divergence(attention, TEXT, [make()], [make()], prefill=40)
    lengths = range(41, 81)
    packed = sum((n - 16) // 8 * 8 for n in lengths)
    assert found.packed_share == pytest.approx(packed / sum(lengths))
    assert (found.kl, found.top1) == (0, 1)
    rows = divergence(attention, [TEXT, TEXT[::-1]], [make()], [make()], prefill=40)
    assert rows.packed_share == found.packed_share and rows.tokens == 2 * found.tokens


def test_the_newest_token_is_never_read_packed(echo: Callable[..., PackedKVCache]) -> None:
    """Without a window the newest token is packed by its own step, which still attends to it exactly."""
    make = lambda: echo(block=1, residual=0)  # noqa: E731
    found = divergence(attention, TEXT, [make()], [make()], prefill=40)
    lengths = range(41, 81)
    assert found.packed_share == pytest.approx(sum(n - 1 for n in lengths) / sum(lengths))


@pytest.mark.parametrize("residual", [80, 128])
def test_nothing_packed_is_an_error(echo: Callable[..., PackedKVCache], residual: int) -> None:
    with pytest.raises(SettingsError, match="no scored token read packed history"):
        divergence(attention, TEXT, [echo()], [echo(residual=residual)], prefill=40)


def test_packed_by_the_last_step_alone_is_an_error(echo: Callable[..., PackedKVCache]) -> None:
    """That step still reads its own token exactly, and nothing else is packed."""
    with pytest.raises(SettingsError, match="no scored token read packed history"):
        divergence(attention, TEXT, [echo()], [echo(block=80, page=80, residual=0)], prefill=40)
