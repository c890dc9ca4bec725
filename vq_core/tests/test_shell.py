"""PackedKVCache: mlx-lm's protocol, bad input, state, copies, report."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from vq_core import PackedKVCache
from vq_core.errors import CacheStateError, FormatError, SettingsError, UnsupportedShapeError, VQError

Make = Callable[..., PackedKVCache]


def equal(a: PackedKVCache, b: PackedKVCache) -> bool:
    return all(mx.array_equal(x, y).item() for x, y in zip(a.decode(), b.decode(), strict=True))


# ---- the protocol


def test_a_fresh_cache_answers_everything(echo: Make) -> None:
    """Case 8: what a host reads before the first token, and after each chunk of a prompt."""
    cache = echo()
    assert (cache.nbytes, cache.size(), cache.offset, cache.empty(), cache.is_trimmable()) == (0, 0, 0, True, True)
    assert cache.trim(3) == 0
    assert cache.report().tokens == 0
    assert PackedKVCache.from_state(cache.state).empty()
    assert copy.deepcopy(cache).offset == 0
    x = mx.zeros((1, 2, 1025, 4))
    for begin in range(0, 1025, 512):
        chunk = x[:, :, begin : begin + 512]
        cache.update_and_fetch(chunk, chunk)
        mx.eval([leaf for _, leaf in tree_flatten(cache.state) if isinstance(leaf, mx.array)])
    assert (cache.size(), cache.empty()) == (1025, False)


def test_no_attribute_called_bits(echo: Make, normal: Any) -> None:
    """Case 22: mlx-lm takes a cache that has one for its own quantized cache."""
    cache = echo()
    cache.update_and_fetch(normal(1, 2, 40, 4), normal(1, 2, 40, 4))
    assert not hasattr(cache, "bits") and not hasattr(cache, "to_quantized")
    assert bool(cache), "mlx-lm tests a cache's truth before it asks for a mask"


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (6, 4), (1, 3)])
def test_key_and_value_sizes_differ(echo: Make, normal: Any, key_dim: int, value_dim: int) -> None:
    """Case 4."""
    cache = echo()
    k, v = normal(1, 2, 40, key_dim), normal(1, 2, 40, value_dim)
    cache.update_and_fetch(k, v)
    again = PackedKVCache.from_state(cache.state)
    for held in (cache, again):
        assert all(mx.array_equal(a, b) for a, b in zip(held.decode(), (k, v), strict=True))
    side = {n: sum(a.nbytes for a in s.arrays()) for n, s in cache._history.stores.items()}  # type: ignore[union-attr]
    window = cache._history.window.arrays()  # type: ignore[union-attr]
    assert cache.nbytes == sum(side.values()) + sum(a.nbytes for a in window)
    assert cache.attend(normal(1, 4, 1, key_dim), scale=1.0).shape == (1, 4, 1, value_dim)


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16, mx.float32))
def test_the_dtype_never_changes(echo: Make, normal: Any, dtype: mx.Dtype) -> None:
    """Case 10."""
    cache = echo()
    for n in (32, *[1] * 40, -5, 1):
        if n < 0:
            cache.trim(-n)
            continue
        x = normal(1, 2, n, 4, dtype=dtype)
        assert all(a.dtype == dtype for a in cache.update_and_fetch(x, x))
        assert all(a.dtype == dtype for a in cache.decode())
        for query_dtype in (mx.float16, mx.bfloat16, mx.float32):
            assert cache.attend(normal(1, 4, 1, 4, dtype=query_dtype), scale=0.5).dtype == query_dtype


def test_masks_are_those_of_mlx_lm(echo: Make) -> None:
    from mlx_lm.models.cache import KVCache

    ours, theirs = echo(), KVCache()
    x = mx.zeros((1, 1, 5, 4))
    for _ in range(3):
        for n, array, window in ((1, False, None), (4, False, None), (4, True, None), (4, False, 3), (1, False, 3)):
            got, want = (c.make_mask(n, return_array=array, window_size=window) for c in (ours, theirs))
            assert type(got) is type(want)
            assert mx.array_equal(got, want) if isinstance(got, mx.array) else got == want
        ours.update_and_fetch(x, x)
        theirs.update_and_fetch(x, x)


def test_what_is_handed_out_or_in_may_be_changed(echo: Make, normal: Any, snapshot: Any) -> None:
    cache = echo()
    x, y = normal(1, 2, 40, 4), normal(1, 2, 40, 4)
    fetched = cache.update_and_fetch(x, y)
    before = snapshot(cache)
    for array in (x, y, *fetched, *cache.keys_and_values(), *cache.decode()):
        array[...] = 0
        array += 1
    assert snapshot(cache) == before


# ---- copies and state


def test_a_deep_copy_shares_until_it_grows(echo: Make, normal: Any, snapshot: Any) -> None:
    cache = echo()
    cache.update_and_fetch(normal(1, 2, 60, 4), normal(1, 2, 60, 4))
    mx.eval([a for a in cache.state if isinstance(a, mx.array)])
    other = copy.deepcopy(cache)
    assert [id(a) for a in other._history.arrays()] == [id(a) for a in cache._history.arrays()]  # type: ignore[union-attr]
    before = snapshot(cache)
    other.update_and_fetch(normal(1, 2, 70, 4), normal(1, 2, 70, 4))
    other.trim(100)
    assert snapshot(cache) == before
    assert (cache.offset, other.offset) == (60, 30)
    assert other.report().updates == 1


@pytest.mark.parametrize("tokens", (5, 284))
@pytest.mark.parametrize("sinks", (0, 2))
def test_state_makes_the_same_cache(echo: Make, normal: Any, snapshot: Any, tokens: int, sinks: int) -> None:
    """Case 25, in this process: offset, length and numbers after a reload."""
    cache = echo(sink_tokens=sinks)
    cache.update_and_fetch(normal(1, 2, tokens, 4), normal(1, 2, tokens, 4))
    cache.trim(3)
    again = PackedKVCache.from_state(list(cache.state))
    assert snapshot(again) == snapshot(cache)
    assert (again.offset, again.nbytes) == (cache.offset, cache.nbytes)
    x = normal(1, 2, 1, 4)
    keys, _ = again.update_and_fetch(x, x)
    cache.update_and_fetch(x, x)
    assert again.offset == keys.shape[2] == tokens - 2
    assert equal(again, cache)
    assert again.report().tokens == cache.report().tokens


def test_state_goes_through_mlx_lm_s_file_format(echo: Make, normal: Any, snapshot: Any, tmp_path: Any) -> None:
    """Case 23, the part that is the shell's: leaves that mlx-lm's own save can hold, lists back as lists."""
    from mlx.utils import tree_unflatten

    cache = echo()
    cache.update_and_fetch(normal(2, 2, 50, 4), normal(2, 2, 50, 4))
    leaves = tree_flatten([c.state for c in (cache, echo())])
    arrays = {k: v for k, v in leaves if isinstance(v, mx.array)}
    assert all(isinstance(v, mx.array | str) for _, v in leaves)
    mx.save_safetensors(str(tmp_path / "c.safetensors"), arrays, {k: v for k, v in leaves if isinstance(v, str)})
    back, text = mx.load(str(tmp_path / "c.safetensors"), return_metadata=True)
    first, second = tree_unflatten(list(back.items()) + list(text.items()))
    assert snapshot(PackedKVCache.from_state(first)) == snapshot(cache)
    assert PackedKVCache.from_state(second).empty()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: [],
        lambda s: 5,
        lambda s: s[1:],
        lambda s: ["no json", *s[1:]],
        lambda s: ["{}", *s[1:]],
        lambda s: [s[0].replace('"vq": 2', '"vq": 99'), *s[1:]],
        lambda s: [s[0].replace("float32", "float31"), *s[1:]],
        lambda s: s[:-1],
        lambda s: [*s, s[-1]],
        lambda s: [s[0].replace("keys.x", "keys.z"), *s[1:]],
        lambda s: [s[0], s[1][:, :, :-5], *s[2:]],
        lambda s: [s[0], s[1].astype(mx.float16), *s[2:]],
        lambda s: [s[0], s[1][:, :, :, :-1], *s[2:]],
        lambda s: [s[0], *s[1:3], s[3][:-1], *s[4:]],
        lambda s: [s[0], *s[1:3], s[3].astype(mx.float16), *s[4:]],
        lambda s: [s[0].replace('"tokens": [32]', '"tokens": [64]'), *s[1:]],
        lambda s: [s[0].replace('"tokens": [32]', '"tokens": [24]', 1), *s[1:]],
        lambda s: [s[0].replace('"owned": [[0]]', '"owned": [[9]]'), *s[1:]],
        lambda s: [s[0].replace('"counts": [18]', '"counts": [18, 18]'), *s[1:]],
        lambda s: [s[0].replace('"sinks": [0]', '"sinks": [4]'), *s[1:]],
        lambda s: [s[0].replace('"version": "0"', '"version": "7"'), *s[1:]],
    ],
)
def test_a_state_that_is_not_ours(echo: Make, normal: Any, snapshot: Any, spoil: Callable[[Any], Any]) -> None:
    cache = echo()
    cache.update_and_fetch(normal(1, 2, 50, 4), normal(1, 2, 50, 4))
    before = snapshot(cache)
    spoilt = spoil(list(cache.state))
    with pytest.raises(FormatError):
        cache.state = spoilt
    assert snapshot(cache) == before


def test_state_keeps_what_the_host_knew_of_the_layer(echo: Make, normal: Any) -> None:
    """A method's constants may come from the rotary embedding: decoding after a reload needs the same."""
    from vq_core.api import Rope

    cache = PackedKVCache.from_policy(echo().policy, layer=3, rope=Rope("half", 1e4, 64), model="tiny")
    cache.update_and_fetch(normal(1, 2, 50, 4), normal(1, 2, 50, 4))
    again = PackedKVCache.from_state(cache.state)
    assert again.layer == 3
    assert again._history.bound["keys"].ctx == cache._history.bound["keys"].ctx  # type: ignore[union-attr]
    assert PackedKVCache.join([cache, again]).report().tokens == 100


