"""Sliding-window layers: ours beside mlx-lm's rotating cache, in calls and in whole models, and when packing pays."""

from __future__ import annotations

import copy
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache

from vq_core import PackedKVCache
from vq_core.attention.packed import stock_attention
from vq_core.errors import SettingsError

from .models import build, prompt

WINDOWED = ["llama_windows", "gemma3", "gpt_oss"]


@pytest.mark.parametrize("sliding", [16, 33, 200])
@pytest.mark.parametrize("seed", range(3))
def test_calls_agree_with_the_rotating_cache(sliding: int, seed: int) -> None:
    """Masks, lengths and attention, call by call, also under the other one's mask: layers of a kind share one."""
    draw = random.Random(seed)
    ours = PackedKVCache(method="identity", residual=draw.choice([0, 8, 64]), sliding=sliding)
    theirs = RotatingKVCache(max_size=sliding)
    for step in range(40):
        n = draw.choice([1, 1, 1, 2, 5, 40, 150])
        k, v, q = (mx.random.normal((1, h, n, 32), key=mx.random.key(100 * step + h)) for h in (2, 3, 4))
        v = v[:, :2]
        masks = [c.make_mask(n, window_size=sliding) for c in (ours, theirs)]
        if isinstance(masks[1], mx.array):
            assert mx.array_equal(*masks)
        else:
            assert masks[0] == masks[1]
        array = ours.make_mask(n, return_array=True, window_size=sliding)
        if n > 1:
            assert mx.array_equal(array, theirs.make_mask(n, return_array=True, window_size=sliding))
        ours_kv, theirs_kv = ours.update_and_fetch(k, v), theirs.update_and_fetch(k, v)
        assert ours_kv[0].shape == theirs_kv[0].shape
        assert (ours.offset, ours.size(), ours.empty()) == (theirs.offset, theirs.size(), False)
        want = stock_attention(q, *theirs_kv, scale=0.2, mask=masks[1])
        assert mx.allclose(ours_kv[0].vq_reading.attend(q, scale=0.2, mask=masks[0]), want, atol=1e-5)
        assert mx.allclose(stock_attention(q, *ours_kv, scale=0.2, mask=masks[1]), want, atol=1e-5)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("dense", ["auto", "lazy"])
@pytest.mark.parametrize("length", [20, 200, 700])
def test_an_exact_method_changes_no_token(name: str, dense: str, length: int, compress: Any, generate: Any) -> None:
    model = build(name)
    want, scores = generate(model, prompt(length), steps=40)
    handle = compress(model, residual=4, sink_tokens=3, dense=dense, windows="packed")
    found, packed_scores = generate(model, prompt(length), steps=40)
    assert found == want and float(mx.abs(packed_scores - scores).max()) < 1e-3
    report = handle.report()
    assert [e.status for e in report.layers] == ["packed"] * len(report.layers)
    sliding = [r for r in report.packed_layers if r.sliding]
    assert sliding and len(sliding) < len(report.layers)
    for layer in sliding:
        assert not layer.lost and layer.tokens <= layer.sliding + 128
        assert layer.packed > 0


@pytest.mark.parametrize("name", WINDOWED)
def test_packed_and_native_windows_share_a_mask(name: str, compress: Any, generate: Any) -> None:
    """One mask is made for all layers of a kind, from the first of them, packed or not."""
    model = build(name)
    want, _ = generate(model, prompt(150), steps=30)
    windows = [i for i, c in enumerate(model.make_cache()) if type(c) is RotatingKVCache]
    for left in (windows[0], windows[-1]):
        handle = compress(model, residual=4, windows="packed", layers={left: None})
        assert generate(model, prompt(150), steps=30)[0] == want
        assert [e.layer for e in handle.report().layers if e.status == "native"] == [left]
        handle.undo()


def test_packed_where_it_pays(compress: Any, generate: Any) -> None:
    """Acceptance of issue 3: by a rule, and the report says its numbers."""
    model = build("llama_windows", sliding_window=1024, head_dim=64)
    plain = model.make_cache()
    generate(model, prompt(1500), steps=4, prompt_cache=plain, prefill_step_size=512)
    handle = compress(model, "kivi:bits=2", residual=32)
    caches = handle.make_cache()
    _, scores = generate(model, prompt(1500), steps=4, prompt_cache=caches, prefill_step_size=512)
    assert mx.isfinite(scores).all()
    report = handle.report(caches)
    assert [(e.status, e.report.sliding) for e in report.layers] == [
        ("packed", None), ("packed", 1024), ("packed", 1024), ("packed", None)
    ]  # fmt: skip
    for index in (1, 2):
        held = caches[index].nbytes
        assert held <= 0.5 * plain[index].nbytes
        layer = report.layers[index].report
        assert layer.packed >= 900 and layer.bytes.held == held
        assert any("sliding window of 1,024" in note for note in layer.notes)
    handle.undo()

    small = build("llama_windows")
    entries = compress(small, "kivi:bits=2", residual=32).report().layers
    assert [e.status for e in entries] == ["packed", "native", "native", "packed"]
    assert "sliding window of 32 tokens, bounded already; packed it would hold up to" in entries[1].reason


