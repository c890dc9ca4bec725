"""The model that ships writes the same text with kernels and without, from the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vq_core.demo import MODEL_PATH, heldout_text
from vq_core.hosts.mlx_lm.generate import load
from vq_core.testing.observe import assert_same, snapshot

PROMPT, NEW = 150, 12


def test_the_text_does_not_depend_on_kernels(compress: Callable[..., Any], generate: Callable[..., Any]) -> None:
    found = {}
    for kernels in ("off", "simulator"):
        model, tokenizer = load(MODEL_PATH)
        handle = compress(model, "kivi:bits=2", residual=16, sink_tokens=2, kernels=kernels)
        caches = handle.make_cache()
        prompt = mx.array(tokenizer.encode(heldout_text())[:PROMPT])
        found[kernels] = generate(model, prompt, NEW, prompt_cache=caches, prefill_step_size=64), caches
        handle.undo()
    (tokens, logprobs), caches = found["simulator"]
    (plain_tokens, plain_logprobs), plain = found["off"]
    assert tokens == plain_tokens
    assert_same(logprobs, plain_logprobs, "log-probabilities")
    for number, (quick, slow) in enumerate(zip(caches, plain, strict=True)):
        assert_same(snapshot(quick), snapshot(slow), f"layer {number}")
        report = quick.report()
        assert report.packed >= 96 and sum("(simulator)" in line for line in report.operations) == 6
        assert report.attentions > 0
