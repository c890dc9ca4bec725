"""Generation with an exact method gives the plain cache's tokens, and the report says which layer did what."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm import hook

from .models import build, prompt

READ_DENSELY = ("deepseek_v3", "stablelm", "gemma2")
NATIVE = {
    "llama_windows": {1: "RotatingKVCache: a sliding window of 32", 2: "RotatingKVCache: a sliding window of 32"},
    "gemma3": dict.fromkeys((0, 1, 3, 4), "RotatingKVCache: a sliding window of 16"),
    "gpt_oss": dict.fromkeys((0, 2), "RotatingKVCache: a sliding window of 16"),
    "jamba": {0: "ArraysCache: recurrent state"},
}
PROMPT = 70
# test_architectures.py has all of them, with fewer steps.
NAMES = (
    "afm7", "deepseek_v3", "gemma2", "gemma3", "gpt_oss", "jamba", "llama", "llama_wide", "llama_windows", "qwen2",
    "qwen3", "stablelm",
)  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def named(request: Any) -> Any:
    return request.param, build(request.param)


def close(a: mx.array, b: mx.array) -> bool:
    return float(mx.abs(a - b).max()) < 1e-3


@pytest.mark.parametrize(("dense", "sinks"), [("auto", 0), ("auto", 4), ("lazy", 4), ("strict", 0)])
def test_an_exact_method_changes_no_token(named: Any, compress: Any, generate: Any, dense: str, sinks: int) -> None:
    """Acceptance 6."""
    name, model = named
    if dense == "strict" and name in READ_DENSELY:
        with pytest.raises(SettingsError, match="dense='strict': the model does more"):
            compress(model, dense=dense)
        return
    want, scores = generate(model, prompt(PROMPT))
    assert len(set(want)) > 2
    handle = compress(model, residual=8, sink_tokens=sinks, dense=dense)
    if name in READ_DENSELY:
        found, packed_scores = generate(model, prompt(PROMPT))
        with pytest.warns(RuntimeWarning, match="read"):
            report = handle.report()
    else:
        found, packed_scores = generate(model, prompt(PROMPT))
        report = handle.report()
    assert found == want
    assert close(packed_scores, scores)
    native = NATIVE.get(name, {})
    for entry in report.layers:
        assert entry.cache == "PackedKVCache" or entry.layer in native
        if entry.layer in native:
            assert (entry.status, entry.report) == ("native", None)
            assert entry.reason.startswith(native[entry.layer])
            assert entry.native_bytes > 0
            continue
        layer = entry.report
        # The last step of generation is fed, and its result not shown.
        assert (layer.tokens, layer.approximate) == (PROMPT + 60, 0)
        assert layer.exact == 8 + sinks and layer.packed == PROMPT + 60 - 8 - sinks
        assert layer.bytes.held > 0
        if name in READ_DENSELY:
            assert entry.status == "dense"
            if name == "deepseek_v3":
                assert "a latent cache" in entry.reason and layer.lost == layer.updates - layer.attentions == 3
            else:
                assert "itself" in entry.reason and layer.lost == layer.updates and not layer.attentions
        else:
            assert (entry.status, entry.reason, layer.lost) == ("packed", "", 0)
            assert layer.attentions >= layer.updates > 60
    assert not report.notes


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "afm7"])
def test_without_the_hook_all_is_computed_densely_and_said(name: str, compress: Any, generate: Any) -> None:
    model = build(name)
    want, scores = generate(model, prompt(PROMPT))
    handle = compress(model, residual=8, dense="lazy")
    hook.uninstall()
    try:
        found, packed_scores = generate(model, prompt(PROMPT))
    finally:
        hook.install()
    assert found == want and close(packed_scores, scores)
    ours = [i for i in range(len(handle.make_cache())) if i not in NATIVE.get(name, {})]
    found, _ = generate(model, prompt(PROMPT), prompt_cache=(caches := handle.make_cache()))
    assert found == want and not any(e.report and e.report.lost for e in handle.report(caches).layers)

    hook.uninstall()
    try:
        generate(model, prompt(PROMPT), prompt_cache=(caches := handle.make_cache()))
    finally:
        hook.install()
    with pytest.warns(RuntimeWarning) as warned:
        report = handle.report(caches)
        handle.report(caches)
    assert len(warned) == 1
    for index in ours:
        entry = report.layers[index]
        assert entry.status == "dense" and entry.report.lost == entry.report.updates > 60
        assert str(index) in str(warned[0].message)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_strict_caches_serve_a_model_whose_hook_is_gone(name: str, compress: Any, generate: Any) -> None:
    model = build(name)
    want, _ = generate(model, prompt(PROMPT))
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    handle.undo()
    assert generate(model, prompt(PROMPT), prompt_cache=caches)[0] == want


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")
def test_kivi_runs(name: str, bits: int, compress: Any, generate: Any) -> None:
    """Acceptance 6."""
    model = build(name)
    _, scores = generate(model, prompt(90), steps=1)
    handle = compress(model, f"kivi:bits={bits}", residual=0)
    found, packed_scores = generate(model, prompt(90), steps=1)
    assert len(found) == 1 and mx.isfinite(packed_scores).all()
    report = handle.report()
    assert report.packed and report.bytes.codes and report.bytes.metadata
    assert all(f"kivi:bits={bits}" in layer.keys for layer in report.packed_layers)
    # Packed history changes the numbers, else nothing was read from codes.
    assert float(mx.abs(packed_scores - scores).max()) > 1e-6


@pytest.mark.parametrize("length", [20, 200, 2000])
def test_windows_between_full_layers(length: int, compress: Any, generate: Any) -> None:
    """Case 32."""
    model = build("llama_windows")
    want, _ = generate(model, prompt(length), steps=40, prefill_step_size=512)
    handle = compress(model, residual=16)
    assert generate(model, prompt(length), steps=40, prefill_step_size=512)[0] == want
    report = handle.report()
    assert [e.status for e in report.layers] == ["packed", "native", "native", "packed"]
    assert [e.cache for e in report.layers[1:3]] == ["RotatingKVCache"] * 2
    assert all(r.packed == length + 40 - 16 for r in report.packed_layers)


def test_small_prefill_chunks(compress: Any) -> None:
    """Case 11: 8 bits, 16 heads of 64 with 16 KV heads, prefill in steps of 4 up to 64 tokens, one decode step."""
    model = build("llama_wide")
    handle = compress(model, "kivi:bits=8", residual=0)
    ids = prompt(65)[None]

    def run(step: int) -> mx.array:
        caches = handle.make_cache()
        for begin in range(0, 64, step):
            mx.eval(model(ids[:, begin : begin + step], cache=caches))
        last = model(ids[:, 64:], cache=caches)
        assert all(layer.packed == 64 for layer in handle.report(caches).packed_layers)
        return last

    small, whole = run(4), run(64)
    assert not mx.isnan(small).any()
    assert float(mx.abs(mx.softmax(small, axis=-1) - mx.softmax(whole, axis=-1)).max()) < 1e-2
