"""The tier on tensor cores, in the simulator: against dense attention and the portable tier, chosen, refused, saved."""

from __future__ import annotations

import copy
import threading

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache, UnsupportedShapeError
from vq_core.attention import ready
from vq_core.attention.packed import attend
from vq_core.cache.policy import LayerPolicy
from vq_core.evaluate.random_attention import MATRIX_PAIRS, run
from vq_core.testing.observe import assert_same


@pytest.mark.parametrize("seed", [21, 22])
def test_random_caches(seed: int) -> None:
    """Shapes, query ratios, causal masks, rows of unequal length, first tokens, sinks, pairs of widths."""
    found = run(seed, 40, 6, "matrix", "simulator", MATRIX_PAIRS, longest=500)
    assert set(found["worst"]) == {"float16", "bfloat16"}
    assert not found["failed"], f"{len(found['failed'])} of 40, the first: {found['failed'][0]}"


def random(seed: int, *shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def filled(D: int = 64, dtype: mx.Dtype = mx.float16, **options: object) -> PackedKVCache:
    options = {"method": "kivi:bits=2", "residual": 16, "attention": "matrix", "kernels": "simulator"} | options
    cache = PackedKVCache(**options)  # type: ignore[arg-type]
    cache.update_and_fetch(random(1, 1, 2, 300, D, dtype=dtype), random(2, 1, 2, 300, D, dtype=dtype))
    return cache


def test_both_tiers_agree() -> None:
    """Within the sum of their bounds, on one cache: array masks go to the portable tier, in the same order of pages."""
    cache, q = filled(), random(3, 1, 8, 2, 64)
    outs = [np.array(attend(cache._view(), q, scale=0.125, mask="causal", tier=t)) for t in ("matrix", "kernel")]
    causal = mx.arange(300)[None] <= mx.arange(298, 300)[:, None]
    outs.append(np.array(attend(cache._view(), q, scale=0.125, mask=causal, tier="auto")))
    a, b, c = (x.astype(np.float32) for x in outs)
    assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b) and np.array_equal(b, c)
    assert np.array_equal(outs[0], np.array(cache.attend(q, scale=0.125, mask="causal"))), "repeated runs are identical"


def test_the_report_names_it() -> None:
    cache = filled()
    cache.attend(random(3, 1, 4, 1, 64), scale=0.125)
    report = cache.report()
    assert report.attention == (
        "matrix (simulator): attend_matrix_kivi2_k64_kivi2_v64_float16; masks that are arrays by the kernel; "
        "prefill by decoding to a scratch"
    )
    assert any("device: kivi_m16n8k16 (" in line for line in report.operations)
    # The simulator is no CUDA device: left to itself it takes the tier of every device.
    auto = filled(attention="auto")
    auto.attend(random(3, 1, 4, 1, 64), scale=0.125)
    assert "(matrix: kivi holds its keys in no form for tensor cores)" in auto.report().attention


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"D": 80}, "kivi holds its keys in no form for tensor cores"),
        ({"dtype": mx.float32}, "kivi holds its keys in no form for tensor cores"),
        ({"method": "kivi:bits=3"}, "kivi holds its keys in no form for tensor cores"),
        ({"method": "kivi:bits=2,group_size=64"}, "kivi holds its keys in no form for tensor cores"),
        ({"method": "example:bits=2"}, "example holds its keys in no form for tensor cores"),
        ({"kernels": "off"}, "kernels='off'"),
        ({"kernels": "auto"}, "no kernels on Device\\(cpu, 0\\)"),
    ],
)
def test_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=f"attention='matrix': .*{words}"):
        filled(**options)  # type: ignore[arg-type]


def test_array_masks_are_refused_by_name_only() -> None:
    cache, q = filled(), random(3, 1, 4, 1, 64)
    with pytest.raises(UnsupportedShapeError, match="attention='matrix': masks that are arrays are not for tensor"):
        cache.attend(q, scale=0.125, mask=mx.ones((1, 300), mx.bool_))
    got = attend(cache._view(), q, scale=0.125, mask=mx.ones((1, 300), mx.bool_), tier="auto")
    want = attend(cache._view(), q, scale=0.125, tier="reference")
    assert np.abs(np.array(got) - np.array(want)).max() < 2e-3


def test_a_saved_cache_is_the_same_as_one_in_canonical_order() -> None:
    """And loads where there are no tensor cores."""
    ordered, plain = filled(), filled(attention="auto", kernels="off")
    assert_same(list(ordered.decode()), list(plain.decode()), "decoded")
    back = PackedKVCache.from_state(ordered.state)
    assert back.policy.attention == "auto"
    assert_same(list(back.decode()), list(plain.decode()), "loaded")


