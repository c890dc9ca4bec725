"""save_cache and load_cache: what is kept, what is checked, what is refused."""

from __future__ import annotations

import copy
import errno
import importlib.metadata
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as native
from mlx_lm.models.cache import make_prompt_cache

import vq_core
from vq_core import FormatError, HostError, PackedKVCache, SettingsError
from vq_core.files import tensors
from vq_core.hosts.mlx_lm import expected, saved, versions
from vq_core.plugins import registry
from vq_core.testing import load_plugin, registered

from .models import build, prompt

CENTRED = load_plugin(Path(__file__).parent.parent / "methods" / "centred.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.vq"


def content(cache: Any) -> Any:
    """All that a cache holds, as bytes and plain values."""
    state = [(type(c).__name__, content(c)) for c in cache.caches] if hasattr(cache, "caches") else cache.state
    return _plain(state)


def _plain(value: Any) -> Any:
    if isinstance(value, mx.array):
        return (value.shape, str(value.dtype), bytes(memoryview(mx.contiguous(value.reshape(-1)).view(mx.uint8))))
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def filled(cache: Any, tokens: int = 40, dtype: mx.Dtype = mx.float32, dims: tuple[int, int] = (32, 32)) -> Any:
    for n in (tokens - 1, 1):
        keys, values = (mx.random.normal((1, 2, n, d), key=mx.random.key(d + n)).astype(dtype) for d in dims)
        cache.update_and_fetch(keys, values)
    return cache


def arrays_cache(padded: bool) -> Any:
    cache = native.ArraysCache(3, left_padding=[1, 0] if padded else None)
    cache[0] = mx.array([[1.0, -0.0], [float("nan"), 2.0]], mx.bfloat16)
    cache[2] = mx.ones((2, 3, 4))
    if padded:
        cache.prepare(lengths=[5, 6])
    return cache


def trimmed(cache: Any, n: int) -> Any:
    cache.trim(n)
    return cache


def kivi(**options: Any) -> PackedKVCache:
    return PackedKVCache(method="kivi:bits=4", residual=8, **options)


NATIVE: dict[str, Callable[[], Any]] = {
    "plain": lambda: filled(native.KVCache()),
    "plain, 300 tokens, bfloat16, other dims": lambda: filled(native.KVCache(), 300, mx.bfloat16, (32, 16)),
    "plain, empty": native.KVCache,
    "plain, trimmed to nothing": lambda: trimmed(filled(native.KVCache()), 40),
    "concatenating": lambda: filled(native.ConcatenateKVCache()),
    "concatenating, empty": native.ConcatenateKVCache,
    "quantized": lambda: filled(native.QuantizedKVCache(32, 4), dtype=mx.float16),
    "quantized, made of a plain one": lambda: filled(native.KVCache()).to_quantized(32, 8),
    "quantized, empty": lambda: native.QuantizedKVCache(32, 4),
    "rotating, within": lambda: filled(native.RotatingKVCache(64, keep=4)),
    "rotating, beyond": lambda: filled(native.RotatingKVCache(16, keep=4)),
    "rotating, trimmed": lambda: trimmed(filled(native.RotatingKVCache(64)), 7),
    "rotating, empty": lambda: native.RotatingKVCache(64, keep=4),
    "chunked": lambda: filled(native.ChunkedKVCache(16)),
    "chunked, empty": lambda: native.ChunkedKVCache(16),
    "arrays": lambda: arrays_cache(False),
    "arrays of padded rows": lambda: arrays_cache(True),
    "arrays, empty": lambda: native.ArraysCache(2),
    "list": lambda: native.CacheList(arrays_cache(False), filled(native.KVCache()), native.RotatingKVCache(8)),
    "list of lists with ours": lambda: native.CacheList(
        native.CacheList(filled(kivi()), native.ArraysCache(1)), filled(kivi(sink_tokens=2), 90)
    ),
    "ours": lambda: filled(kivi(), 90),
    "ours, bfloat16, sinks, trimmed": lambda: trimmed(filled(kivi(sink_tokens=3), 90, mx.bfloat16), 50),
    "ours, rows of unequal length": lambda: PackedKVCache.join([filled(kivi(), 90), filled(kivi(), 300)]),
    "ours, empty": kivi,
    "ours, trimmed to nothing": lambda: trimmed(filled(kivi(), 90), 90),
    "ours, nothing exact": lambda: filled(PackedKVCache(method="kivi:bits=4", residual=0), 128),
}


@pytest.mark.parametrize("name", NATIVE)
def test_every_class_comes_back(path: Path, name: str) -> None:
    cache = NATIVE[name]()
    vq_core.save_cache(path, [cache, native.KVCache()])
    again, other = vq_core.load_cache(path)
    os.unlink(path)
    assert type(again) is type(cache) and other.empty()
    assert content(again) == content(cache)
    if "list" not in name and "arrays" not in name and "rows" not in name:
        dtype = mx.bfloat16 if "bfloat16" in name else mx.float16 if name == "quantized" else mx.float32
        for one in (cache, again):
            filled(one, 9, dtype, (32, 16) if "other" in name else (32, 32))
        assert content(again) == content(cache)


class KVCache(native.KVCache):  # type: ignore[misc]
    """Somebody else's class, of the name of mlx-lm's."""


def test_a_model_that_cannot_be_tried_out_is_said(path: Path) -> None:
    """Its native layers' shapes are then not checked, which must not pass in silence."""
    model = build("llama")
    vq_core.save_cache(path, make_prompt_cache(model), model=model)

    class Other(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("called in another way")

    model.__class__ = Other
    with pytest.warns(RuntimeWarning, match="could not be tried out .LookupError: called in another way"):
        expected.expected(model)


class Ours(PackedKVCache):
    """Somebody else's, made of ours: what it adds would be lost."""


@pytest.mark.parametrize(
    ("caches", "said"),
    [
        ([KVCache()], r"test_saved\.KVCache are not known; known are PackedKVCache"),
        ([native.BatchKVCache([0, 0])], r"mlx_lm\.models\.cache\.BatchKVCache are not known"),
        ([object()], "object are not known"),
        ([Ours(method="kivi")], r"test_saved\.Ours are not known"),
        ([native.CacheList(native.KVCache(), KVCache())], "not known"),
        ([], "at least one cache"),
        (None, "at least one cache"),
        (native.KVCache(), "at least one cache"),
    ],
)
def test_caches_that_cannot_be_saved(path: Path, caches: Any, said: str) -> None:
    path.write_bytes(b"old")
    with pytest.raises(SettingsError, match=said):
        vq_core.save_cache(path, caches)
    assert path.read_bytes() == b"old"


def test_a_cache_in_a_state_that_none_has(path: Path) -> None:
    """What load would refuse is refused by save."""
    cache = filled(native.KVCache())
    cache.offset = 500
    with pytest.raises(SettingsError, match="offset of a KVCache must be a whole number from 0 to 256, not 500"):
        vq_core.save_cache(path, [cache])
    cache.keys, cache.offset = cache.keys[0], 3
    with pytest.raises(SettingsError, match="the keys of a KVCache must be floating-point"):
        vq_core.save_cache(path, [cache])


# ---- metadata


def test_metadata(path: Path) -> None:
    texts = {"": "", "tokens": "[1, 2]", "é \udc00": "\U0001f600 \x00"}
    vq_core.save_cache(path, [native.KVCache()], metadata=texts)
    assert vq_core.read_metadata(path) == saved.read_metadata(path) == texts
    vq_core.save_cache(path, [native.KVCache()])
    assert vq_core.read_metadata(path) == {}


@pytest.mark.parametrize("metadata", ([("a", "b")], {"a": 1}, {1: "a"}, "text"))
def test_metadata_that_is_none(path: Path, metadata: Any) -> None:
    with pytest.raises(SettingsError, match="dictionary of text by text"):
        vq_core.save_cache(path, [native.KVCache()], metadata=metadata)
    assert not path.exists()


# ---- the model


def test_what_a_compressed_model_s_caches_carry(compress: Any, path: Path) -> None:
    model = build("llama_windows")
    handle = compress(model, "kivi:bits=4", residual=8)
    caches = handle.make_cache()
    model(prompt(60)[None], cache=caches)
    vq_core.save_cache(path, caches, model=model)
    loaded = vq_core.load_cache(path, model=handle)
    assert [getattr(c, "layer", None) for c in loaded] == [0, None, None, 3]
    for token in (3, 4):
        a, b = (model(mx.array([[token]]), cache=c) for c in (caches, loaded))
        assert mx.array_equal(a, b)
    assert handle.report().as_dict() == handle.report(loaded).as_dict()
    entry = handle.report().layers[0]
    assert entry.status == "packed" and entry.report is not None and not entry.report.lost
    assert loaded[0].reads.dense == 0 and loaded[0]._strict is caches[0]._strict


def test_a_copy_of_a_compressed_model(compress: Any, path: Path) -> None:
    """It makes its caches through the original's handle, and is judged as the original is."""
    model = build("llama")
    handle = compress(model, "kivi:bits=4", residual=8)
    vq_core.save_cache(path, caches := handle.make_cache(), model=model)
    other = copy.deepcopy(model)
    assert [c.policy for c in vq_core.load_cache(path, model=other)] == [c.policy for c in caches]
    other.model.layers[0].self_attn.q_proj.weight = other.model.layers[0].self_attn.q_proj.weight + 1
    with pytest.raises(FormatError, match="other weights"):
        vq_core.load_cache(path, model=other)


def test_a_model_prepared_or_not(compress: Any, path: Path) -> None:
    """Packed caches go with a model that is not prepared, read densely; plain ones not with one that is."""
    model = build("llama")
    vq_core.save_cache(path, plain := make_prompt_cache(model), model=model)
    assert [type(c) for c in vq_core.load_cache(path, model=model)] == [type(c) for c in plain]
    handle = compress(model, "kivi:bits=4", residual=8)
    with pytest.raises(FormatError, match=r"layer 0: KVCache in the file, the model makes PackedKVCache \(it is prep"):
        vq_core.load_cache(path, model=model)
    caches = handle.make_cache()
    want = model(prompt(60)[None], cache=caches)
    vq_core.save_cache(path, caches, model=handle)
    handle.undo()
    loaded = vq_core.load_cache(path, model=model)
    assert [c.offset for c in loaded] == [60, 60] and want.shape[1] == 60
    assert model(mx.array([[5]]), cache=loaded).shape == (1, 1, 101)


DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "bits": ("llama", {}, {"method": "kivi:bits=2"}, "layer 0: keys 'kivi:bits=4,group_size=32' in the file, 'kivi"),
    "residual": ("llama", {}, {"residual": 16}, "layer 1: residual 8 in the file, 16 in the model"),
    "sinks": ("llama", {}, {"sink_tokens": 4}, "layer 1: sink_tokens 0 in the file, 4 in the model"),
    "a layer left out": ("llama", {}, {"layers": {0: None}}, "layer 0: PackedKVCache in the file, the model makes KV"),
    "weights": ("llama", {"seed": 5}, {}, "other weights of the same architecture"),
    "layers": ("llama", {"num_hidden_layers": 3}, {}, "2 layers in the file, the model has 3"),
    "head size": ("llama", {"head_dim": 64}, {}, "layer 0: key_dim 32 in the file, 64 in the model"),
    "heads": ("llama", {"num_key_value_heads": 4}, {}, "layer 0: kv_heads 2 in the file, 4 in the model"),
    "class": ("qwen2", {}, {}, "class 'mlx_lm.models.llama.Model', the model's is 'mlx_lm.models.qwen2.Model'"),
    "kinds": ("llama", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, {},
              "layer 1: PackedKVCache in the file, the model makes RotatingKVCache"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_model_or_other_settings(compress: Any, path: Path, name: str) -> None:
    """All differences in one error, found before the arrays are read; the running caches are untouched."""
    base = {"method": "kivi:bits=4", "residual": 8}
    model = build("llama")
    with vq_core.hosts.mlx_lm.compressed(model, **base) as handle:
        caches = handle.make_cache()
        model(prompt(60)[None], cache=caches)
        vq_core.save_cache(path, caches, model=handle)
    kind, changes, options, said = DIFFERENT[name]
    other = compress(build(kind, **changes), **(base | options))
    running = other.make_cache()
    before = [content(c) for c in running]
    with pytest.raises(FormatError, match="the caches do not fit the model") as caught:
        vq_core.load_cache(path, model=other)
    assert said in str(caught.value)
    assert [content(c) for c in running] == before and other._made[0]._alive() is running[0]


def test_all_differences_are_named(compress: Any, path: Path) -> None:
    model = build("llama")
    with vq_core.hosts.mlx_lm.compressed(model, method="kivi:bits=4", residual=8) as handle:
        vq_core.save_cache(path, handle.make_cache(), model=handle)
    other = compress(build("llama", 3), "kivi:bits=2", residual=16, sink_tokens=4)
    with pytest.raises(FormatError) as caught:
        vq_core.load_cache(path, model=other)
    parts = (
        "other weights",
        *(f"layer {i}: {w}" for i in (0, 1) for w in ("keys", "values", "residual", "sink_tokens")),
    )
    assert all(part in str(caught.value) for part in parts)


def test_windows_and_arrays_of_other_sizes(path: Path) -> None:
    model = build("llama_windows")
    vq_core.save_cache(path, make_prompt_cache(model))
    with pytest.raises(FormatError, match="layer 1: max_size is 32, the model's 16; layer 2: max_size is 32"):
        vq_core.load_cache(path, model=build("llama_windows", sliding_window=16))
    caches = make_prompt_cache(model)
    model(prompt(20)[None], cache=caches)
    vq_core.save_cache(path, caches)
    with pytest.raises(FormatError, match="layer 1: kv_heads 2 in the file, 4 in the model"):
        vq_core.load_cache(path, model=build("llama_windows", num_key_value_heads=4))
    model = build("jamba")
    vq_core.save_cache(path, [native.ArraysCache(3), native.KVCache()])
    with pytest.raises(FormatError, match="layer 0: 3 arrays in the file, the model has 2"):
        vq_core.load_cache(path, model=model)


def test_caches_that_mlx_lm_s_options_make(path: Path) -> None:
    """``max_kv_size`` and ``kv_bits`` put other classes where a model makes plain caches."""
    model = build("qwen3")
    for caches in (make_prompt_cache(model, 16), [c.to_quantized(32, 4) for c in make_prompt_cache(model)]):
        model(prompt(20)[None], cache=caches)
        vq_core.save_cache(path, caches, model=model)
        again = vq_core.load_cache(path, model=model)
        assert [content(c) for c in again] == [content(c) for c in caches]


def test_caches_are_not_saved_with_a_model_that_is_not_theirs(path: Path) -> None:
    with pytest.raises(SettingsError, match="do not fit the model: 2 layers in the file, the model has 4"):
        vq_core.save_cache(path, make_prompt_cache(build("llama")), model=build("llama_windows"))
    for wrong in ("llama", 5, [1]):
        with pytest.raises(SettingsError, match="model must be a model"):
            vq_core.save_cache(path, [native.KVCache()], model=wrong)
    assert not path.exists()


def test_a_file_without_a_fingerprint_is_judged_by_shapes(path: Path) -> None:
    vq_core.save_cache(path, make_prompt_cache(build("llama")))
    assert len(vq_core.load_cache(path, model=build("llama", 9))) == 2


# ---- methods


def test_a_missing_plugin(path: Path) -> None:
    """The error has the method, the distribution with its version and the pip line."""
    for tokens in (0, 90):
        with registered(CENTRED) as record:
            cache = PackedKVCache(method="centred", residual=8)
            vq_core.save_cache(path, [filled(cache, tokens) if tokens else cache])
            state, version = cache.state, record.version
        wanted = f"by method 'centred' of in-test {version}, which is not installed: pip install 'in-test=={version}'"
        with pytest.raises(SettingsError, match=re.escape(wanted)):
            vq_core.load_cache(path)
        with pytest.raises(SettingsError, match=re.escape(wanted)):
            PackedKVCache.from_state(state)


def test_another_version_of_a_method(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(kivi(), 90)
    vq_core.save_cache(path, [cache, kivi()])
    version = importlib.metadata.version("vq-kivi")
    import attrs

    records = [attrs.evolve(r, version="9.9") for r in registry.list_methods()]
    monkeypatch.setattr(registry, "_records", records)
    wanted = f"keys were packed by method 'kivi' of vq-kivi {version}; installed is vq-kivi 9.9: pip install 'vq-kivi=="
    with pytest.raises(FormatError, match=wanted):
        vq_core.load_cache(path)
    with pytest.raises(FormatError, match=wanted):
        PackedKVCache.from_state(cache.state)


def test_another_layout_of_a_method(path: Path) -> None:
    """A method whose author changed what it stores and not its version."""
    from vq_core.api import Field, Layout, hookimpl

    with registered(CENTRED):
        vq_core.save_cache(path, [filled(PackedKVCache(method="centred", residual=8), 90)])
    plugin = {n: getattr(CENTRED, n) for n in dir(CENTRED) if n.startswith("vq_")}

    @hookimpl
    def vq_layout(ctx: Any) -> Layout:
        codes, step = Field("codes", "int8", (64, ctx.head_dim), codes=True), Field("step", "float32", (64, 1))
        return Layout(32, (codes, step, Field("mean", "float32", (1, ctx.head_dim), axis=None)), page=64)

    from types import SimpleNamespace

    from vq_core.testing import registering

    other = SimpleNamespace(**(plugin | {"vq_layout": vq_layout}))
    registering._versions[id(other)] = (other, registering._versions[id(CENTRED)][1])
    with (
        registered(other),
        pytest.raises(
            FormatError, match=r"another layout .*: page 128, now 64; codes.shape \[128, 32\], now \[64, 32\]"
        ),
    ):
        vq_core.plugins.binding._bound.clear()
        vq_core.load_cache(path)
    vq_core.plugins.binding._bound.clear()


# ---- files


def test_files_that_are_none(path: Path, tmp_path: Path) -> None:
    native.save_prompt_cache(str(path.with_suffix(".safetensors")), [filled(native.KVCache())], {"model": "m"})
    weights = tmp_path / "weights.safetensors"
    mx.save_safetensors(str(weights), {"x": mx.zeros(3)}, {"format": "mlx"})
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    other = tmp_path / "other"
    tensors.write(other, tensors.Format("vq-cache", 2), {}, {})
    for name, said in (
        (path.with_suffix(".safetensors"), "mlx-lm's own format: read it with mlx_lm.models.cache.load_prompt_cache"),
        (weights, "no file of the format vq-cache"), (empty, "has 0 bytes"), (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a pipe"), (tmp_path / "none", "No such file"),
        (other, "version '2'; this vq-core reads version 1"),
    ):  # fmt: skip
        for load in (vq_core.load_cache, vq_core.read_metadata):
            with pytest.raises(FormatError, match=said):
                load(name)


def test_places_that_cannot_be_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vq_core.save_cache(path, [filled(native.KVCache())])
    before = path.read_bytes()
    for name in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(SettingsError, match="cannot write"):
            vq_core.save_cache(name, [native.KVCache()])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingsError, match="No space left on device"):
        vq_core.save_cache(path, [native.KVCache()])
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


# ---- versions of mlx-lm


def test_saved_under_another_protocol(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 24: both versions are named."""
    installed = importlib.metadata.version("mlx-lm")
    monkeypatch.setattr(saved, "check_version", lambda: "0.31.3")
    vq_core.save_cache(path, [native.KVCache()])
    monkeypatch.undo()
    with pytest.raises(FormatError, match=rf"saved with mlx-lm 0\.31\.3, whose .* installed {installed}"):
        vq_core.load_cache(path)


def test_an_mlx_lm_of_the_other_protocol(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version("mlx-lm")
    state = filled(kivi(), 90).state
    for meta in ("", (), ["0"]):
        with pytest.raises(HostError, match=rf"meta_state.*protocol of 0\.32.*mlx-lm {installed} is installed"):
            PackedKVCache.from_state(state, meta)
    from vq_core.hosts.loading import Stored

    assert Stored.from_state(state).offset == 90
    with pytest.raises(HostError, match="meta_state"):
        Stored.from_state(state, "")
    monkeypatch.setattr(versions.metadata, "version", lambda name: "0.33.1")
    for use in (
        lambda: Stored.from_state(state), lambda: vq_core.load_cache(path), lambda: vq_core.save_cache(path, [kivi()])
    ):  # fmt: skip
        with pytest.raises(HostError, match=r"mlx-lm 0\.33\.1 is installed"):
            use()
