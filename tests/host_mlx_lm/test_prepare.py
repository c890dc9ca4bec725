"""compress and undo: what changes on a model, what is refused before the first token, what the report tells."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models import cache as host
from mlx_lm.models.cache import KVCache, make_prompt_cache

import vq_core
from vq_core import PackedKVCache
from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl
from vq_core.attention.packed import stock_attention
from vq_core.cache.tagged import StrictTag, TaggedArray
from vq_core.errors import HostError, PluginError, SettingsError, UnsupportedShapeError
from vq_core.hosts.mlx_lm import check_version, compressed, hook
from vq_core.testing import registered

from .models import build, prompt


@pytest.fixture
def model() -> Any:
    return build("llama")


@attrs.frozen
class NoSettings:
    pass


class OnlySixtyFour:
    """A method that refuses every head size but 64."""

    @hookimpl
    def vq_method(self) -> MethodFacts:
        return MethodFacts("only64", "for tests", NoSettings, capabilities=Capabilities(head_dims=(64,)))

    @hookimpl
    def vq_prepare(self, ctx: Any) -> Any:
        if ctx.head_dim != 64:
            raise UnsupportedShapeError(f"head size {ctx.head_dim}: accepted is 64")
        return ctx

    @hookimpl
    def vq_layout(self, ctx: Any) -> Layout:
        return Layout(1, (Field("x", "float32", (128, ctx.head_dim), codes=True),))

    @hookimpl
    def vq_encode(self, x: mx.array) -> mx.array:
        return x

    @hookimpl
    def vq_pack(self, codes: mx.array) -> Any:
        return {"x": codes.astype(mx.float32)}

    @hookimpl
    def vq_decode(self, packed: Any) -> mx.array:
        return packed["x"]


@pytest.fixture
def only64() -> Iterator[None]:
    with registered(OnlySixtyFour()):
        yield


def untouched(model: Any) -> bool:
    return "make_cache" not in model.__dict__ and mx.fast.scaled_dot_product_attention is stock_attention


# ---- what changes and what is given back


def test_undo_restores_everything(model: Any) -> None:
    handle = vq_core.compress(model, method="identity")
    assert hook.installed() and [type(c) for c in make_prompt_cache(model)] == [PackedKVCache] * 2
    handle.undo()
    handle.undo()
    assert untouched(model) and [type(c) for c in make_prompt_cache(model)] == [KVCache] * 2
    handle.redo()
    assert hook.installed() and type(make_prompt_cache(model)[0]) is PackedKVCache
    handle.undo()
    assert untouched(model)


def test_undo_restores_a_make_cache_of_the_users(model: Any) -> None:
    def mine() -> list[Any]:
        return [KVCache(), host.RotatingKVCache(max_size=8)]

    model.make_cache = mine
    handle = vq_core.compress(model, method="identity")
    assert [type(c) for c in make_prompt_cache(model)] == [PackedKVCache, host.RotatingKVCache]
    second = vq_core.compress(model, method="identity", residual=3)
    assert [type(c) for c in make_prompt_cache(model)] == [PackedKVCache, host.RotatingKVCache]
    second.undo()
    handle.undo()
    assert model.make_cache is mine


def test_undo_leaves_a_make_cache_that_came_later(model: Any) -> None:
    handle = vq_core.compress(model, method="identity")
    later = model.make_cache = lambda: []
    handle.undo()
    assert model.make_cache is later


def test_a_model_without_make_cache(compress: Any, generate: Any) -> None:
    model = build("qwen2")
    assert not hasattr(model, "make_cache")
    want, _ = generate(model, prompt(40), steps=20)
    handle = compress(model, residual=8)
    assert generate(model, prompt(40), steps=20)[0] == want
    assert [type(c) for c in handle.plain_cache()] == [KVCache] * 2
    handle.undo()
    assert not hasattr(model, "make_cache")


def test_compressing_twice_replaces_the_policy(model: Any) -> None:
    first = vq_core.compress(model, method="identity", residual=8)
    attention = mx.fast.scaled_dot_product_attention
    second = vq_core.compress(model, method="identity", residual=4)
    assert make_prompt_cache(model)[0].policy.residual == 4
    assert mx.fast.scaled_dot_product_attention is attention
    first.undo()
    assert hook.installed() and make_prompt_cache(model)[0].policy.residual == 4
    second.undo()
    assert untouched(model)


@pytest.mark.parametrize(
    "options",
    [{"method": "nothing"}, {"method": "only64"}, {"method": "identity", "layers": {7: None}}],
    ids=("unknown method", "refused shape", "no such layer"),
)
def test_a_failing_second_compress_leaves_the_first(model: Any, only64: None, options: Any, generate: Any) -> None:
    want, _ = generate(model, prompt(40), steps=20)
    with compressed(model, method="identity", residual=8) as handle:
        with pytest.raises(vq_core.VQError):
            vq_core.compress(model, **options)
        assert generate(model, prompt(40), steps=20)[0] == want
        assert handle.report().packed
    assert untouched(model)


def test_an_interrupted_second_compress_leaves_the_first(model: Any, monkeypatch: Any) -> None:
    with compressed(model, method="identity", residual=8):
        monkeypatch.setattr(vq_core.hosts.mlx_lm.CompressedModel, "_try_out", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            vq_core.compress(model, method="identity", residual=4)
        assert hook.installed() and make_prompt_cache(model)[0].policy.residual == 8
    assert untouched(model)


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_two_models_one_undone(generate: Any) -> None:
    models = build("llama"), build("qwen3")
    want = [generate(m, prompt(40), steps=20)[0] for m in models]
    handles = [vq_core.compress(m, method="identity", residual=8) for m in models]
    handles[0].undo()
    assert [generate(m, prompt(40), steps=20)[0] for m in models] == want
    assert type(make_prompt_cache(models[0])[0]) is KVCache
    report = handles[1].report()
    assert report.packed and not any(r.lost for r in report.packed_layers)
    handles[1].undo()
    assert all(map(untouched, models))


def test_a_copied_model_is_its_own(model: Any, generate: Any) -> None:
    want, _ = generate(model, prompt(40), steps=20)
    first = vq_core.compress(model, method="identity", residual=8)
    other = copy.deepcopy(model)
    assert generate(other, prompt(40), steps=20)[0] == want
    second = vq_core.compress(other, method="identity", residual=2)
    assert make_prompt_cache(model)[0].policy.residual == 8
    assert make_prompt_cache(other)[0].policy.residual == 2
    second.undo()
    assert type(make_prompt_cache(other)[0]) is KVCache and hook.installed()
    assert generate(model, prompt(40), steps=20)[0] == want and first.report().packed
    first.undo()
    assert untouched(model) and untouched(other)


def test_somebody_elses_replacement_of_attention_survives(generate: Any) -> None:
    """Theirs on top of ours, ours again on top of theirs: no circle, and nothing of theirs is lost."""
    models = build("llama"), build("llama", seed=5), build("llama", seed=6)
    want = [generate(m, prompt(40), steps=20)[0] for m in models]
    first = vq_core.compress(models[0], method="identity", residual=8)
    ours, calls = mx.fast.scaled_dot_product_attention, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    mx.fast.scaled_dot_product_attention = theirs
    try:
        assert generate(models[0], prompt(40), steps=20)[0] == want[0]
        assert calls and not any(r.lost for r in first.report().packed_layers)
        second = vq_core.compress(models[1], method="identity", residual=8)
        assert [generate(m, prompt(40), steps=20)[0] for m in models] == want
        second.undo()
        first.undo()
        assert mx.fast.scaled_dot_product_attention is theirs
        assert [generate(m, prompt(40), steps=20)[0] for m in models] == want
    finally:
        mx.fast.scaled_dot_product_attention = stock_attention


def test_attention_keeps_its_other_arguments(model: Any, compress: Any) -> None:
    compress(model)
    q, k = mx.random.normal((1, 4, 3, 32)), mx.random.normal((1, 2, 3, 32))
    want = stock_attention(q, k, k, scale=0.2, mask="causal")
    for rest in ({"stream": mx.cpu}, {"stream": mx.new_stream(mx.cpu)}, {"force_fused": False}):
        assert mx.array_equal(mx.fast.scaled_dot_product_attention(q, k, k, scale=0.2, mask="causal", **rest), want)
        cache = PackedKVCache(method="identity")
        tags = cache.update_and_fetch(k, k)
        assert mx.array_equal(mx.fast.scaled_dot_product_attention(q, *tags, scale=0.2, mask="causal", **rest), want)
        assert cache.reads.packed == 1
        # One tag alone is an array like any other.
        mixed = mx.fast.scaled_dot_product_attention(q, tags[0], k, scale=0.2, mask="causal", **rest)
        assert mx.array_equal(mixed, want)


# ---- layers


def test_exceptions_by_layer(compress: Any, generate: Any) -> None:
    model = build("llama", num_hidden_layers=4)
    want, _ = generate(model, prompt(60), steps=20)
    handle = compress(model, residual=8, layers={0: None, -1: "kivi:bits=8", 1: {"residual": 2, "keys": "kivi:bits=8"}})
    got, _ = generate(model, prompt(60), steps=20)
    report = handle.report()
    assert [e.status for e in report.layers] == ["native", "packed", "packed", "packed"]
    assert report.layers[0].reason == "skipped by layers=" and report.layers[0].native_bytes > 0
    one, two, last = report.packed_layers
    assert one.keys.startswith("kivi:bits=8") and one.values == "identity" and one.exact < 2 + 32
    assert (two.keys, two.packed) == ("identity", 72)
    assert last.keys == last.values == "kivi:bits=8,group_size=32" and 8 <= last.exact < 8 + 32
    assert len(got) == len(want)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({2: None}, r"layers 0 to 1, not \[2\]"),
        ({-3: None}, r"layers 0 to 1, not \[-3\]"),
        ({1: None, -1: "identity"}, "as well"),
        ({"0": None}, "layer indices"),
        ({0.0: None}, "layer indices"),
        ({True: None}, "layer indices"),
        ({0: 5}, "layer 0"),
        ({0: {"bits": 4}}, "layer 0.*bits"),
        ({0: "nothing"}, "layer 0.*unknown method"),
        ([None, None], "dictionary"),
    ],
)
def test_wrong_layers_are_refused(model: Any, layers: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        vq_core.compress(model, method="identity", layers=layers)
    assert untouched(model)


@pytest.mark.parametrize(("name", "layer"), [("llama_windows", 1), ("llama_windows", -2), ("jamba", 0)])
def test_a_layer_that_cannot_be_packed_cannot_be_asked_for(name: str, layer: int) -> None:
    model = build(name)
    with pytest.raises(SettingsError, match=r"cannot be packed.*leave"):
        vq_core.compress(model, method="identity", layers={layer: "kivi:bits=8"}, windows="native")
    assert "make_cache" not in model.__dict__
    vq_core.compress(model, method="identity", layers={layer: None}, windows="native").undo()


# ---- refused before the first token


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"method": "nothing"}, SettingsError, "unknown method 'nothing'"),
        ({"method": "kivi:bits=5"}, SettingsError, "bits"),
        ({"method": "kivi:group=5"}, SettingsError, "group_size"),
        ({"method": "identity", "keys": "identity"}, SettingsError, "not both"),
        ({"keys": "identity"}, SettingsError, "no method for the values"),
        ({}, SettingsError, "no method"),
        ({"method": ""}, SettingsError, "method"),
        ({"method": "identity", "residual": -1}, SettingsError, "residual"),
        ({"method": "identity", "residual": 1.5}, SettingsError, "residual"),
        ({"method": "identity", "sink_tokens": -1}, SettingsError, "sink_tokens"),
        ({"method": "identity", "attention": "fast"}, SettingsError, "attention"),
        ({"method": "identity", "fallback": "never"}, SettingsError, "fallback"),
        ({"method": "identity", "dense": "never"}, SettingsError, "dense"),
        ({"method": "only64"}, UnsupportedShapeError, r"layer 0 .*layers=\{0: None\}.*head size 32: accepted is 64"),
    ],
    ids=str,
)
def test_refused_before_the_first_token(model: Any, only64: None, options: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        vq_core.compress(model, **options)
    assert untouched(model) and type(make_prompt_cache(model)[0]) is KVCache


def test_a_broken_method_is_refused_before_the_first_token(model: Any) -> None:
    class Broken(OnlySixtyFour):
        @hookimpl
        def vq_prepare(self, ctx: Any) -> Any:
            raise ZeroDivisionError("no rotation")

    with registered(Broken()), pytest.raises(PluginError, match=r"layer 0.*vq_prepare failed with ZeroDivisionError"):
        vq_core.compress(model, method="only64")
    assert untouched(model)


@pytest.mark.parametrize("thing", [None, ("model", "tokenizer"), "mlx-community/model"], ids=str)
def test_something_that_is_no_model(thing: Any) -> None:
    with pytest.raises(SettingsError, match="compress takes a model"):
        vq_core.compress(thing, method="identity")


@pytest.mark.parametrize("version", ["0.31.3", "0.33.0", "0.31", "1.0.0", "0.3.2", "0.33.0.dev0"])
def test_other_versions_of_mlx_lm_are_refused(version: str, monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(HostError, match=rf"mlx-lm {version} is installed.*pip install 'mlx-lm>=0.32,<0.33'"):
        check_version()
    with pytest.raises(HostError):
        vq_core.compress(model, method="identity")
    assert untouched(model)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.2", "0.32.11", "0.32.1.post1"])
def test_versions_of_mlx_lm_that_are_known(version: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert check_version() == version


def test_a_missing_mlx_lm_is_said(monkeypatch: Any, model: Any) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(HostError, match="not installed: pip install"):
        vq_core.compress(model, method="identity")


# ---- the cache as mlx-lm sees it


def test_no_attribute_leads_mlx_lm_astray(model: Any, compress: Any) -> None:
    """Case 22: ``bits`` on a cache sends it to mlx-lm's own quantized attention."""
    handle = compress(model, "kivi:bits=4")
    cache = handle.make_cache()[0]
    x = mx.random.normal((1, 2, 200, 32))
    for fresh in (cache, PackedKVCache(method="kivi:bits=4"), copy.deepcopy(cache)):
        for thing in (fresh, *fresh.update_and_fetch(x, x), *fresh.keys_and_values()):
            assert not hasattr(thing, "bits") and not hasattr(thing, "to_quantized")
    found = getattr(host, PackedKVCache.__name__)
    assert found is PackedKVCache  # case 23: registered under its own name, which is no name of mlx-lm's
    assert bool(cache) and not hasattr(cache, "__len__")