# ---- rows


def test_rows(echo: Make, normal: Any, snapshot: Any) -> None:
    caches = []
    for n in (5, 60, 33):
        cache = echo()
        cache.update_and_fetch(normal(1, 2, n, 4), normal(1, 2, n, 4))
        caches.append(cache)
    joined = PackedKVCache.join(caches)
    assert (joined.offset, joined.report().tokens) == (60, 98)
    for part, cache in zip(joined.split(), caches, strict=True):
        assert part.offset == cache.offset and equal(part, cache)
    assert equal(joined.select([2]), caches[2])
    with pytest.raises(SettingsError, match="rows 0 to 2"):
        joined.select([3])
    with pytest.raises(SettingsError, match="rows 0 to 2"):
        joined.select([])
    with pytest.raises(SettingsError, match="one policy"):
        PackedKVCache.join([caches[0], echo(residual=17)])
    with pytest.raises(CacheStateError, match="empty"):
        PackedKVCache.join([caches[0], echo()])
    with pytest.raises(SettingsError, match="at least one"):
        PackedKVCache.join([])
    other = echo()
    other.update_and_fetch(normal(1, 2, 5, 6), normal(1, 2, 5, 6))
    with pytest.raises(SettingsError, match="shape"):
        PackedKVCache.join([caches[0], other])


