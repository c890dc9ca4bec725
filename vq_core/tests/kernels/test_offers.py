"""Kernels in the place of hooks: bound after a probe, latched where they fail, told in the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import pytest

from vq_core import PackedKVCache
from vq_core.api import Field, Layout
from vq_core.errors import PluginError
from vq_core.kernels import Kernel, KernelOffer, device_backend
from vq_core.plugins import fused
from vq_core.plugins.offered import offered_kernels

from .toys import BODY, times

Install = Callable[..., None]


@attrs.frozen
class NoSettings:
    """None."""


def hooks(**changes: Any) -> dict[str, Callable[..., Any]]:
    """A method that stores twice its input, and reads three times what it stored."""

    def layout(state: Any) -> Layout:
        return Layout(8, (Field("x", "float32", (32, state.dim), codes=True),), 32)

    found: dict[str, Callable[..., Any]] = {
        "vq_prepare": lambda ctx: SimpleNamespace(dim=ctx.head_dim, side=ctx.side),
        "vq_layout": layout,
        "vq_encode": lambda x: x.astype(mx.float32),
        "vq_pack": lambda codes: {"x": codes * 2},
        "vq_decode": lambda packed: packed["x"] * 3,
    }
    return found | {name: hook for name, hook in changes.items() if hook is not None}


def offers(pack: Kernel | None = None, decode: Kernel | None = None, **more: Any) -> list[KernelOffer]:
    """Kernels that do what the hooks do."""
    one, two = pack or times(name="twice"), decode or times(name="thrice")

    def run_pack(state: Any, x: mx.array, backend: Any, **rest: Any) -> dict[str, mx.array]:
        return {"x": one(x.astype(mx.float32), count=x.size, by=2, backend=backend)[0]}

    def run_decode(state: Any, packed: Any, backend: Any, **rest: Any) -> mx.array:
        return two(packed["x"], count=packed["x"].size, by=3, backend=backend)[0]

    return [KernelOffer("encode+pack", [one], run_pack, **more), KernelOffer("decode", [two], run_decode, **more)]


@pytest.fixture(autouse=True)
def _nothing_latched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_latched", {})


def filled(kernels: str = "simulator", fallback: str = "error") -> PackedKVCache:
    cache = PackedKVCache(method="toy", residual=0, kernels=kernels, fallback=fallback)  # type: ignore[arg-type]
    x = mx.random.normal((1, 2, 40, 8), key=mx.random.key(0))
    cache.update_and_fetch(x, x)
    return cache


def said(cache: PackedKVCache, hook: str) -> str:
    (line,) = [x for x in cache.report().operations if x.startswith(f"keys.{hook.removeprefix('vq_')}:")]
    return line


def test_kernels_serve_and_the_report_names_them(install: Install) -> None:
    launched = []

    class Counting(Kernel):
        def __call__(self, /, *inputs: mx.array, **rest: Any) -> tuple[mx.array, ...]:
            launched.append(self.name)
            return super().__call__(*inputs, **rest)

    kernels = [
        Counting(**attrs.asdict(times(name=name), recurse=False, filter=lambda field, _: field.init))
        for name in ("twice", "thrice")
    ]
    install("toy", hooks(vq_kernels=lambda: offers(*kernels)), NoSettings)
    plain, quick = filled("off"), filled()
    assert launched.count("twice") >= 4 and "thrice" in launched  # a probe and a flush on each side
    before = len(launched)
    for a, b in zip(plain.decode(), quick.decode(), strict=True):
        assert mx.array_equal(a, b)
    assert len(launched) > before
    assert "kernel twice (simulator)" in said(quick, "vq_encode") and "kernel twice (simulator)" in said(
        quick, "vq_pack"
    )
    assert "kernel thrice (simulator)" in said(quick, "vq_decode")
    assert "kernels='off'" in said(plain, "vq_decode") and "simulator" not in said(plain, "vq_decode")


@pytest.mark.skipif(device_backend() is not None, reason="this device runs kernels")
def test_auto_on_a_cpu_says_why_none_runs(install: Install) -> None:
    """Even where another cache has asked for none: each gets its own reason."""
    install("toy", hooks(vq_kernels=offers), NoSettings)
    assert "kernel twice: kernels='off'" in said(filled("off"), "vq_encode")
    assert "kernel twice: no kernels on Device(cpu" in said(filled("auto"), "vq_encode")


def test_a_declined_offer_stands_in_the_report(install: Install) -> None:
    first = offers(
        times(name="only_values"), declines=lambda state: f"not for {state.side}" if state.side == "keys" else ""
    )
    install("toy", hooks(vq_kernels=lambda: [*first, *offers()]), NoSettings)
    cache = filled()
    assert "kernel twice (simulator)" in said(cache, "vq_encode")
    assert "kernel only_values: not for keys" in said(cache, "vq_encode")
    assert any("values" in line and "kernel only_values (simulator)" in line for line in cache.report().operations)


WRONG: dict[str, tuple[Kernel, str]] = {
    "another result": (times(name="twice", body=BODY.replace("vq_mul", "vq_add")), "x differs from the reference by"),
    "an output out of bounds": (times(name="twice", body=BODY.replace("y[i]", "y[i + 1u]")), "line 2"),
    "text that does not compile": (times(name="twice", body=BODY.replace("x[i]", "z[i]")), "z"),
    "a refusal": (times(name="twice", check=lambda call: "not today"), "not today"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_failed_probe_raises(install: Install, what: str) -> None:
    kernel, reason = WRONG[what]
    install("toy", hooks(vq_kernels=lambda: offers(kernel)), NoSettings)
    with pytest.raises(PluginError, match="kernel twice on simulator: ") as caught:
        filled()
    assert reason in str(caught.value) and "report it to" in str(caught.value) and "kernels='off'" in str(caught.value)
    assert not filled("off").empty()


@pytest.mark.parametrize("what", WRONG)
def test_a_failed_probe_warns_once_and_is_latched(install: Install, what: str) -> None:
    kernel, reason = WRONG[what]
    install("toy", hooks(vq_kernels=lambda: offers(kernel)), NoSettings)
    with pytest.warns(RuntimeWarning, match="kernel twice on simulator") as caught:
        cache = filled(fallback="warn")
    assert len(caught) == 1 and reason in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = PackedKVCache(method="toy", residual=0, kernels="simulator", fallback="warn")
        x = mx.ones((1, 3, 40, 16))  # another shape is another binding
        again.update_and_fetch(x, x)
    for one in (cache, again):
        line = said(one, "vq_encode")
        assert "kernel twice: " in line and reason in line and "kernel twice (" not in line
        assert "kernel thrice (simulator)" in said(one, "vq_decode")
    for a, b in zip(cache.decode(), filled("off").decode(), strict=True):
        assert mx.array_equal(a, b)
    with pytest.raises(PluginError, match="kernel twice on simulator"):
        filled()


def test_after_a_failed_offer_the_next_serves(install: Install) -> None:
    install(
        "toy", hooks(vq_kernels=lambda: [*offers(WRONG["another result"][0]), *offers(times(name="good"))]), NoSettings
    )
    with pytest.warns(RuntimeWarning, match="twice"):
        cache = filled(fallback="warn")
    assert "kernel good (simulator)" in said(cache, "vq_encode") and "kernel twice: x differs" in said(
        cache, "vq_encode"
    )


def failing(**rest: Any) -> Any:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (failing, "KeyError: 'gone'"),
        (lambda state: None, "TypeError: "),
        (lambda **rest: None, "AttributeError: "),
        (lambda **rest: {}, "x is None, not"),
        (lambda x, **rest: {"x": x.astype(mx.float16)}, "mlx.core.float16"),
        (lambda x, **rest: {"x": x[:, :, :8].astype(mx.float32)}, "x is ((1, 2, 8, 8)"),
    ],
)
def test_a_run_that_is_wrong_is_one_typed_error(install: Install, run: Any, reason: str) -> None:
    install("toy", hooks(vq_kernels=lambda: [KernelOffer("encode+pack", [times()], run)]), NoSettings)
    with pytest.raises(PluginError, match="kernel times on simulator") as caught:
        filled()
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (lambda: 7, "it gave int"),
        (lambda: times(), "it gave Kernel"),
        (lambda: [times()], r"it gave \['Kernel'\]"),
        (lambda: [*offers(), None], "'NoneType'"),
        (lambda: "decode", "it gave str"),
        (failing, "vq_kernels failed with KeyError: 'gone'"),
        (lambda: [KernelOffer("decode", [])], "an offer needs kernels"),  # type: ignore[list-item]
    ],
)
def test_a_wrong_answer_of_vq_kernels_is_a_plugin_error(install: Install, kernels: Any, reason: str) -> None:
    install("toy", hooks(vq_kernels=kernels), NoSettings)
    for setting in ("simulator", "off"):
        with pytest.raises(PluginError, match=reason):
            filled(setting)


@pytest.mark.parametrize("answer", [None, [], ()])
def test_no_offers_are_fine(install: Install, answer: Any) -> None:
    install("toy", hooks(vq_kernels=lambda: answer), NoSettings)
    assert said(filled(), "vq_encode").endswith("<lambda>")


def test_an_offer_that_cannot_say_whether_it_declines(install: Install) -> None:
    install("toy", hooks(vq_kernels=lambda: offers(declines=lambda state: state.size > 3)), NoSettings)
    with pytest.raises(PluginError, match="kernel twice cannot say whether it declines: AttributeError"):
        filled()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("encode", [times()], failing), "operation is 'encode': accepted are 'encode\\+pack', 'decode', ''"),
        (("decode", [], failing), "needs kernels"),
        (("decode", [3], failing), "needs kernels"),
        (("decode", [times()]), "has no run, so nothing would call it"),
        (("", [times()], failing), "has a run, which nothing calls"),
    ],
)
def test_wrong_offers(given: Any, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        KernelOffer(*given)


# ---- collecting them


def test_every_kernel_is_found_once(install: Install) -> None:
    made = offers()
    install("toy", hooks(vq_kernels=lambda: [*made, KernelOffer("", made[0].kernels)]), NoSettings)
    install("bare", hooks(), NoSettings)
    install("broken", hooks(vq_kernels=failing), NoSettings)
    found, failed = offered_kernels()
    assert [(one.method, one.kernel.name) for one in found] == [
        ("core", "pack_bits"), ("core", "unpack_bits"), ("core", "sign_hadamard"),
        ("core", "attend_merge"), ("core", "attend_merge_apart"), ("core", "attend_merge_turned"),
        ("toy", "twice"), ("toy", "thrice"),
    ]  # fmt: skip
    assert len(failed) == 1 and "broken" in failed[0] and "KeyError: 'gone'" in failed[0]
    assert [one.kernel.name for one in offered_kernels("toy")[0]] == ["twice", "thrice"]
    assert {one.method for one in offered_kernels("core")[0]} == {"core"}
    from vq_core.errors import SettingsError

    with pytest.raises(SettingsError, match="'bare' offers no kernels"):
        offered_kernels("bare")
    with pytest.raises(SettingsError, match="unknown method 'toys'"):
        offered_kernels("toys")
    with pytest.raises(PluginError, match="vq_kernels failed"):
        offered_kernels("broken")
