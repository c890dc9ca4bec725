"""Layers that keep several caches in mlx-lm's CacheList: what is packed in them, and what the list still can do."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as host
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import vq_core
from vq_core import PackedKVCache
from vq_core.errors import CacheStateError, SettingsError
from vq_core.evaluate.divergence import divergence

from .architectures import CHUNK, PREFILL, TOKENS, apart, expected, follow, inner, told
from .configurations import PLACES
from .models import build, prompt

LISTS = sorted(name for name, places in PLACES.items() if "+" in places)
TRIMMABLE = ("deepseek_v32", "longcat_flash", "minimax_m3_vl")

pytestmark = pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")


@pytest.fixture(scope="module", params=LISTS)
def named(request: Any) -> tuple[str, Any]:
    return request.param, build(request.param)


def ids(n: int, seed: int = 1) -> mx.array:
    return prompt(n, seed)[None]


def packed(caches: list[Any]) -> list[PackedKVCache]:
    return [c for c in inner(caches) if isinstance(c, PackedKVCache)]


def test_five_models_have_them() -> None:
    assert LISTS == ["baichuan_m1", "deepseek_v32", "falcon_h1", "longcat_flash", "minimax_m3_vl"]


def test_a_list_stays_a_list(named: Any, compress: Any) -> None:
    name, model = named
    native = make_prompt_cache(model)
    compress(model, residual=8)
    ours = make_prompt_cache(model)
    assert [type(c) for c in ours] == [CacheList] * len(native)
    for place, status, _ in expected(name):
        layer, child = map(int, place.split("."))
        was, now = native[layer][child], ours[layer][child]
        assert type(now) is (type(was) if status == "native" else PackedKVCache)


def test_a_copy_goes_its_own_way(named: Any, compress: Any) -> None:
    _, model = named
    compress(model, residual=8)
    caches = make_prompt_cache(model)
    model(ids(50), cache=caches)
    twin = copy.deepcopy(caches)
    model(ids(9, seed=3), cache=twin)
    assert {c.offset for c in packed(caches)} == {50} and {c.offset for c in packed(twin)} == {59}
    again = copy.deepcopy(caches)
    a, b = (model(ids(9, seed=3), cache=c) for c in (caches, again))
    assert mx.array_equal(a, b)


def test_saved_and_loaded(named: Any, compress: Any, tmp_path: Path) -> None:
    _, model = named
    handle = compress(model, "kivi:bits=4", residual=8, sink_tokens=4)
    caches = make_prompt_cache(model)
    mx.eval(model(ids(90), cache=caches), [c.state for c in caches])
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, caches)
    loaded = load_prompt_cache(path)
    assert [type(c) for c in inner(loaded)] == [type(c) for c in inner(caches)]
    rebuilt = [CacheList.from_state(c.state) for c in copy.deepcopy(caches)]
    assert [r.packed for r in handle.report(loaded).packed_layers] == [
        r.packed for r in handle.report(caches).packed_layers
    ]
    for seed in range(4):
        want, *others = (model(ids(1, seed), cache=c) for c in (caches, loaded, rebuilt))
        assert all(mx.array_equal(want, other) for other in others)


def test_trimmed(named: Any, compress: Any) -> None:
    name, model = named
    compress(model, residual=8)
    caches = make_prompt_cache(model)
    model(ids(50), cache=caches)
    assert can_trim_prompt_cache(caches) == (name in TRIMMABLE)
    if name not in TRIMMABLE:
        assert trim_prompt_cache(caches, 20) == 0 and {c.offset for c in packed(caches)} == {50}
        return
    plain = CacheList(*(KVCache() for _ in range(2)))
    assert caches[0].size() == 50 and not caches[0].empty() and plain.empty()
    assert trim_prompt_cache(caches, 20) == 20
    assert {c.offset for c in inner(caches)} == {30}
    straight = make_prompt_cache(model)
    model(ids(50)[:, :30], cache=straight)
    a, b = (model(ids(9, seed=3), cache=c) for c in (caches, straight))
    assert apart(a, b) < 1e-4


def test_the_report_outlives_the_caches(named: Any, compress: Any) -> None:
    _, model = named
    handle = compress(model, "kivi:bits=4", residual=8)
    caches = make_prompt_cache(model)
    follow(model, caches)
    report = handle.report(caches)
    assert report.native_bytes >= 0 and report.bytes.held and handle.report() == report
    del caches
    gc.collect()
    assert handle.report() == report
    assert [e["child"] for e in report.as_dict()["layers"]] == [e.child for e in report.layers]


def test_caches_of_another_structure_are_refused(compress: Any) -> None:
    handle = compress(build("longcat_flash"), residual=8)
    for wrong in (KVCache(), CacheList(KVCache())):
        with pytest.raises(
            SettingsError, match=r"layer 1: the model makes a CacheList with at least . caches here, not"
        ):
            handle.report([handle.make_cache()[0], wrong])


def test_the_printed_table_names_each_cache(compress: Any) -> None:
    from rich.console import Console

    from vq_core.cli.printing import _layers

    model = build("falcon_h1")
    handle = compress(model, "kivi:bits=4", residual=8)
    follow(model, caches := make_prompt_cache(model))
    console = Console(width=200, file=io.StringIO())
    console.print(_layers(handle.report(caches)))
    rows = [
        line.split()[:2] for line in console.file.getvalue().splitlines() if " native " in line or " packed " in line
    ]
    assert rows[1:] == [["0.0", "native"], ["0.1", "packed"], ["1.0", "native"], ["1.1", "packed"]]


def test_divergence_counts_caches_in_lists(compress: Any) -> None:
    model = build("falcon_h1")
    handle = compress(model, "kivi:bits=8", residual=0)
    found = divergence(model, prompt(120).tolist(), handle.plain_cache(), handle.make_cache(), prefill=64)
    assert 0.3 < found.packed_share < 1 and 0 < found.kl < 1e-2


# ---- layers=


def test_a_layers_entry_is_for_all_its_caches(compress: Any) -> None:
    model = build("longcat_flash")
    handle = compress(model, residual=8, layers={-1: "kivi:bits=8", 0: None})
    follow(model, caches := make_prompt_cache(model))
    report = handle.report(caches)
    assert [(e.place, e.status) for e in report.layers] == [
        ("0.0", "native"), ("0.1", "native"), ("1.0", "dense"), ("1.1", "dense"),
    ]  # fmt: skip
    assert [e.reason for e in report.layers[:2]] == ["skipped by layers="] * 2
    assert all(r.keys.startswith("kivi:bits=8") and r.layer == 1 for r in report.packed_layers)


def test_a_skipped_layers_index_keeps_its_own_reason(compress: Any) -> None:
    model = build("falcon_h1")
    report = compress(model, residual=8, layers={0: None}).report()
    assert [e.reason for e in report.layers[:2]] == [expected("falcon_h1")[0][2], "skipped by layers="]


def test_a_layer_without_a_cache_to_pack_cannot_be_asked_for() -> None:
    model = build("baichuan_m1")
    said = r"layer 1 cannot be packed \(ArraysCache: recurrent.*; RotatingKVCache: .*leave 1 out"
    with pytest.raises(SettingsError, match=said):
        vq_core.compress(model, method="identity", layers={1: "kivi:bits=8"}, windows="native")
    assert "make_cache" not in model.__dict__


def test_what_a_trial_shows_counts_as_well() -> None:
    """The two children are plain KVCaches, and only the model's use of them tells that none holds keys and values."""
    model = Index(lambda cache, x: cache.update_and_fetch(x, mx.zeros((*x.shape[:3], 0))))
    with pytest.raises(SettingsError, match=r"layer 0 cannot be packed \(KVCache: its values have no width.*leave -1"):
        vq_core.compress(model, method="identity", layers={-1: "kivi:bits=8"})
    assert "make_cache" not in model.__dict__