# ---- bad input: one typed error, and nothing has changed


UPDATES = {
    "B": ((2, 2, 3, 4), (1, 2, 3, 4), "same B, H and L"),
    "S": ((1, 2, 3, 4), (1, 2, 4, 4), "same B, H and L"),
    "H": ((1, 1, 3, 4), (1, 2, 3, 4), "same B, H and L"),
    "no tokens": ((1, 2, 0, 4), (1, 2, 0, 4), "at least 1"),
    "no heads": ((1, 0, 3, 4), (1, 0, 3, 4), "at least 1"),
    "three axes": ((2, 3, 4), (2, 3, 4), r"\(B, H, L, D\)"),
}
LATER = {
    "head size": ((1, 2, 3, 5), (1, 2, 3, 5), "D of the keys 4 -> 5"),
    "value size": ((1, 2, 3, 4), (1, 2, 3, 5), "D of the values 4 -> 5"),
    "heads": ((1, 3, 3, 4), (1, 3, 3, 4), "H 2 -> 3"),
    "rows": ((2, 2, 3, 4), (2, 2, 3, 4), "B 1 -> 2"),
}


@pytest.mark.parametrize(("name", "tokens"), [(n, t) for n in (*UPDATES, *LATER) for t in (0, 50) if t or n in UPDATES])
def test_bad_update(echo: Make, normal: Any, snapshot: Any, name: str, tokens: int) -> None:
    keys, values, said = (UPDATES | LATER)[name]
    cache = echo()
    if tokens:
        cache.update_and_fetch(normal(1, 2, tokens, 4), normal(1, 2, tokens, 4))
    before = snapshot(cache)
    with pytest.raises(UnsupportedShapeError, match=said):
        cache.update_and_fetch(mx.zeros(keys), mx.zeros(values))
    assert snapshot(cache) == before and cache.report().updates == bool(tokens)
    cache.update_and_fetch(normal(1, 2, 1, 4), normal(1, 2, 1, 4))


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        ((mx.float16, mx.float16), "dtype float32 -> float16"),
        ((mx.float32, mx.float16), "must agree"),
        ((mx.int32, mx.int32), "dtype float32 -> int32"),
    ],
)
def test_dtype_change_midway(echo: Make, normal: Any, snapshot: Any, dtypes: Any, said: str) -> None:
    cache = echo()
    cache.update_and_fetch(normal(1, 2, 50, 4), normal(1, 2, 50, 4))
    before = snapshot(cache)
    with pytest.raises(UnsupportedShapeError, match=said):
        cache.update_and_fetch(*(mx.zeros((1, 2, 1, 4), d) for d in dtypes))
    assert snapshot(cache) == before


