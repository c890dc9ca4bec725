"""Latent attention (MLA): the latent is keys and values at once, and a decode step reads its codes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from vq_core import PackedKVCache, UnsupportedShapeError
from vq_core.attention.packed import stock_attention
from vq_core.cache.tagged import reading_of
from vq_core.hosts.mlx_lm import hook

from .models import build, prompt


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
@pytest.mark.parametrize("queries", [1, 3])
def test_one_tag_as_keys_and_values(method: str, queries: int) -> None:
    cache = PackedKVCache(method=method, residual=16)
    latent, rotary = mx.random.normal((1, 1, 300, 64)), mx.random.normal((1, 1, 300, 32))
    tag, part = cache.update_and_fetch(latent, rotary)
    q = mx.random.normal((1, 4, queries, 64))
    bias = mx.random.normal((1, 4, queries, 32)) @ part.swapaxes(-1, -2)
    dense = mx.array(tag)
    hook.install()
    try:
        found = mx.fast.scaled_dot_product_attention(q, tag, tag, scale=0.1, mask=bias)
        assert cache.reads.packed == cache.reads.latent == 1
        swapped = mx.fast.scaled_dot_product_attention(q[..., :32], part, part, scale=0.1)
    finally:
        hook.uninstall()
    want = stock_attention(q, dense, dense, scale=0.1, mask=bias)
    assert found.shape == (1, 4, queries, 64) and mx.allclose(found, want, atol=1e-5)
    # The value side as keys is nobody's layout: computed densely, and not counted as read packed.
    assert cache.reads.packed == 1
    assert mx.allclose(swapped, stock_attention(q[..., :32], mx.array(part), mx.array(part), scale=0.1), atol=1e-5)


def test_a_decode_step_does_not_make_the_latent_dense() -> None:
    tokens, dim = 16384, 256
    cache = PackedKVCache(method="kivi:bits=4")
    latent, rotary = mx.random.normal((1, 1, tokens, dim)), mx.random.normal((1, 1, tokens, 32))
    cache.update_and_fetch(latent, rotary)
    mx.eval(cache.state)
    tag, _ = cache.update_and_fetch(latent[:, :, :1], rotary[:, :, :1])
    q = mx.random.normal((1, 8, 1, dim))
    mx.eval(cache.state, q)
    hook.install()
    try:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.fast.scaled_dot_product_attention(q, tag, tag, scale=0.1))
        extra = mx.get_peak_memory() - before
    finally:
        hook.uninstall()
    assert extra < 0.6 * tokens * dim * 4


def test_a_model_with_a_latent_cache_reads_codes_in_single_steps(compress: Any, generate: Any) -> None:
    model = build("deepseek_v3")
    want, scores = generate(model, prompt(70))
    handle = compress(model, residual=8)
    found, packed_scores = generate(model, prompt(70))
    assert found == want and float(mx.abs(packed_scores - scores).max()) < 1e-3
    with pytest.warns(RuntimeWarning, match="a latent cache"):
        report = handle.report()
    for entry in report.layers:
        assert entry.status == "dense" and "single tokens attend to the latent's codes" in entry.reason
        # Three chunks of the prompt are read densely, each single token's attention is not.
        assert entry.report.lost == 3 and entry.report.attentions == entry.report.updates - 3


def test_the_report_does_not_claim_a_kernel(compress: Any, generate: Any) -> None:
    """Of latent attention, which plain operations do, even where both sides alone would be for a fused kernel."""
    model = build("deepseek_v3")
    handle = compress(model, "kivi:bits=4", residual=8, kernels="simulator")
    caches = handle.make_cache()
    generate(model, prompt(70), 4, prompt_cache=caches)
    for cache in caches:
        assert cache.reads.latent == cache.reads.packed > 0
        assert cache.report().attention.startswith("mlx (kernel: latent attention (MLA) reads the keys as values too")


def test_a_kernel_asked_for_by_name_says_why_not() -> None:
    cache = PackedKVCache(method="kivi:bits=4", residual=16, attention="kernel", kernels="simulator")
    latent = mx.random.normal((1, 1, 100, 64))
    cache.update_and_fetch(latent, latent)
    tag, _ = cache.update_and_fetch(latent[:, :, :1], latent[:, :, :1])
    reading = reading_of(tag, tag)
    assert reading is not None
    with pytest.raises(UnsupportedShapeError, match=r"attention='kernel': latent attention .* no fused kernel"):
        reading.attend(latent[:, :, :1], scale=0.1)