@pytest.mark.parametrize("dense", ["lazy", "strict"])
def test_queries_are_left_alone(model: Any, compress: Any, dense: str) -> None:
    """Case 22: mlx-lm's quantized attention scales the caller's queries in place."""
    cache = compress(model, "kivi:bits=4", residual=8, dense=dense).make_cache()[0]
    x = mx.random.normal((1, 2, 100, 32))
    for length in (1, 5, 40):
        q = mx.random.normal((1, 4, length, 32))
        before = mx.array(q)
        tags = cache.update_and_fetch(x[:, :, :length], x[:, :, :length])
        assert type(tags[0]) is {"lazy": TaggedArray, "strict": StrictTag}[dense]
        mx.eval(mx.fast.scaled_dot_product_attention(q, *tags, scale=0.3, mask="causal" if length > 1 else None))
        assert mx.array_equal(q, before)


def test_a_fresh_cache_answers(model: Any, compress: Any) -> None:
    """Case 8."""
    handle = compress(model, "kivi:bits=4", residual=16)
    for cache in (*handle.make_cache(), PackedKVCache(method="identity")):
        assert (cache.nbytes, cache.size(), cache.offset) == (0, 0, 0)
        assert cache.empty() and cache.is_trimmable() and cache.trim(3) == 0
        mx.eval(cache.state)
        twin = copy.deepcopy(cache)
        assert twin.empty() and twin.policy == cache.policy
    caches = handle.make_cache()
    ids = prompt(1025)[None]
    for begin in range(0, 1025, 512):
        model(ids[:, begin : begin + 512], cache=caches)
        mx.eval([c.state for c in caches])
    assert [c.size() for c in caches] == [1025] * 2


