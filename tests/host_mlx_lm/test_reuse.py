"""Rewinds of any length, and prompts that are continued: mlx-lm's LRUPromptCache over packed caches."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    LRUPromptCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from vq_core import PackedKVCache
from vq_core.testing import load_plugin, registered
from vq_core.testing.observe import gaussian

from .models import build, prompt
from .recording import Recorder, assert_as_given

PICKY = load_plugin(Path(__file__).parent.parent / "methods" / "picky.py")
T = 300


@pytest.mark.parametrize("residual", [0, 8, 128])
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("identity", "identity"),
        ("kivi:bits=4", "kivi:bits=4"),
        ("kivi:bits=2", "identity"),
        ("identity", "kivi:bits=2"),
    ],
)
def test_trim_at_every_length(keys: str, values: str, residual: int, monkeypatch: Any) -> None:
    """300 tokens cut to each of 0 to 300, then grown by 40: counts, codes and values as they have to be."""
    whole = PackedKVCache(keys=keys, values=values, residual=residual, sink_tokens=4 if residual == 8 else 0)
    recorder = Recorder(monkeypatch)
    x = tuple(gaussian((1, 1, T + 40, 32), "float32", seed) for seed in (1, 2))
    whole.update_and_fetch(*(a[:, :, :T] for a in x))
    for n in range(T + 1):
        cache = copy.deepcopy(whole)
        assert cache.trim(n) == n and cache.offset == T - n
        if n < T:
            assert_as_given(cache, recorder.row(cache))
        cache.update_and_fetch(*(a[:, :, T - n : T - n + 40] for a in x))
        if n % 7 == 0:
            assert_as_given(cache, recorder.row(cache))
    assert whole.offset == T
    assert_as_given(whole, recorder.row(whole))


def rest(model: Any, caches: Any, ids: list[int], steps: int = 20) -> list[int]:
    """Greedy tokens after ``ids`` on caches that hold what comes before."""
    return [t for t, _ in generate_step(mx.array(ids), model, max_tokens=steps, prompt_cache=caches)]


def test_trim_over_mixed_layers(compress: Any) -> None:
    """A plain layer, exact ones and one that keeps more exact: all are cut alike, and the text goes on as it was."""
    model = build("llama", num_hidden_layers=4)
    ids = prompt(150).tolist()
    want = rest(model, make_prompt_cache(model), ids)
    handle = compress(model, residual=8, layers={0: None, 2: {"residual": 100, "sink_tokens": 4}, -1: {"residual": 0}})
    caches = handle.make_cache()
    assert [type(c) for c in caches] == [KVCache] + [PackedKVCache] * 3
    assert rest(model, caches, ids) == want
    for back in (1, 5, 60, 100):
        here = caches[0].offset
        assert can_trim_prompt_cache(caches) and trim_prompt_cache(caches, here - 150 + back) == here - 150 + back
        assert {c.offset for c in caches} == {150 - back}
        assert rest(model, caches, ids[150 - back :]) == want


def test_trim_beside_a_full_sliding_window(compress: Any) -> None:
    """One layer that cannot be cut is enough for mlx-lm to cut none, and it says so."""
    model = build("llama_windows")
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    ids = prompt(60).tolist()
    rest(model, caches, ids[:20], 4)
    assert can_trim_prompt_cache(caches) and trim_prompt_cache(caches, 4) == 4
    rest(model, caches, ids[20:], 4)
    assert [type(c) for c in caches] == [PackedKVCache, RotatingKVCache, RotatingKVCache, PackedKVCache]
    assert not can_trim_prompt_cache(caches) and trim_prompt_cache(caches, 4) == 0
    assert {c.offset for c in caches} == {20 + 40 + 4}


# ---- mlx-lm's LRUPromptCache


def serve(model: Any, store: LRUPromptCache, ids: list[int], steps: int = 30) -> tuple[list[int], int, Any]:
    """A request as mlx-lm's server handles one: tokens, how many of the prompt came from the store, and the caches."""
    caches, left = store.fetch_nearest_cache("model", list(ids))
    if caches is None:
        caches = make_prompt_cache(model)
    elif not left:  # the whole prompt is there; the last token has to be fed again for its scores
        assert trim_prompt_cache(caches, 1) == 1
        left = ids[-1:]
    found = rest(model, caches, left, steps)
    # generate_step has fed every token it has shown.
    assert {c.offset for c in caches} == {len(ids) + steps}
    store.insert_cache("model", ids + found, caches)
    return found, len(ids) - len(left), caches


