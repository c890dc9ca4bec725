"""The fused kernels in the simulator against dense attention, over random caches; what they refuse; what they keep."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import CacheStateError, PackedKVCache, SettingsError, UnsupportedShapeError
from vq_core.attention.packed import attend
from vq_core.cache.tagged import reading_of
from vq_core.evaluate.random_attention import run
from vq_core.testing import load_plugin, registered

METHODS = Path(__file__).parent / "methods"
PAIRS = [
    ("kivi:bits=2", "kivi:bits=2"), ("identity", "kivi:bits=4"), ("kivi:bits=3", "centred"),
    ("sign_sketch:sketch=128", "kivi:bits=8"), ("example:bits=3", "example:bits=2"), ("centred", "identity"),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def methods() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("identity", "centred", "sign_sketch", "placed"):
            stack.enter_context(registered(load_plugin(METHODS / f"{name}.py"), name))
        yield


@pytest.mark.parametrize("seed", [11, 12])
def test_random_caches(seed: int) -> None:
    """Shapes, query ratios, masks, dtypes, rows of unequal length, first tokens, sinks, pairs of methods."""
    found = run(seed, 60, 9, "kernel", "simulator", PAIRS, longest=600)
    assert set(found["worst"]) >= {"float16", "bfloat16"}
    assert not found["failed"], f"{len(found['failed'])} of 60, the first: {found['failed'][0]}"


def random(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(mx.float16)


def filled(tokens: int = 300, rows: int = 1, **options: object) -> PackedKVCache:
    options = {"method": "kivi:bits=2", "residual": 16, "attention": "kernel", "kernels": "simulator"} | options
    cache = PackedKVCache(**options)  # type: ignore[arg-type]
    cache.update_and_fetch(random(1, rows, 2, tokens, 64), random(2, rows, 2, tokens, 64))
    return cache


def test_repeated_runs_are_identical_to_the_bit() -> None:
    cache, q = filled(), random(3, 1, 8, 2, 64)
    first = np.array(cache.attend(q, scale=0.125, mask="causal"))
    assert all(np.array_equal(first, np.array(cache.attend(q, scale=0.125, mask="causal"))) for _ in range(3))


@pytest.mark.parametrize("tier", ["kernel", "matrix"])
@pytest.mark.parametrize("options", [{}, {"sliding": 200}, {"sink_tokens": 3}])
def test_a_kept_step_gives_what_a_new_one_gives(
    tier: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over updates with and without a flush, two layers in turn, one query and three: bit for bit."""
    from vq_core.attention import packed, ready

    monkeypatch.setattr(ready, "_kinds", {})
    caches = [filled(150, attention=tier, **options) for _ in range(2)]
    made = []
    monkeypatch.setattr(
        packed, "_by_kernels", lambda *a, made=made, real=packed._by_kernels: made.append(a) or real(*a)
    )
    for step in range(45):
        L = 3 if step % 7 == 6 else 1
        for layer, cache in enumerate(caches):
            cache.update_and_fetch(random(step + layer, 1, 2, L, 64), random(step + layer + 99, 1, 2, L, 64))
            view, q = cache._view(), random(step, 1, 4, L, 64)
            got = np.array(attend(view, q, scale=0.125, mask="causal", tier=tier))
            kept, ready._kinds = ready._kinds, {}
            count = len(made)
            want = np.array(attend(attrs.evolve(view, steady=None), q, scale=0.125, mask="causal", tier=tier))
            ready._kinds = kept
            del made[count:]
            assert np.array_equal(got, want), f"step {step}, layer {layer}"
    assert len(made) <= 45 * 2 / 8, "most steps are grown from an earlier one, or shared by both layers"