def test_prefill_reads_the_device_form() -> None:
    cache, q = filled(D=96), random(5, 1, 4, 30, 96)
    got = cache.attend(q, scale=0.1, mask="causal")
    want = attend(cache._view(), q, scale=0.1, mask="causal", tier="reference")
    a, b = (np.array(x.astype(mx.float32)) for x in (got, want))
    assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)


def test_scales_that_tensor_cores_do_not_take() -> None:
    """Left to itself a cache in device form goes on with the portable tier; asked for by name it says the limit."""
    cache, q = filled(), random(3, 1, 4, 2, 64)
    for scale in (0.0, -0.125):
        with pytest.raises(UnsupportedShapeError, match=r"attention='matrix': a scale of .*above 0"):
            cache.attend(q, scale=scale, mask="causal")
        got, want = (
            np.array(attend(cache._view(), q, scale=scale, mask="causal", tier=tier)).astype(np.float32)
            for tier in ("auto", "reference")
        )
        assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("method", ["kivi:bits=2", "kivi:bits=4"])
@pytest.mark.parametrize(("dtype", "size"), [(mx.float16, 0.0), (mx.bfloat16, 0.0), (mx.bfloat16, 2.0**-130)])
def test_queries_of_nothing(method: str, dtype: mx.Dtype, size: float) -> None:
    """A head whose query is zero, or too small for its power of two to be divided by, weighs all tokens alike."""
    cache = filled(method=method, dtype=dtype)
    numbers = np.array(random(3, 1, 4, 2, 64)).astype(np.float32)
    numbers[:, 1] *= size
    q = mx.array(numbers).astype(dtype)
    got, want = (
        np.array(attend(cache._view(), q, scale=0.125, mask="causal", tier=tier).astype(mx.float32))
        for tier in ("matrix", "reference")
    )
    for head in range(4):
        error = np.linalg.norm(got[:, head] - want[:, head]) / np.linalg.norm(want[:, head])
        assert error < (1e-2 if dtype == mx.bfloat16 else 2e-3)


@pytest.mark.parametrize(
    ("method", "D", "dtype"),
    [("kivi:bits=2", 64, mx.float16), ("kivi:bits=2", 96, mx.bfloat16), ("turboquant_mse:bits=2", 64, mx.float16)],
)
def test_the_window_that_attention_writes_is_the_one_that_is_joined(method: str, D: int, dtype: mx.Dtype) -> None:
    """Bit for bit, over flushes, steps of one token and of three, steps that nobody attends to, and two readers."""
    policy = LayerPolicy.make(method=method, residual=16, attention="matrix", kernels="simulator", sink_tokens=2)
    cache = PackedKVCache.from_policy(policy, strict=True)  # else the tokens are joined for the dense tags
    cache.update_and_fetch(random(1, 1, 2, 300, D, dtype=dtype), random(2, 1, 2, 300, D, dtype=dtype))
    twin = filled(D, dtype, method=method, sink_tokens=2, attention="mlx", kernels="off")
    written = 0
    for step in range(40):
        L = 3 if step % 9 == 8 else 1
        new = [random(step + n, 1, 2, L, D, dtype=dtype) for n in (100, 200)]
        keys, _ = cache.update_and_fetch(*new)
        twin.update_and_fetch(*new)
        window = cache._history.window  # type: ignore[union-attr]
        apart = window.parts() is not None
        if step % 5:
            reading, q = keys.vq_reading, random(step, 1, 4, L, D, dtype=dtype)
            out = reading.attend(q, scale=0.125, mask="causal")
            assert window.parts() is None, "attention has joined them"
            written += apart
            again, want = (np.array(r.attend(q, scale=0.125, mask="causal").astype(mx.float32)) for r in (
                reading, attrs.evolve(reading, view=cache._view(), tier="reference")))  # fmt: skip
            assert np.array_equal(np.array(out.astype(mx.float32)), again)
            assert np.linalg.norm(again - want) < (2e-3 if dtype == mx.float16 else 1e-2) * np.linalg.norm(want)
        for a, b in zip(window.arrays(), twin._history.window.arrays(), strict=True):  # type: ignore[union-attr]
            assert mx.array_equal(a, b)
    assert written > 20
    assert_same(cache.decode(), twin.decode(), "tokens")


def test_a_copy_taken_before_attention_keeps_its_tokens() -> None:
    cache = filled()
    cache.update_and_fetch(random(4, 1, 2, 1, 64), random(5, 1, 2, 1, 64))
    keys, _ = cache.update_and_fetch(random(6, 1, 2, 1, 64), random(7, 1, 2, 1, 64))
    other = copy.deepcopy(cache)
    keys.vq_reading.attend(random(3, 1, 4, 1, 64), scale=0.125)
    other.trim(1)
    other.update_and_fetch(random(6, 1, 2, 1, 64), random(7, 1, 2, 1, 64))
    assert_same(cache.decode(), other.decode(), "tokens")