def test_a_dtype_that_no_model_has(echo: Make, snapshot: Any) -> None:
    cache = echo()
    with pytest.raises(UnsupportedShapeError, match="float16, bfloat16, float32"):
        cache.update_and_fetch(mx.zeros((1, 2, 3, 4), mx.int32), mx.zeros((1, 2, 3, 4), mx.int32))
    assert cache.empty()


@pytest.mark.parametrize("tokens", (3, 50))
def test_trim_beyond_the_length_drops_what_there_is(echo: Make, normal: Any, tokens: int) -> None:
    cache = echo()
    x = normal(1, 2, tokens, 4)
    cache.update_and_fetch(x, x)
    assert cache.trim(1000) == tokens
    assert (cache.offset, cache.empty(), cache.report().tokens) == (0, True, 0)
    assert cache.trim(1) == 0
    with pytest.raises(CacheStateError, match="empty"):
        cache.decode()
    cache.update_and_fetch(x, x)
    assert mx.array_equal(cache.decode()[0], x)


def test_negative_trim(echo: Make, normal: Any, snapshot: Any) -> None:
    cache = echo()
    cache.update_and_fetch(normal(1, 2, 50, 4), normal(1, 2, 50, 4))
    before = snapshot(cache)
    with pytest.raises(SettingsError, match="0 or more"):
        cache.trim(-1)
    assert snapshot(cache) == before


def test_a_method_that_cannot_be_trimmed_says_so(echo: Make, normal: Any, snapshot: Any) -> None:
    """Case 27, second half."""
    cache = echo(name="fixed")
    cache.update_and_fetch(normal(1, 2, 20, 4), normal(1, 2, 20, 4))
    assert cache.is_trimmable()
    cache.update_and_fetch(normal(1, 2, 40, 4), normal(1, 2, 40, 4))
    assert not cache.is_trimmable()
    before = snapshot(cache)
    with pytest.raises(CacheStateError, match="only the newest 20"):
        cache.trim(21)
    assert snapshot(cache) == before
    assert cache.trim(20) == 20


def test_attention_on_an_empty_cache(echo: Make, normal: Any) -> None:
    cache = echo()
    for call in (lambda: cache.attend(normal(1, 2, 1, 4), scale=1.0), cache.decode, cache.keys_and_values):
        with pytest.raises(CacheStateError, match="update_and_fetch first"):
            call()