def test_masks_are_mlx_lms() -> None:
    ours, theirs = PackedKVCache(method="identity"), KVCache()
    for length in (3, 1, 5):
        for n in (1, 2, 7):
            for options in ({}, {"return_array": True}, {"window_size": 4}, {"window_size": 4, "return_array": True}):
                a = ours.make_mask(n, **options)
                b = theirs.make_mask(n, **{"return_array": False, "window_size": None, **options})
                assert type(a) is type(b)
                assert mx.array_equal(a, b) if isinstance(a, mx.array) else a == b
        x = mx.zeros((1, 1, length, 8))
        ours.update_and_fetch(x, x), theirs.update_and_fetch(x, x)


# ---- the report


def test_the_report_outlives_the_caches(compress: Any, generate: Any) -> None:
    model = build("gemma3")
    handle = compress(model, "kivi:bits=4", residual=8)
    assert not handle.report().packed and not handle.report().notes
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    generate(model, prompt(200), steps=20)
    report = handle.report()
    assert report.packed and report.bytes.held and report.native_bytes
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 4096
    assert handle.report() == report
    caches = make_prompt_cache(model)
    assert not handle.report().packed
    generate(model, prompt(200), steps=20, prompt_cache=caches)
    assert handle.report() == report == handle.report(caches)