# ---- what holds keys and values


class Index:
    """One layer: attention is not called on what the first cache holds, and the second is never used."""

    layers = (None,)

    def __init__(self, use: Any):
        self.use = use

    def make_cache(self) -> list[Any]:
        return [CacheList(KVCache(), KVCache())]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (1, 2, tokens.shape[1], 8))
        keys, _ = self.use(cache[0][0], x)
        return keys.sum(axis=(1, 2))


@pytest.mark.parametrize("dense", ["auto", "lazy"])
def test_one_array_for_both_that_no_attention_reads(compress: Any, dense: str) -> None:
    handle = compress(Index(lambda cache, x: cache.update_and_fetch(x, x)), residual=0, dense=dense)
    assert [(e.status, e.reason) for e in handle.report().layers] == [
        ("native", "KVCache: one array stored as keys and as values, and no attention reads it"),
        ("native", "the model never updates this layer's cache"),
    ]
    assert [type(c) for c in handle.make_cache()[0].caches] == [KVCache, KVCache]


def test_one_array_for_both_that_attention_reads(compress: Any) -> None:
    def use(cache: Any, x: mx.array) -> Any:
        keys, values = cache.update_and_fetch(x, x)
        return mx.fast.scaled_dot_product_attention(x, keys, values, scale=1.0), None

    handle = compress(Index(use), residual=0)
    assert [e.status for e in handle.report().layers] == ["packed", "native"]


