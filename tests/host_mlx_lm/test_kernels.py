"""The model that ships writes the same text with kernels and without, from the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from vq_core.demo import MODEL_PATH, heldout_text
from vq_core.hosts.mlx_lm.generate import load
from vq_core.testing.observe import assert_same, snapshot

PROMPT, NEW = 150, 12


def run(compress: Callable[..., Any], generate: Callable[..., Any], kernels: str, attention: str) -> tuple[Any, ...]:
    model, tokenizer = load(MODEL_PATH)
    handle = compress(model, "kivi:bits=2", residual=16, sink_tokens=2, kernels=kernels, attention=attention)
    caches = handle.make_cache()
    prompt = mx.array(tokenizer.encode(heldout_text())[:PROMPT])
    tokens, logprobs = generate(model, prompt, NEW, prompt_cache=caches, prefill_step_size=64)
    handle.undo()
    return tokens, logprobs, caches


def test_packing_by_kernels_changes_no_bit(compress: Callable[..., Any], generate: Callable[..., Any]) -> None:
    tokens, logprobs, caches = run(compress, generate, "simulator", "mlx")
    plain_tokens, plain_logprobs, plain = run(compress, generate, "off", "mlx")
    assert tokens == plain_tokens
    assert_same(logprobs, plain_logprobs, "log-probabilities")
    for number, (quick, slow) in enumerate(zip(caches, plain, strict=True)):
        assert_same(snapshot(quick), snapshot(slow), f"layer {number}")
        report = quick.report()
        assert report.packed >= 96 and sum("(simulator)" in line for line in report.operations) == 6
        assert report.attentions > 0 and report.attention == "mlx"


@pytest.mark.parametrize("tier", ["auto", "matrix"])
def test_the_text_does_not_depend_on_kernels(
    compress: Callable[..., Any], generate: Callable[..., Any], tier: str
) -> None:
    """Attention too by a kernel: the same text, numbers as near as another order of sums leaves them in float16."""
    tokens, logprobs, caches = run(compress, generate, "simulator", tier)
    plain_tokens, plain, _ = run(compress, generate, "off", "auto")
    _, reference, _ = run(compress, generate, "off", "reference")
    assert tokens == plain_tokens
    noise = mx.abs(mx.exp(plain) - mx.exp(reference)).max()
    assert mx.abs(mx.exp(logprobs) - mx.exp(reference)).max() <= 2 * noise + 1e-3
    name = "matrix (simulator): attend_matrix_" if tier == "matrix" else "kernel (simulator): attend_kivi_keys_2_32_"
    assert all(cache.report().attention.startswith(name) for cache in caches)