def test_nothing_packed_is_said(model: Any, compress: Any, generate: Any) -> None:
    """Case 34."""
    handle = compress(model, residual=128)
    generate(model, prompt(40), steps=5)
    report = handle.report()
    assert report.packed == 0 and any("no token is packed" in note for note in report.notes)
    assert all(any("no token is packed" in note for note in r.notes) for r in report.packed_layers)


def test_no_layer_packed_is_said(model: Any, compress: Any, generate: Any) -> None:
    """Case 34."""
    handle = compress(model, layers={0: None, 1: None})
    generate(model, prompt(40), steps=5)
    report = handle.report()
    assert any("no layer is packed" in note for note in report.notes)
    assert report.bytes.held == 0 and report.tokens() == (0, 0, 0) and report.native_bytes > 0


def test_500_tokens_are_accounted_for(model: Any, compress: Any, generate: Any) -> None:
    """Case 34."""
    handle = compress(model, "kivi:bits=2", residual=64)
    generate(model, prompt(480), steps=20)
    for layer in handle.report().packed_layers:
        assert layer.keys == layer.values == "kivi:bits=2,group_size=32"
        assert (layer.tokens, layer.packed, layer.exact, layer.approximate) == (500, 416, 84, 0)
        assert layer.bytes.fp16 == 500 * 2 * 2 * 32 * 2
        assert layer.bytes.codes > 0 and layer.bytes.held > layer.bytes.codes + layer.bytes.metadata