def test_a_nan_stays_in_its_row() -> None:
    k, v, q = random(1, 2, 2, 300, 64), random(2, 2, 2, 300, 64), random(3, 2, 4, 1, 64)
    outs = []
    for broken in (False, True):
        cache = PackedKVCache(method="kivi:bits=4", residual=16, attention="kernel", kernels="simulator")
        bad = mx.where((mx.arange(2) == 1)[:, None, None, None] & (mx.arange(300) == 40)[:, None], mx.nan, k)
        cache.update_and_fetch(bad if broken else k, v)
        outs.append(np.array(cache.attend(q, scale=0.125)))
    assert np.array_equal(outs[0][0], outs[1][0]) and np.isfinite(outs[0]).all() and np.isnan(outs[1][1]).any()


def test_what_is_masked_out_has_no_weight() -> None:
    """A mask of the last token alone gives its value; one that hides all of a row gives finite numbers."""
    cache, q = filled(), random(3, 1, 4, 1, 64)
    _, values = cache.decode()
    only = mx.broadcast_to(mx.arange(300) == 299, (1, 1, 1, 300))
    got = np.array(cache.attend(q, scale=0.125, mask=only).astype(mx.float32))
    want = np.repeat(np.array(values[:, :, 299:].astype(mx.float32)), 2, axis=1)
    assert np.abs(got - want).max() < 1e-3
    assert np.isfinite(np.array(cache.attend(q, scale=0.125, mask=mx.zeros((1, 300), mx.bool_)))).all()


def test_windows_of_nothing() -> None:
    """Nothing exact at all, and so little that Metal would keep it elsewhere."""
    for residual, tokens in ((0, 256), (1, 257)):
        cache = PackedKVCache(method="kivi:bits=4", residual=residual, attention="kernel", kernels="simulator")
        k, v = random(1, 1, 1, tokens, 16), random(2, 1, 1, tokens, 16)
        cache.update_and_fetch(k, v)
        q = random(3, 1, 1, 1, 16)
        got = np.array(cache.attend(q, scale=0.25).astype(mx.float32))
        keys, values = (x.astype(mx.float32) for x in cache.decode())
        want = mx.softmax((q.astype(mx.float32) @ keys.swapaxes(-1, -2)) * 0.25, axis=-1) @ values
        assert np.abs(got - np.array(want)).max() < 2e-3
        assert cache.report().exact == residual


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "auto"}, "no kernels on Device\\(cpu, 0\\)"),
        ({"kernels": "off"}, "kernels='off'"),
        ({"method": "placed"}, "placed has no snippet for its keys"),
        ({"keys": "kivi:bits=4", "values": "placed", "method": None}, "placed has no snippet for its values"),
    ],
)
def test_a_tier_asked_for_by_name_says_why_not(options: dict[str, object], words: str) -> None:
    """Before anything is stored."""
    with pytest.raises(UnsupportedShapeError, match=f"attention='kernel': .*{words}"):
        filled(**options)
    auto = filled(**(options | {"attention": "auto"}))
    auto.attend(random(3, 1, 4, 1, 64), scale=0.125)
    assert auto.report().attention.startswith("mlx (kernel: ")


@pytest.mark.parametrize(
    ("q", "mask", "words"),
    [
        ((1, 5, 1, 64), None, "5 query heads: the number must be a multiple of the 2 KV heads"),
        ((1, 4, 1, 32), None, "must have B=1, D=64"),
        ((1, 4, 2, 64), (2, 299), "the cache holds 300 tokens"),
    ],
)
def test_shapes_that_do_not_fit(q: tuple[int, ...], mask: tuple[int, ...] | None, words: str) -> None:
    cache = filled()
    before = cache.nbytes
    with pytest.raises(UnsupportedShapeError, match=words):
        cache.attend(random(3, *q), scale=0.125, mask=None if mask is None else mx.ones(mask, mx.bool_))
    assert cache.nbytes == before
    with pytest.raises(CacheStateError):
        PackedKVCache(method="kivi").attend(random(3, 1, 4, 1, 64), scale=0.125)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mask": np.ones((1, 300), np.bool_)}, "mask of type ndarray"),
        ({"mask": [[True]]}, "mask of type list"),
        ({"sinks": np.zeros(4, np.float32)}, "sinks must be an MLX array"),
        ({"sinks": [0.0] * 4}, "sinks must be an MLX array"),
        ({"scale": None}, "scale None is no number"),
        ({"scale": float("nan")}, "scale nan: a finite number"),
        ({"scale": 1e40}, "scale 1e\\+40: a finite number"),
    ],
)
@pytest.mark.parametrize("tier", ["kernel", "reference"])
def test_what_is_no_mask_no_scale_and_no_sinks(given: dict[str, object], words: str, tier: str) -> None:
    cache, q = filled(attention=tier), random(3, 1, 4, 1, 64)
    with pytest.raises(UnsupportedShapeError, match=words):
        cache.attend(q, **({"scale": 0.125} | given))  # type: ignore[arg-type]