def test_a_model_that_cannot_be_tried_out_keeps_its_lists(compress: Any) -> None:
    def use(cache: Any, x: mx.array) -> Any:
        if not x.any().item():
            raise RuntimeError("no token but padding")
        return cache.update_and_fetch(x, x)

    report = compress(Index(use), residual=0).report()
    assert [e.status for e in report.layers] == ["native"] * 2
    assert all("is not known (RuntimeError: no token but padding)" in e.reason for e in report.layers)
    assert any("no layer is packed" in note for note in report.notes)


# ---- the handle that models give dependencies to


@pytest.mark.parametrize("residual", [0, 8])
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl"])
def test_an_index_is_evaluated_with_its_layer(name: str, residual: int, compress: Any, tmp_path: Path) -> None:
    """While the context is short nothing reads the index, and its graph would grow with every token."""
    changes = {"index_topk": 999} if name == "deepseek_v32" else {"index_topk_blocks": 99}
    model = build(name, **changes)
    compress(model, residual=residual)
    caches = make_prompt_cache(model)
    mx.eval(model(ids(20), cache=caches), [c.state for c in caches])
    sizes = []
    for step in range(12):
        mx.eval(model(ids(1, seed=step), cache=caches))
        mx.export_to_dot(str(tmp_path / "graph.dot"), caches[1][1].keys)
        sizes.append((tmp_path / "graph.dot").read_text().count("->"))
    assert max(sizes[2:]) <= sizes[2]


def test_a_dependency_is_part_of_the_state() -> None:
    for residual, tokens in ((8, 40), (0, 40), (8, 4)):
        cache = PackedKVCache(method="identity", residual=residual)
        assert cache.keys is None
        x = mx.random.normal((1, 2, tokens, 32))
        cache.update_and_fetch(x, x)
        mx.eval(cache.state)
        pending = mx.arange(5) + 1
        cache.keys = mx.depends(cache.keys, pending)
        assert _pending(pending)
        mx.eval(cache.state)
        assert not _pending(pending)
        keys, values = cache.decode()
        assert mx.array_equal(keys, x) and mx.array_equal(values, x)


def _pending(x: mx.array) -> bool:
    from io import StringIO

    graph = StringIO()
    mx.export_to_dot(graph, x)
    return "->" in graph.getvalue()


@pytest.mark.parametrize("given", [None, 3, mx.zeros((1, 2, 40, 32)), mx.zeros((1,))], ids=("None", "3", "keys", "one"))
def test_keys_cannot_be_set(given: Any) -> None:
    cache = PackedKVCache(method="identity", residual=8)
    with pytest.raises(CacheStateError, match=r"only what mx\.depends made of its own keys"):
        cache.keys = mx.zeros((0,))
    x = mx.random.normal((1, 2, 40, 32))
    cache.update_and_fetch(x, x)
    with pytest.raises(CacheStateError, match=r"only what mx\.depends made of its own keys.*update_and_fetch adds"):
        cache.keys = given
    assert mx.array_equal(cache.decode()[0], x)


def test_lists_are_registered_by_name() -> None:
    assert host.PackedKVCache is PackedKVCache


def test_counts_are_those_of_the_run(named: Any, compress: Any) -> None:
    name, model = named
    handle = compress(model, residual=8)
    follow(model, caches := make_prompt_cache(model))
    report = handle.report(caches)
    assert told(report) == expected(name)
    assert {r.tokens for r in report.packed_layers} == {TOKENS} and TOKENS > PREFILL + CHUNK