def test_caches_made_elsewhere_are_named(model: Any, compress: Any, generate: Any) -> None:
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    caches[1] = KVCache()
    generate(model, prompt(40), steps=5, prompt_cache=caches)
    report = handle.report(caches)
    assert [e.status for e in report.layers] == ["packed", "native"]
    assert report.layers[1].reason == "this cache was not made by vq" and report.layers[1].cache == "KVCache"
    with pytest.raises(SettingsError, match="1 caches given; the model has 2 layers"):
        handle.report(caches[:1])


def test_the_report_is_json(compress: Any, generate: Any) -> None:
    import json

    model = build("gpt_oss")
    handle = compress(model, "kivi:bits=4", residual=8)
    generate(model, prompt(60), steps=5)
    made = json.loads(json.dumps(handle.report().as_dict()))
    assert [layer["status"] for layer in made["layers"]] == ["native", "packed"] * 2
    assert made["bytes"]["held"] == sum(layer["report"]["bytes"]["held"] for layer in made["layers"][1::2])
    assert made["bytes"]["ratio"] == pytest.approx(made["bytes"]["fp16"] / made["bytes"]["held"], abs=1e-4)


def test_constants_that_layers_share_count_once(compress: Any, generate: Any) -> None:
    """Layers of one shape share a method's constants, as long as their caches live and after that."""
    import json
    from pathlib import Path

    from vq_core.testing import load_plugin, registered

    model = build("llama", num_hidden_layers=3)
    with registered(load_plugin(Path(__file__).parent.parent / "methods" / "sign_sketch.py")):
        handle = compress(model, None, keys="sign_sketch", values="identity", residual=8)
        caches = handle.make_cache()
        generate(model, prompt(60), steps=5, prompt_cache=caches)
        alive = handle.report()
        del caches
        for report in (alive, handle.report()):
            one = {layer.bytes.constants for layer in report.packed_layers}
            assert len(report.packed_layers) == 3 and len(one) == 1 and one != {0}
            assert {report.bytes.constants} == one
            assert {json.loads(json.dumps(report.as_dict()))["bytes"]["constants"]} == one


@pytest.mark.parametrize("dense", ["auto", "lazy"])
def test_a_tag_lost_in_a_compiled_function_shows(compress: Any, generate: Any, monkeypatch: Any, dense: str) -> None:
    """One layer hands keys and values to mx.compile, whose arguments are plain arrays inside."""
    model = build("llama", num_hidden_layers=3)
    want, _ = generate(model, prompt(50), steps=20)
    module = model.layers[1].self_attn

    @mx.compile
    def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        mask = "causal" if q.shape[2] > 1 else None
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=module.scale, mask=mask)

    def call(x: mx.array, mask: Any, cache: Any) -> mx.array:
        def heads(projection: Any, n: int) -> mx.array:
            return projection(x).reshape(*x.shape[:2], n, -1).transpose(0, 2, 1, 3)

        q, k = (module.rope(heads(p, n), offset=cache.offset) for p, n in ((module.q_proj, 4), (module.k_proj, 2)))
        out = attention(q, *cache.update_and_fetch(k, heads(module.v_proj, 2)))
        return module.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))

    model.layers[1].self_attn = call
    handle = compress(model, residual=8, dense=dense)
    assert generate(model, prompt(50), steps=20)[0] == want
    with pytest.warns(RuntimeWarning, match=r"^not read by packed attention: layer 1: [^;]*; [^;]*$"):
        report = handle.report()
    assert [e.status for e in report.layers] == ["packed", "dense", "packed"]
    lost = report.layers[1].report
    assert lost.lost == lost.updates > 20 and lost.attentions == 0
    assert f"{lost.tokens * 2 * 64 * 4:,} bytes" in report.layers[1].reason