def test_a_scale_that_is_an_array_is_read_at_each_call() -> None:
    """Steps are kept by the number, not by the array that held it."""
    cache, q, scale = filled(), random(3, 1, 4, 1, 64), mx.array([0.125])
    want = [np.array(cache.attend(q, scale=s)) for s in (0.125, 0.5)]
    got = [np.array(cache.attend(q, scale=scale))]  # type: ignore[arg-type]
    scale[0] = 0.5
    got.append(np.array(cache.attend(q, scale=scale)))  # type: ignore[arg-type]
    assert np.array_equal(got, want)


ELSEWHERE = """
import threading
import mlx.core as mx
import vq_core.attention.fused
from vq_core import PackedKVCache

x, outs = mx.random.normal((1, 2, 300, 64)).astype(mx.float16), []
mx.eval(x)

def attend():
    for tier in ("kernel", "matrix"):
        cache = PackedKVCache(method="kivi:bits=2", residual=16, attention=tier, kernels="simulator")
        cache.update_and_fetch(x, x)
        outs.append(cache.attend(x[:, :, :1], scale=0.125).tolist())

thread = threading.Thread(target=attend)
thread.start()
thread.join()
assert len(outs) == 2
"""


def test_a_process_that_first_attends_on_another_thread() -> None:
    """As mlx-lm's server does. What is made at import must not be lazy: it would belong to the importing thread."""
    run = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("tier", "method"), [("kernel", "kivi:bits=2"), ("matrix", "kivi:bits=2"), ("kernel", "example:bits=2")]
)
def test_a_row_without_tokens_gives_zeros(tier: str, method: str) -> None:
    """As plain operations do: a trim may take all of a batch's shortest row."""
    rows = [filled(tokens, attention=tier, method=method) for tokens in (200, 50)]
    cache, q = PackedKVCache.join(rows), random(3, 2, 4, 1, 64)
    assert cache.trim(50) == 50
    got = np.array(cache.attend(q, scale=0.125).astype(mx.float32))
    assert np.isfinite(got).all() and got[0].any() and not got[1].any()


def test_a_tier_of_another_name() -> None:
    cache, q = filled(), random(3, 1, 4, 1, 64)
    with pytest.raises(SettingsError, match=r"attention must be one of auto, .*; got 'Kernel'"):
        attend(cache._view(), q, scale=0.125, tier="Kernel")


def test_more_causal_queries_than_a_sliding_window_holds() -> None:
    """Refused, whether or not a chunk of so many was attended to in it before."""
    cache, q = PackedKVCache(method="kivi:bits=2", residual=0, sliding=5, kernels="simulator"), random(3, 1, 4, 8, 64)
    for tokens in (40, 8):
        tags = cache.update_and_fetch(random(1, 1, 2, tokens, 64), random(2, 1, 2, tokens, 64))
    reading = reading_of(*tags)
    assert reading is not None and reading.view.length == 12
    reading.attend(q, scale=0.125, mask="causal")
    with pytest.raises(UnsupportedShapeError, match="a causal mask of 8 queries needs as many tokens; the cache has 5"):
        cache.attend(q, scale=0.125, mask="causal")