@pytest.mark.parametrize(
    ("method", "residual"), [("identity", 0), ("identity", 8), ("kivi:bits=4", 0), ("kivi:bits=2", 128)]
)
def test_five_turns(method: str, residual: int, compress: Any, monkeypatch: Any) -> None:
    """Shorter, longer and exact entries, an edited message, an unrelated prompt; each turn equals a cold run."""
    model = build("llama")
    system, *users = ([int(t) for t in prompt(n, seed)] for n, seed in ((200, 1), (40, 2), (33, 3), (64, 4), (90, 5)))
    handle = compress(model, method, residual=residual)
    recorder = Recorder(monkeypatch)
    store = LRUPromptCache(max_size=10)

    def turn(ids: list[int], reused: int, cut: bool) -> list[int]:
        found, count, caches = serve(model, store, ids)
        assert count == reused
        for cache in caches:
            row = recorder.row(cache)
            assert (row.clean is not None) == cut
            assert_as_given(cache, row)
        if method == "identity":
            assert found == rest(model, handle.make_cache(), ids, 30)
        held = [e.prompt_cache for e in entries(store)]
        assert store.nbytes == sum(c.nbytes for caches in held for c in caches)
        return found

    first = system + users[0]
    answer = turn(first, 0, False)
    second = first + answer + users[1]
    turn(second, len(first + answer), False)  # an entry that is shorter than the prompt
    edited = first + answer[:10] + users[2]
    behind = len(first) + 10 < len(second) + 30 - residual - 32
    after = turn(edited, len(first) + 10, behind)  # one that is longer: cut in the middle of the first answer
    again = edited + after
    turn(again, len(again) - 1, behind or residual == 0)  # exactly this prompt
    turn([int(t) for t in prompt(90, 9)], 0, False)  # nothing in common
    assert len(store) == 3


def entries(store: LRUPromptCache) -> list[Any]:
    return [store._trie.get(*key) for lru in store._lru._lrus.values() for key in lru]


def test_copies_of_the_store_share_their_arrays(compress: Any) -> None:
    """A fetch holds no byte of its own until it grows, and growing or cutting one never shows in another."""
    model = build("llama")
    compress(model, "kivi:bits=4", residual=8)
    store, ids = LRUPromptCache(), prompt(200).tolist()
    key = ids + serve(model, store, ids)[0]
    kept = entries(store)[0].prompt_cache
    state = [[a for a in c.state if isinstance(a, mx.array)] for c in kept]
    before = [[mx.array(a) for a in arrays] for arrays in state]
    mx.eval(before)
    fetched = [store.fetch_nearest_cache("model", [*key, 1, 2, 3])[0] for _ in range(3)]
    for caches in fetched:
        for cache, arrays in zip(caches, state, strict=True):
            assert cache._history is not None
            assert {id(a) for a in cache._history.arrays()} <= {id(a) for a in arrays}
    one, two, three = fetched
    rest(model, one, ids[:50])
    trim_prompt_cache(two, 150)
    rest(model, two, ids[:3])
    want = [rest(model, copy.deepcopy(kept), ids[:9]), rest(model, three, ids[:9])]
    assert want[0] == want[1]
    for arrays, old in zip(state, before, strict=True):
        assert all(mx.array_equal(a, b) for a, b in zip(arrays, old, strict=True))


@pytest.mark.parametrize("limit", ["sequences", "bytes"])
def test_eviction_frees_the_caches(limit: str, compress: Any) -> None:
    """By count and by bytes, as nbytes tells them; what is evicted is gone."""
    model = build("llama")
    compress(model, "kivi:bits=4", residual=8)
    _, _, caches = serve(model, LRUPromptCache(), prompt(200, 99).tolist())
    one = sum(c.nbytes for c in caches)
    store = LRUPromptCache(max_size=3) if limit == "sequences" else LRUPromptCache(max_bytes=3 * one + one // 2)
    made = []
    for seed in range(6):
        _, _, caches = serve(model, store, prompt(200, seed + 20).tolist())
        made.append(weakref.ref(caches[0]))
        del caches
        assert store.nbytes == sum(c.nbytes for e in entries(store) for c in e.prompt_cache) <= 3.5 * one
    gc.collect()
    assert len(store) == 3 and [r() is None for r in made] == [True] * 3 + [False] * 3


def test_the_store_with_a_method_that_cannot_be_trimmed(compress: Any) -> None:
    """Prefixes are kept beside what continues them, a longer entry is never cut, and the text is that of a cold run."""
    with registered(PICKY):
        model = build("llama_wide")
        ids, other = prompt(100).tolist(), prompt(30, 7).tolist()
        handle = compress(model, None, keys="identity", values="picky", residual=0)
        store = LRUPromptCache()

        def cold(tokens: list[int]) -> list[int]:
            return rest(model, handle.make_cache(), tokens, 30)

        def turn(tokens: list[int]) -> int:
            caches, left = store.fetch_nearest_cache("model", tokens)
            caches = make_prompt_cache(model) if caches is None else caches
            found = rest(model, caches, left, 30)
            assert found == cold(tokens)
            store.insert_cache("model", tokens + found, caches)
            return len(tokens) - len(left)

        assert turn(ids) == 0
        first = ids + cold(ids)
        assert turn(first + other) == len(first) and len(store) == 2
        # The longer entry would do if it could be cut; the shorter one is what there is.
        assert turn(first + other[:10] + ids[:20]) == len(first)
        # Nothing shorter: all is computed anew.
        assert turn(ids[:50] + other) == 0
        # A request for exactly what is stored has to feed its last token again, and mlx-lm drops none.
        caches, left = store.fetch_nearest_cache("model", first)
        assert left == [] and trim_prompt_cache(caches, 1) == 0 and caches[0].offset == len(first)
