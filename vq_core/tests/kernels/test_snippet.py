"""Snippets, pairs of them and the choice of the kernel tier: what each refuses, in its words."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import mlx.core as mx
import pytest

from vq_core import PackedKVCache
from vq_core.api.facts import SIDES, PrepareContext
from vq_core.attention import choice
from vq_core.attention.choice import pair_of
from vq_core.attention.verifying import pass_kernel
from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels import Snippet
from vq_core.kernels.skeleton.kernels import MERGE, pair
from vq_core.kernels.skeleton.portable import Pointer, Side
from vq_core.plugins import binding, partner
from vq_core.testing import registered

NUMBERS = "for (int j = 0; j < 8; ++j) u[j] = float(x[t * 64 + c + j]);"


def snippet(**changes: Any) -> Snippet:
    return Snippet(**({"name": "plain", "tokens": 1, "channels": 8, "numbers": NUMBERS} | changes))


def side(prefix: str = "k", page: int = 128, width: int = 64, **changes: Any) -> Side:
    return Side(snippet(**changes), [Pointer("x", "float16", 128 * 64)], page, width, prefix)


@pytest.fixture(autouse=True)
def _partner() -> Iterator[None]:
    with registered(partner):
        yield


# ---- one snippet


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "My-Name"}, "snippet name 'My-Name': give it lower-case letters, digits and underscores"),
        ({"name": "größe"}, "lower-case letters, digits and underscores"),
        ({"tokens": 0}, "snippet 'plain': a tile of 0 tokens by 8 channels: accepted are 1 to 64 numbers"),
        ({"channels": 0}, "a tile of 1 tokens by 0 channels"),
        ({"tokens": 16}, "a tile of 16 tokens by 8 channels: accepted are 1 to 64 numbers"),
        ({"affine": "return vq_float2(1.0f, 0.0f);"}, "per is '': with an affine text it is 'channel' or 'token'"),
        ({"per": "token"}, "per is 'token': with an affine text it is 'channel' or 'token', without one empty"),
        ({"affine": "return vq_float2(1.0f, 0.0f);", "per": "page"}, "per is 'page'"),
        ({"constants": {"levels": [1.0] * 8}}, "constant levels must be an MLX array of 8 elements or more"),
        ({"constants": {"levels": mx.ones(7)}}, "constant levels must be an MLX array of 8 elements or more; fill it"),
        ({"integers": {"bits": 2.0}}, "integer bits is 2.0: a whole number of 32 bits is accepted"),
        ({"integers": {"bits": True}}, "integer bits is True"),
        ({"integers": {"bits": 2**31}}, "integer bits is 2147483648"),
        ({"integers": {"t": 1}}, "'t' cannot be the name of a constant or an integer"),
        ({"integers": {"2bits": 1}}, "'2bits' cannot be the name"),
        ({"constants": {"u": mx.ones(8)}}, "'u' cannot be the name"),
        ({"numbers": "u[0] = simd_shuffle_xor(u[0], 1);"}, "its text calls simd_shuffle_xor: lanes call a snippet at"),
        ({"header": "VQ_FN void f() { threadgroup_barrier (mem_flags::mem_threadgroup); }"}, "calls threadgroup_barri"),
        ({"affine": "return vq_float2(simd_max(1.0f), 0.0f);", "per": "token"}, "its text calls simd_max"),
        ({"units": (1.0, 0.0)}, "unit 0.0: a power of two, as a float, is accepted"),
        *(({"units": (u,)}, f"unit {u!r}: a power of two") for u in (-0.5, 3.0, float("inf"), float("nan"), 1)),
    ],
)
def test_a_wrong_snippet(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError) as caught:
        snippet(**changes)
    assert said in str(caught.value)


def test_its_label_is_what_its_text_depends_on() -> None:
    assert snippet(integers={"bits": 2, "from": -3}).label == "plain_2_m3" and snippet().label == "plain"


@pytest.mark.parametrize(
    ("tokens", "channels", "page", "unit"),
    [(8, 1, 128, 64), (1, 8, 128, 32), (2, 8, 128, 64), (4, 4, 64, 64), (2, 8, 32, 32), (16, 4, 128, 64), (3, 8, 96, 0),
     (2, 8, 48, 0)],
)  # fmt: skip
def test_the_tokens_that_are_scored_at_once(tokens: int, channels: int, page: int, unit: int) -> None:
    assert snippet(tokens=tokens, channels=channels).unit(page) == unit


def odd(given: Any) -> Any:
    """A method whose hook gives something of its own."""
    from types import SimpleNamespace

    from vq_core.api import MethodFacts, hookimpl

    hooks = {name: value for name, value in vars(partner).items() if name.startswith("vq_") and callable(value)}
    facts = MethodFacts("odd", "for tests", partner.PartnerSettings)
    hooks |= {"vq_method": hookimpl(lambda: facts), "vq_snippet": hookimpl(lambda: given)}
    return registered(SimpleNamespace(**hooks))


@pytest.mark.parametrize("given", [3, ("text",), Snippet])
def test_a_hook_that_gives_something_else(given: Any) -> None:
    with odd(given), pytest.raises(PluginError, match="must return a Snippet, a reason as text, or None; it gave"):
        binding.bind("odd", PrepareContext("keys", 2, 64, 64, "float16"))


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "odd has no snippet for its keys"), ("no tables", "odd has no snippet for its keys: no tables")],
)
def test_a_hook_that_says_why_not(given: Any, said: str) -> None:
    with odd(given):
        bound = binding.bind("odd", PrepareContext("keys", 2, 64, 64, "float16"))
        assert bound.snippet is None and bound.without_snippet == said
        with pytest.raises(UnsupportedShapeError, match=f"^{said}$"):
            pass_kernel(bound, bound)


# ---- two of them


@pytest.mark.parametrize(
    ("keys", "values", "said"),
    [
        ({"page": 48}, {}, "pages of 48 tokens with tiles of 1 tokens: a unit of 32, 64 or 128 tokens must"),
        ({"tokens": 3}, {}, "pages of 128 tokens with tiles of 3 tokens"),
        ({}, {"page": 100}, "pages of 100 tokens with tiles of 1 tokens"),
        ({}, {"tokens": 64, "channels": 1}, "tiles of 64 tokens of values do not divide units of 32"),
        ({"width": 60}, {}, "60 numbers a key are no whole runs of 8 channels"),
        ({}, {"channels": 1}, "64 numbers a value in runs of 1: at most 32 runs are accepted"),
        ({"width": 8192}, {}, "need more than 32768 bytes of threadgroup memory"),
    ],
)  # fmt: skip
def test_a_pair_that_the_skeleton_cannot_do(keys: dict[str, Any], values: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedShapeError) as caught:
        pair(side("k", **keys), side("v", **values), 64, 64, "float16")
    assert said in str(caught.value)


def test_a_name_that_is_used_twice() -> None:
    pair(side("k", name="twice"), side("v"), 64, 64, "float16")
    for changed in ({"numbers": NUMBERS + " "}, {"header": "VQ_FN float one() { return 1.0f; }"}, {"units": (2.0,)}):
        with pytest.raises(PluginError, match="two different snippets are called 'twice' or 'plain': give each text a"):
            pair(side("k", name="twice", **changed), side("v"), 64, 64, "float16")
    again = pair(side("k", name="twice"), side("v"), 64, 64, "float16")
    assert again.run is pair(side("k", name="twice"), side("v"), 64, 64, "float16").run
    pair(side("k", name="twice", numbers=NUMBERS + " ", integers={"one": 1}), side("v"), 64, 64, "float16")


def test_tiles_of_values_that_lie_across_the_end() -> None:
    sides = [binding.bind("kit_exact", PrepareContext(s, 2, 64, 64, "float16"), kernels="off") for s in SIDES]
    two = attrs.evolve(sides[1], snippet=attrs.evolve(sides[1].snippet, tokens=2, integers={"N": 2, "C": 8, "D": 64}))
    with pytest.raises(UnsupportedShapeError, match="tiles of 2 tokens of values may lie across the end of what is st"):
        pair_of(sides[0], two, mx.float16)


def test_calls_that_do_not_fit() -> None:
    run = pair(side("k"), side("v"), 64, 64, "float16").run
    given = {name: mx.zeros((1, 2, 8, 64), getattr(mx, {"Q": "float16"}.get(d, d))) for name, d in run.inputs.items()}
    numbers = {name: 1 for name in run.numbers}
    for changed, more, said in (
        ({"q": mx.zeros((1, 3, 1, 64), mx.float16)}, {}, "do not fit head sizes 64 and 64"),
        ({"q": mx.zeros((1, 2, 1, 80), mx.float16)}, {}, "do not fit head sizes 64 and 64"),
        ({"exact_v": mx.zeros((1, 2, 8, 80), mx.float16)}, {}, "do not fit head sizes 64 and 64"),
        ({}, {"splits": 513}, "513 splits: 1 to 512 are accepted"),
        ({}, {"splits": 0}, "0 splits"),
        ({}, {"exact_splits": 2}, "1 splits: 1 to 512 are accepted"),
        ({}, {"M": 5}, "M 5 is not accepted; accepted are 1, 2, 3, 4"),
    ):
        with pytest.raises(UnsupportedShapeError, match=said):
            run(*(given | changed).values(), backend="simulator", **(numbers | {"M": 1} | more))
    sums, tops, logits = mx.zeros((1, 2, 3, 4, 64)), mx.zeros((1, 2, 3, 4, 2)), mx.zeros(8)
    common = {"T": "float16", "with_logits": 0, "exact_splits": 1, "D": 64}
    for arrays, L in (((sums, tops[:, :1]), 1), ((sums, tops), 3), ((sums, tops), 0), ((sums[0], tops), 1)):
        with pytest.raises(UnsupportedShapeError, match="do not fit"):
            MERGE(*arrays, logits, backend="simulator", query_length=L, **common)


# ---- the tier


def filled(dim: int = 64, **options: Any) -> PackedKVCache:
    given = {"method": "kit_exact", "residual": 8, "kernels": "simulator"} | options
    if "keys" in given:
        del given["method"]
    cache = PackedKVCache(**given)
    x = mx.random.normal((1, 2, 80, dim), key=mx.random.key(1)).astype(mx.float16)
    cache.update_and_fetch(x, x)
    return cache


def ask(cache: PackedKVCache, dim: int = 64) -> mx.array:
    return cache.attend(mx.ones((1, 4, 1, dim), mx.float16), scale=dim**-0.5)


@attrs.frozen
class Bare:
    """A method of two fields without a snippet, and with other pages."""

    page: int = 128
    given: Snippet | None = None

    def plugin(self) -> Any:
        from types import SimpleNamespace

        from vq_core.api import Field, Layout, MethodFacts, hookimpl

        hooks = {name: value for name, value in vars(partner).items() if name.startswith("vq_") and callable(value)}
        facts = MethodFacts("bare", "for tests", partner.PartnerSettings)
        hooks["vq_method"] = hookimpl(lambda: facts)

        def vq_layout(ctx):
            return Layout(1, (Field("x", ctx.dtype, (self.page, ctx.head_dim), codes=True),), self.page)

        def vq_snippet(state, side):
            return self.given

        return SimpleNamespace(**hooks | {"vq_layout": hookimpl(vq_layout), "vq_snippet": hookimpl(vq_snippet)})


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="this device runs kernels")
def test_a_cpu_without_the_simulator() -> None:
    cache = PackedKVCache(method="kit_exact", attention="kernel")
    x = mx.zeros((1, 2, 4, 64), mx.float16)
    with pytest.raises(
        UnsupportedShapeError, match=r"attention='kernel': no kernels on Device\(cpu, 0\); attention='a"
    ):
        cache.update_and_fetch(x, x)
    assert cache.empty() and cache.nbytes == 0
    auto = filled(kernels="auto")
    assert auto.report().attention == "mlx (kernel: no kernels on Device(cpu, 0))"
    assert filled(kernels="off").report().attention == "mlx (kernel: kernels='off')"


@pytest.mark.parametrize(
    ("bare", "dim", "said"),
    [
        (Bare(), 64, "bare has no snippet for its values"),
        (Bare(48, snippet()), 64, "pages of 48 tokens with tiles of 2 tokens: a unit of 32, 64 or 128 tokens must"),
        (Bare(128, snippet(name="wide", channels=8)), 512, "512 numbers a value in runs of 8: at most 32 runs are acc"),
    ],
)  # fmt: skip
def test_what_the_tier_cannot_do(bare: Bare, dim: int, said: str) -> None:
    """Asked for by name it raises and leaves the cache empty; auto takes plain operations, and the report says why."""
    with registered(bare.plugin()):
        chosen = {"keys": "kit_exact", "values": "bare"}
        cache = PackedKVCache(kernels="simulator", attention="kernel", **chosen)
        x = mx.zeros((1, 2, 4, dim), mx.float16)
        with pytest.raises(UnsupportedShapeError) as caught:
            cache.update_and_fetch(x, x)
        assert str(caught.value).startswith("attention='kernel': ") and said in str(caught.value)
        assert "attention='auto' takes what there is" in str(caught.value) and cache.empty() and cache.nbytes == 0
        auto = filled(dim, **chosen)
        assert auto.report().attention.startswith("mlx (kernel: ") and said in auto.report().attention
        assert mx.array_equal(ask(auto, dim), ask(filled(dim, **chosen, attention="mlx"), dim))


BROKEN = Bare(128, snippet(name="broken", numbers="for (int j = 0; j < 8; ++j) u[j] = float(x[t * 64 + c]);"))
"""One channel for eight: attention differs from what the hooks say."""


def test_a_kernel_that_fails_its_probe_raises() -> None:
    with registered(BROKEN.plugin()):
        cache = filled(keys="kit_exact", values="bare", attention="kernel")
        before = cache.nbytes
        with pytest.raises(PluginError) as caught:
            ask(cache)
        said = str(caught.value)
        assert "kernel attend_kit_exact_2_8_64_broken_64_64_h_hh on simulator: differs from dense attention by" in said
        assert "report it to the authors of kit_exact and bare" in said and "attention='mlx'" in said
        assert cache.nbytes == before and cache.offset == 80
        with pytest.raises(PluginError):
            ask(cache)


def test_a_kernel_that_fails_its_probe_is_left_out_with_one_warning() -> None:
    worse = Bare(128, snippet(name="worse", numbers="for (int j = 0; j < 8; ++j) u[j] = 0.0f;"))
    with registered(worse.plugin()):
        chosen = {"keys": "kit_exact", "values": "bare", "fallback": "warn"}
        first, second = filled(**chosen), filled(**chosen)
        assert first.report().attention.startswith("kernel (simulator): attend_kit_exact_2_8_64_worse"), "not tried yet"
        with pytest.warns(RuntimeWarning, match="plain operations do its work from now on") as told:
            got = ask(first)
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ask(first)
            ask(second)
        for cache in (first, second):
            assert cache.report().attention.startswith("mlx (kernel: differs from dense attention by ")
        assert mx.array_equal(got, ask(filled(**chosen, attention="mlx")))
        with pytest.raises(UnsupportedShapeError, match="attention='kernel': differs from dense attention by"):
            ask(filled(**chosen, attention="kernel"))
        for tier in ("auto", "kernel"):  # and is an error to a cache that asks for errors
            with pytest.raises(PluginError, match="on simulator: differs from dense attention by"):
                ask(filled(**chosen | {"fallback": "error"}, attention=tier))


def test_a_text_that_does_not_compile() -> None:
    wrong = Bare(128, snippet(name="wrong", numbers="u[0] = float(y[t]);"))
    said = r"(?s)attend_kit_exact_2_8_64_wrong_64_64_h_hh on simulator: .*does not compile.*header line [0-9]+: .*'y'"
    with registered(wrong.plugin()), pytest.raises(PluginError, match=said):
        ask(filled(keys="kit_exact", values="bare"))
    latched = [why for key, why in choice._proven.items() if why and "wrong" in getattr(key[0], "name", "")]
    assert not latched, "an error latches nothing"