def test_what_nobody_attends_to_is_told_and_saved() -> None:
    """The report, bytes and the state know the tokens of a step before any attention has read them."""
    cache = filled()
    cache.update_and_fetch(random(4, 1, 2, 1, 64), random(5, 1, 2, 1, 64))
    before = cache.nbytes
    cache.update_and_fetch(random(6, 1, 2, 1, 64), random(7, 1, 2, 1, 64))
    assert cache.nbytes - before == 2 * 2 * 64 * 2 and cache.report().tokens == cache.offset == 302
    assert_same(PackedKVCache.from_state(cache.state).decode(), cache.decode(), "tokens")


def steady(tier: str = "matrix") -> PackedKVCache:
    """A cache after steps, so that the next one holds its tokens apart; nothing is joined for dense tags."""
    kernels = "simulator" if tier == "matrix" else "off"
    policy = LayerPolicy.make(method="kivi:bits=2", residual=16, attention=tier, kernels=kernels)  # type: ignore[arg-type]
    cache = PackedKVCache.from_policy(policy, strict=True)
    cache.update_and_fetch(random(1, 1, 2, 50, 64), random(2, 1, 2, 50, 64))
    for i in range(3):
        tags = cache.update_and_fetch(random(3 + i, 1, 2, 1, 64), random(6 + i, 1, 2, 1, 64))
        mx.eval(tags[0].vq_reading.attend(random(9, 1, 4, 1, 64), scale=0.1))
    return cache


def test_a_caller_may_write_into_the_arrays_that_it_gave() -> None:
    cache, k = steady("mlx"), mx.zeros((1, 2, 1, 64), mx.float16)
    for i in (1, 2, 3, 4):
        k[...] = i
        cache.update_and_fetch(k, k)
    for side in cache.decode():
        assert side[0, 0, -4:, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("tier", ["mlx", "matrix"])
@pytest.mark.parametrize("look", ["nbytes", "report", "state", "decode", "deepcopy"])
def test_who_looks_at_a_cache_from_another_thread_leaves_it_usable(tier: str, look: str) -> None:
    """A lazy array belongs to the thread that made it, and attention goes on where the step was."""
    cache, seen = steady(tier), []

    def ask() -> None:
        found = copy.deepcopy(cache) if look == "deepcopy" else getattr(cache, look)
        seen.append(found() if look in ("report", "decode") else found)

    keys, _ = cache.update_and_fetch(random(20, 1, 2, 1, 64), random(21, 1, 2, 1, 64))
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    out = keys.vq_reading.attend(random(9, 1, 4, 1, 64), scale=0.1)
    mx.eval(out, cache.state[1:])
    assert seen and np.isfinite(np.array(out)).all()
    if look == "nbytes":
        assert seen[0] == cache.nbytes == sum(a.nbytes for a in cache.state[1:])


def test_a_copy_is_usable_where_its_original_never_was() -> None:
    """What it shares is evaluated with the original's attention; its report evaluates nothing."""
    cache = steady()
    keys, _ = cache.update_and_fetch(random(20, 1, 2, 1, 64), random(21, 1, 2, 1, 64))
    other = copy.deepcopy(cache)
    other.report()
    mx.eval(keys.vq_reading.attend(random(9, 1, 4, 1, 64), scale=0.1))
    made: list[object] = []

    def work() -> None:
        mx.eval(other.attend(random(9, 1, 4, 1, 64), scale=0.1))
        made.append(other.offset)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert made == [54]


def test_tokens_that_join_while_a_step_is_chosen_are_apart_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody reads the window in between: the pass must not take them twice, nor write past its output."""
    cache = steady()
    keys, _ = cache.update_and_fetch(random(20, 1, 2, 1, 64), random(21, 1, 2, 1, 64))
    twin = copy.deepcopy(cache)
    assert keys.shape == (1, 2, 54, 64)  # from now on the reading is a whole one
    chosen = ready.Kind.step

    def step(self: ready.Kind, view: object) -> object:
        found = chosen(self, view)  # type: ignore[arg-type]
        cache.state  # noqa: B018
        return found

    monkeypatch.setattr(ready.Kind, "step", step)
    q = random(9, 1, 4, 1, 64)
    assert_same(keys.vq_reading.attend(q, scale=0.1), twin.attend(q, scale=0.1), "attention")
    assert_same(cache.decode(), twin.decode(), "tokens")
