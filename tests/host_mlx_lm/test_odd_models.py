"""Batches, half precision, quantized weights, wrappers, layers without a cache, paths that depend on the chunk."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import vq_core
from vq_core import PackedKVCache
from vq_core.attention.packed import stock_attention
from vq_core.errors import SettingsError

from .architectures import apart, expected, follow, inner, told
from .models import build, prompt

pytestmark = pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "deepseek_v32", "falcon_h1", "gemma4", "gpt_oss", "llama", "mimo_v2_flash", "qwen3_next"]
)
def test_two_rows(name: str, compress: Any) -> None:
    """A batch by plain calls: the trial was of one row, the cache binds to what comes."""
    model = build(name)
    tokens, scores = follow(model, make_prompt_cache(model), rows=2)
    assert any(a != b for a, b in tokens)
    handle = compress(model, residual=8)
    found, packed_scores = follow(model, caches := make_prompt_cache(model), rows=2)
    assert found == tokens and apart(packed_scores, scores) < 1e-3
    report = handle.report(caches)
    assert told(report) == expected(name)
    assert all(r.tokens == 2 * 82 and r.exact == 2 * 8 for r in report.packed_layers)


@pytest.mark.parametrize(
    ("name", "dtype"), [("phi3", mx.float16), ("gemma3", mx.bfloat16), ("minicpm3", mx.bfloat16)], ids=str
)
def test_half_precision(name: str, dtype: mx.Dtype, compress: Any) -> None:
    """Not further from float32 than the plain cache is, of the same weights."""
    model = build(name)
    model.set_dtype(dtype)
    wide = copy.deepcopy(model)
    wide.set_dtype(mx.float32)

    def run(which: Any) -> mx.array:
        caches = make_prompt_cache(which)
        ids = prompt(80)[None]
        parts = ((0, 40), (40, 72), *((i, i + 1) for i in range(72, 80)))
        return mx.stack([which(ids[:, a:b], cache=caches)[0, -1].astype(mx.float32) for a, b in parts])

    want, plain = run(wide), run(model)
    assert apart(plain, want) > 1e-4
    compress(model, residual=8)
    caches = make_prompt_cache(model)
    assert apart(run(model), want) < 2 * apart(plain, want)
    compress(model, "kivi:bits=4", residual=0)
    assert mx.isfinite(run(model)).all()
    model(prompt(40)[None], cache=caches)
    assert {c.decode()[0].dtype for c in caches if isinstance(c, PackedKVCache)} == {dtype}


def test_quantized_weights(compress: Any) -> None:
    model = build("qwen3")
    nn.quantize(model, group_size=32, bits=4)
    tokens, scores = follow(model, make_prompt_cache(model))
    handle = compress(model, residual=8)
    found, packed_scores = follow(model, caches := make_prompt_cache(model))
    assert found == tokens and apart(packed_scores, scores) < 1e-3
    assert told(handle.report(caches)) == expected("qwen3")


# ---- wrappers


class Vision(nn.Module):
    """As models with pictures are made: no layers of its own, a text model inside."""

    def __init__(self, text: Any):
        super().__init__()
        self.language_model = text

    def __call__(self, ids: mx.array, pixels: Any = None, cache: Any = None) -> Any:
        return self.language_model(ids, cache=cache)


def test_a_wrapper_without_layers_is_told_where_they_are(compress: Any) -> None:
    model = Vision(build("llama"))
    with pytest.raises(
        SettingsError, match=r"or its language_model, which has layers; got Vision, which has no layers"
    ):
        vq_core.compress(model, method="identity")
    assert mx.fast.scaled_dot_product_attention is stock_attention
    tokens, _ = follow(model, make_prompt_cache(model.language_model))
    handle = compress(model.language_model, residual=8)
    caches = make_prompt_cache(model.language_model)
    assert follow(model, caches)[0] == tokens
    assert told(handle.report(caches)) == expected("llama")


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_the_text_part_of_a_wrapper(name: str, compress: Any) -> None:
    """The wrapper asks its text part for caches."""
    model = build(name)
    text = model.model.language_model if name == "gemma3n" else model.language_model
    tokens, _ = follow(model, make_prompt_cache(model))
    handle = compress(text, residual=8)
    caches = make_prompt_cache(model)
    assert follow(model, caches)[0] == tokens
    assert told(handle.report(caches)) == expected(name)
    handle.undo()
    assert not any(isinstance(c, PackedKVCache) for c in make_prompt_cache(model))


# ---- layers that have no cache


@pytest.mark.parametrize(("name", "layers", "caches"), [("nemotron_h", 5, 3), ("gemma3n", 6, 4), ("afm7", 4, 2)])
def test_indices_count_caches(name: str, layers: int, caches: int, compress: Any) -> None:
    model = build(name)
    assert (len(model.layers), len(make_prompt_cache(model))) == (layers, caches)
    with pytest.raises(SettingsError, match=rf"the model has layers 0 to {caches - 1}, not \[{caches}\]"):
        vq_core.compress(model, method="identity", layers={caches: None})
    handle = compress(model, residual=8, layers={-1: "kivi:bits=8"})
    report = handle.report()
    assert told(report) == expected(name)
    assert report.layers[-1].report.keys == "kivi:bits=8,group_size=32"


# ---- paths


@pytest.mark.parametrize("length", [1, 2, 7, 64, 65])
def test_a_path_of_one_chunk_length(length: int, compress: Any, monkeypatch: Any) -> None:
    """A model that does more than attend at one chunk length, tried or not, by a function that takes arrays alone."""
    stock = llama.scaled_dot_product_attention

    def touching(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        if q.shape[2] == length:
            k = mx.concatenate([k], axis=2)
        return stock(q, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)

    model = build("llama")
    handle = compress(model, residual=8)
    handle.undo()
    monkeypatch.setattr(llama, "scaled_dot_product_attention", touching)
    handle = compress(model, residual=8)

    def run(caches: list[Any]) -> mx.array:
        parts = [(0, 50), (50, 50 + length), (50 + length, 53 + length)]
        return mx.stack([model(prompt(200)[None, a:b], cache=caches)[:, -1] for a, b in parts])

    want, caches = run(handle.plain_cache()), handle.make_cache()
    assert apart(run(caches), want) < 1e-3
    report = handle.report(caches)
    assert [e.status for e in report.layers] == ["dense", "dense"]
    assert all(r.lost == 1 for r in report.packed_layers)


def test_a_path_that_opens_after_many_tokens_needs_a_lazy_dense_side(compress: Any, monkeypatch: Any) -> None:
    """The one thing that no trial shows; ``dense="lazy"`` is for it."""
    stock = llama.scaled_dot_product_attention

    def touching(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        if k.shape[2] > 75:
            k = mx.concatenate([k], axis=2)
        return stock(q, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", touching)
    model = build("llama")
    tokens, _ = follow(model, make_prompt_cache(model))
    handle = compress(model, residual=8, dense="lazy")
    caches = make_prompt_cache(model)
    assert follow(model, caches)[0] == tokens
    report = handle.report(caches)
    assert [(e.status, e.report.lost, e.report.updates) for e in report.layers] == [("dense", 7, 12)] * 2
    assert len(inner(caches)) == 2