@pytest.mark.parametrize("tokens", (10, 100))
@pytest.mark.parametrize("length", (1, 20))
@pytest.mark.parametrize(
    "change",
    [
        lambda L, T: {"mask": mx.zeros((1, 1, L, T - 1))},
        lambda L, T: {"mask": mx.zeros((L, T + 1), mx.bool_)},
        lambda L, T: {"mask": mx.zeros((1, 3, L, T))},
        lambda L, T: {"mask": mx.zeros((L, 1))},
        lambda L, T: {"mask": mx.zeros((T,))},
        lambda L, T: {"mask": mx.zeros((1, 1, 1, L, T))},
        lambda L, T: {"mask": "diagonal"},
        lambda L, T: {"sinks": mx.zeros((3,))},
        lambda L, T: {"queries": mx.zeros((1, 3, L, 4))},
        lambda L, T: {"queries": mx.zeros((2, 4, L, 4))},
        lambda L, T: {"queries": mx.zeros((1, 4, L, 5))},
        lambda L, T: {"queries": mx.zeros((1, 4, 0, 4))},
        lambda L, T: {"queries": mx.zeros((1, 0, L, 4))},
        lambda L, T: {"queries": mx.zeros((1, 4, L, 4), mx.int32)},
        lambda L, T: {"queries": mx.zeros((1, 4, T + 1, 4)), "mask": "causal"},
    ],
)
def test_bad_attention(echo: Make, normal: Any, snapshot: Any, change: Any, length: int, tokens: int) -> None:
    cache = echo()
    cache.update_and_fetch(normal(1, 2, tokens, 4), normal(1, 2, tokens, 4))
    before, arguments = snapshot(cache), {"queries": normal(1, 4, length, 4)} | change(length, tokens)
    with pytest.raises(UnsupportedShapeError) as error:
        cache.attend(arguments.pop("queries"), scale=1.0, **arguments)
    assert len(str(error.value)) > 30
    assert snapshot(cache) == before


# ---- report


def test_report_adds_up(echo: Make, normal: Any) -> None:
    """Case 34: per layer the method, tokens packed and exact, bytes; zero packed tokens are said."""
    cache = echo(sink_tokens=4)
    cache.update_and_fetch(normal(1, 2, 10, 4), normal(1, 2, 10, 4))
    assert cache.report().packed == 0 and "no token is packed" in cache.report().notes[0]
    for n in (90, 1, 30):
        cache.update_and_fetch(normal(1, 2, n, 4), normal(1, 2, n, 4))
        cache.attend(normal(1, 4, 1, 4), scale=1.0)
        report = cache.report()
        assert report.tokens == cache.offset == report.packed + report.exact + report.approximate
        assert report.bytes.held == cache.nbytes == sum(a.nbytes for a in cache._history.arrays())  # type: ignore[union-attr]
        assert report.bytes.window == report.exact * 2 * 2 * 4 * 4
        assert report.bytes.codes == report.packed * 2 * 2 * 4 * 4
        assert report.bytes.fp16 == report.tokens * 2 * 2 * 4 * 2
    assert report.keys == "echo:block=8,page=32"
    assert any(line.startswith("values.encode: ") for line in report.operations)
    pickle.dumps(report.as_dict())


def test_constants_are_reported_apart(install: Any, hooks: Any, normal: Any) -> None:
    from types import SimpleNamespace

    def prepare(ctx: Any, settings: Any) -> Any:
        return SimpleNamespace(dim=ctx.head_dim, settings=settings, table=mx.zeros((256,)))

    install("heavy", hooks() | {"vq_prepare": prepare})
    cache = PackedKVCache(method="heavy", residual=0)
    cache.update_and_fetch(normal(1, 2, 40, 4), normal(1, 2, 40, 4))
    assert cache.report().bytes.constants == 2 * 1024
    assert cache.report().bytes.held == cache.nbytes


def test_every_error_is_a_vq_error() -> None:
    for cls in (CacheStateError, FormatError, SettingsError, UnsupportedShapeError):
        assert issubclass(cls, VQError)


def test_random_state_of_the_user_is_left_alone(echo: Make, normal: Any) -> None:
    """Case 42."""
    mx.random.seed(3)
    want = mx.random.normal((4,)).tolist()
    mx.random.seed(3)
    cache = echo()
    cache.update_and_fetch(normal(1, 2, 50, 4), normal(1, 2, 50, 4))
    cache.attend(normal(1, 2, 1, 4), scale=1.0)
    assert mx.random.normal((4,)).tolist() == want
    assert np.isfinite(want).all()