def test_the_bound_of_the_rule_holds(compress: Any) -> None:
    """A full window never holds more than the number that decided."""
    from vq_core.hosts.mlx_lm.sliding import worst_bytes

    for method, dim, window in (
        ("kivi:bits=2", 64, 300),
        ("kivi:bits=4,group_size=64", 128, 1000),
        ("identity", 32, 64),
    ):
        cache = PackedKVCache(method=method, residual=40, sliding=window)
        most = 0
        for step in range(60):
            n = (1, 17, 130, 1, 64)[step % 5]
            x = mx.random.normal((1, 2, n, dim))
            cache.update_and_fetch(x, x)
            most = max(most, cache.nbytes)
            ours, native = worst_bytes(cache)
            assert cache.nbytes <= ours
        assert most > 0.6 * ours and native == window * 2 * 2 * dim * 4


def test_layers_that_read_a_window_again_keep_it_native(compress: Any, generate: Any) -> None:
    """Models whose later layers fetch an earlier layer's tokens need them as that layer's chunk had them."""
    model = build("gemma3n")
    want, _ = generate(model, prompt(90), steps=20)
    handle = compress(model, residual=4, windows="packed")
    assert generate(model, prompt(90), steps=20)[0] == want
    native = [e for e in handle.report().layers if e.status == "native"]
    assert native and all("another layer reads its tokens again" in e.reason for e in native)


def test_a_layer_with_a_method_of_its_own_is_packed(compress: Any, generate: Any) -> None:
    model = build("llama_windows")
    handle = compress(model, layers={1: "kivi:bits=8"}, residual=4)
    generate(model, prompt(200), steps=4)
    assert [e.status for e in handle.report().layers] == ["packed", "packed", "native", "packed"]
    assert "kivi:bits=8" in handle.report().layers[1].report.keys


def test_sink_tokens_asked_of_a_window_are_refused(compress: Any) -> None:
    with pytest.raises(SettingsError, match=r"sink_tokens=4 has no effect in layer 1.*window of 32.*entry 1"):
        compress(build("llama_windows"), layers={1: {"method": "kivi:bits=8", "sink_tokens": 4}})


def test_what_is_asked_of_windows_is_checked(compress: Any) -> None:
    model = build("llama_windows")
    with pytest.raises(SettingsError, match="windows must be one of auto, packed, native; got 'all'"):
        compress(model, windows="all")
    entries = compress(model, "kivi:bits=2", windows="native").report().layers
    assert [e.status for e in entries] == ["packed", "native", "native", "packed"]


def test_copies_and_files(compress: Any, generate: Any, tmp_path: Any) -> None:
    model = build("gemma3")
    handle = compress(model, "kivi:bits=4", residual=0, windows="packed")
    caches = handle.make_cache()
    generate(model, prompt(100), steps=2, prompt_cache=caches)
    twin = copy.deepcopy(caches)
    save_prompt_cache(str(tmp_path / "c.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "c.safetensors"))
    want = generate(model, prompt(30, seed=5), steps=20, prompt_cache=caches)
    for other in (twin, loaded):
        found = generate(model, prompt(30, seed=5), steps=20, prompt_cache=other)
        assert found[0] == want[0] and mx.array_equal(found[1], want[1])


def test_full_layers_keep_their_sink_tokens(compress: Any, generate: Any) -> None:
    model = build("llama_windows")
    handle = compress(model, "kivi:bits=4", residual=0, sink_tokens=8, windows="packed")
    caches = handle.make_cache()
    generate(model, prompt(200), steps=2, prompt_cache=caches)
    assert [c.policy.sink_tokens for c in caches] == [8, 0, 0, 8]
    assert "no sink tokens in layers 1, 2: the first tokens leave a sliding window" in handle.report().notes
    assert all(isinstance(c, PackedKVCache) and not isinstance(c, KVCache) for c in caches)