def test_strict_tags_build_no_dense_side(model: Any, compress: Any, generate: Any) -> None:
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    generate(model, prompt(100), prompt_cache=caches)
    for cache in caches:
        reads = cache.reads
        assert reads.dense == reads.lost == 0 and reads.packed == reads.updates > 60
        assert type(cache.keys_and_values()[0]) is StrictTag


def test_a_model_that_cannot_be_tried_out_still_runs(compress: Any, generate: Any) -> None:
    inner = build("llama")

    class Picky:
        layers = inner.layers
        make_cache = inner.make_cache

        def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
            if not ids.any().item():
                raise RuntimeError("no token but padding")
            return inner(ids, cache=cache)

    model = Picky()
    want, _ = generate(model, prompt(40), steps=20)
    handle = compress(model, residual=8)
    assert generate(model, prompt(40), steps=20)[0] == want
    report = handle.report()
    assert report.packed and any("could not be tried out" in note and "no token but" in note for note in report.notes)


def test_a_layer_that_the_model_never_updates(compress: Any, generate: Any) -> None:
    inner = build("llama")
    model = SimpleNamespace(layers=[*inner.layers, None])
    run: Callable[..., Any] = lambda ids, cache=None: inner(ids, cache=cache and cache[:2])  # noqa: E731
    model = type("Spare", (), {"layers": model.layers, "__call__": lambda self, *a, **k: run(*a, **k)})()
    handle = compress(model, residual=8)
    generate(model, prompt(40), steps=5)
    last = handle.report().layers[2]
    assert (last.status, last.reason) == ("native", "the model never updates this layer's cache")


def test_a_model_whose_dtype_changes_after_compress(compress: Callable[..., Any]) -> None:
    """The trial run has bound the methods to the dtype of then; an empty cache binds again."""
    model = build("llama")
    compress(model, residual=8)
    model.set_dtype(mx.float16)
    cache = model.make_cache()[0]
    x = mx.ones((1, cache._shape()[1], 20, cache._shape()[2]), mx.float16)
    cache.update_and_fetch(x, x)
    assert cache.decode()[0].dtype == mx.float16
    with pytest.raises(UnsupportedShapeError, match="dtype float16 -> float32"):
        cache.update_and_fetch(x.astype(mx.float32), x.astype(mx.float32))


def test_saved_by_mlx_lm_and_loaded(compress: Callable[..., Any], generate: Any, tmp_path: Any) -> None:
    """Cases 23 and 25: mlx-lm finds our class, and what is loaded goes on as what was saved."""
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    model = build("llama")
    compress(model, "kivi:bits=4", residual=8, sink_tokens=4)
    caches = make_prompt_cache(model)
    tokens = mx.arange(90)[None] % 50
    mx.eval(model(tokens, cache=caches))
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [c.offset for c in loaded] == [90] * len(caches)
    for token in range(5):
        a, b = (model(mx.array([[token]]), cache=c) for c in (caches, loaded))
        assert mx.array_equal(a, b)


def test_a_path_that_depends_on_the_chunk(compress: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that touches the keys of long chunks alone must not be given tags without a dense side."""
    from mlx_lm.models import llama

    stock = llama.scaled_dot_product_attention

    def touching(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        if q.shape[2] > 8:
            k = mx.concatenate([k], axis=2)
        return stock(q, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", touching)
    model = build("llama")
    want = model(prompt(30)[None], cache=make_prompt_cache(model))
    compress(model, residual=8)
    got = model(prompt(30)[None], cache=model.make_cache())
    assert mx.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("n", (2.5, True, "3", -1))
def test_trim_of_what_is_no_count(n: Any) -> None:
    cache = PackedKVCache(method="kivi:bits=4")
    x = mx.ones((1, 2, 300, 32))
    cache.update_and_fetch(x, x)
    with pytest.raises(SettingsError, match="whole number"):
        cache.trim(n)
    assert cache.offset == 300 and cache.report().tokens == 300
