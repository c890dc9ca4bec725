"""Caches that hold KIVI's pages in device form: what they store, give and save is what canonical ones do."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import SIDES, PrepareContext
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.cache.state import describe, rebuild
from vq_core.errors import FormatError, PluginError, SettingsError
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import build_ahead, same_bits, verify
from vq_core.plugins import binding
from vq_core.plugins import device as forms
from vq_kivi.kernels import form
from vq_kivi.kernels.device_pack import PACK

HEADS, DIM = 2, 64


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    for contract in ("off", "fast"):
        build_ahead(PACK.values(), contract)  # type: ignore[arg-type]


def cache(device: bool = True, kernels: str = "simulator", **rest: Any) -> PackedKVCache:
    policy = LayerPolicy.make(**{"method": "kivi:bits=2", "residual": 32, "kernels": kernels} | rest)
    return PackedKVCache.from_policy(policy, device_form=device)


def tokens(n: int, rows: int = 1, seed: int = 0, dtype: Any = mx.float16) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed + n)
    x = rng.standard_normal((2, rows, HEADS, n, DIM)).astype(np.float32)
    return mx.array(x[0]).astype(dtype), mx.array(x[1]).astype(dtype)


def twins(chunks: Sequence[int], rows: int = 1, dtype: Any = mx.float16, **rest: Any) -> list[PackedKVCache]:
    """A cache in device form and one in canonical order, filled alike."""
    made = [cache(True, **rest), cache(False, **rest)]
    for seed, n in enumerate(chunks):
        for one in made:
            one.update_and_fetch(*tokens(n, rows, seed, dtype))
    return made


def assert_alike(ours: PackedKVCache, theirs: PackedKVCache) -> None:
    """What they save, byte for byte; what they decode; what they count; what they answer."""
    (a, mine), (b, plain) = describe(ours), describe(theirs)
    assert json.dumps(a) == json.dumps(b) and list(mine) == list(plain)
    assert all(mine[n].dtype == plain[n].dtype and same_bits(mine[n], plain[n]) for n in plain)
    assert all(same_bits(x, y) for x, y in zip(ours.decode(), theirs.decode(), strict=True))
    assert ours.nbytes == theirs.nbytes and ours.report().bytes == theirs.report().bytes
    assert ours._history is not None
    L = min(2, *ours._history.lengths, 2)
    q = mx.array(np.random.default_rng(9).standard_normal((ours._history.rows, 4, L, DIM)).astype(np.float32))
    got, want = (one.attend(q, scale=0.125, mask="causal") for one in (ours, theirs))
    assert np.abs(np.array(got - want)).max() < 1e-5


def held(one: PackedKVCache) -> dict[str, str]:
    assert one._history is not None
    return {side: b.held.form.name if b.held else "" for side, b in one._history.bound.items()}


# ---- the pack kernel


@pytest.mark.parametrize(("contract", "seed"), [("off", 0), ("fast", 3)])
@pytest.mark.parametrize("side", SIDES)
def test_packing_straight_into_the_form_is_the_hooks_and_the_permutation(side: Any, contract: str, seed: int) -> None:
    verdict = verify("kivi", PACK[side], "simulator", Simulated(seed, contract))
    assert verdict.passed and verdict.identical and verdict.configurations >= 50, verdict


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("old", "new"),
    [("16u * i + 8u * a", "16u * a + 8u * i"), ("uint(bits) * j + 16u * b", "uint(bits) * (j ^ 1u) + 16u * b"),
     ("half_chunk ? r / 2u : r / 4u", "r / 4u"), ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
     ("codes[(block * D + d0)", "codes[(block * D)"), ("scale[at] = M(step)", "scale[at] = M(low)"),
     ("% 8u / 2u * 8u", "% 8u / 2u * 4u"), ("D - 1u", "D - 2u")],
)  # fmt: skip
def test_a_broken_packer_is_seen(side: Any, old: str, new: str) -> None:
    kernel = PACK[side]
    if old == "D - 1u" and side == "values":
        old, new = "channel = group * 32u, lanes", "channel = (group ^ 1u) * 32u % D, lanes"
    assert old in kernel.body
    small = [c for c in kernel.cases() if c.parameters["bits"] == 2 and c.inputs[0].dtype == mx.float16]
    broken = attrs.evolve(kernel, body=kernel.body.replace(old, new), cases=lambda: small)
    assert not verify("kivi", broken, "simulator", Simulated(0)).passed


# ---- through the shell


def test_pages_lie_in_the_form_and_say_so() -> None:
    ours, theirs = twins([100, 1, 1])
    assert held(ours) == {"keys": "kivi_m16n8k16", "values": "kivi_m16n8k16"} and held(theirs) == {
        "keys": "", "values": ""}  # fmt: skip
    assert ours._history is not None
    assert ours._history.stores["keys"].paged["codes"].shape == (1, HEADS, 4, DIM * 2)
    said = [line for line in ours.report().operations if ".device: " in line]
    assert len(said) == 2 and all("kivi_m16n8k16 (kivi_device_pack_keys+kivi_device_pack_values, simulator)" in s
                                  for s in said)  # fmt: skip
    assert ours._history.bound["keys"].held.matrix.side == "keys"  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("method", ["kivi:bits=2", "kivi:bits=4", "kivi:bits=8"])
def test_filled_in_any_chunks_it_saves_the_same_bytes(method: str, dtype: Any) -> None:
    for chunks in ([300], [7, 90, 1, 1, 64, 130], [33] * 9):
        assert_alike(*twins(chunks, dtype=dtype, method=method))


def test_two_bits_and_four() -> None:
    assert_alike(*twins([257, 3], method=None, keys="kivi:bits=4", values="kivi:bits=2", sink_tokens=4))


@pytest.mark.parametrize("n", [1, 20, 33, 90, 160, 229])
def test_trimmed(n: int) -> None:
    ours, theirs = twins([230])
    assert ours.trim(n) == theirs.trim(n) == n
    assert_alike(ours, theirs)
    for one in (ours, theirs):
        one.update_and_fetch(*tokens(100, seed=5))
    assert_alike(ours, theirs)


def test_rows_selected_and_joined() -> None:
    ours, theirs = twins([150], rows=2)
    others = twins([290], rows=1)
    joined = [PackedKVCache.join([a, b]) for a, b in zip((ours, theirs), others, strict=True)]
    assert_alike(*joined)
    assert_alike(*[one.select([2, 0]) for one in joined])
    for one in joined:
        one.update_and_fetch(*tokens(70, rows=3, seed=8))
    assert_alike(*joined)
    with pytest.raises(SettingsError, match="in one order: all in device form, or none"):
        PackedKVCache.join([ours, others[1]])


def test_a_sliding_window() -> None:
    made = [PackedKVCache.from_policy(LayerPolicy.make(method="kivi:bits=2", residual=32, kernels="simulator"),
                                      sliding=200, device_form=device) for device in (True, False)]  # fmt: skip
    for seed in range(6):
        for one in made:
            one.update_and_fetch(*tokens(100, seed=seed))
    assert_alike(*made)


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("out_of", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_saved_in_one_order_and_loaded_into_another(out_of: bool, into: bool, whole: bool) -> None:
    """A file's description, and a state as mlx-lm keeps it."""
    saved = twins([230, 1])[not out_of]
    back = cache(into)
    if whole:
        rebuild(back, *describe(saved))
        assert forms_in(describe(saved)[0]) == []
    else:
        assert forms_in(json.loads(saved.state[0])) == (["kivi_m16n8k16"] * 2 if out_of else [])
        back.state = saved.state
    assert back.policy.text == saved.policy.text
    # A loaded policy does not hold where kernels run: on this CPU nothing is in device form without being told.
    assert held(back) == {"keys": "", "values": ""}
    assert_alike(back, twins([230, 1])[1])


def forms_in(description: dict[str, Any]) -> list[str]:
    return list(description.get("device_form", {}).values())


def test_loaded_into_device_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose backend reads the form."""
    from vq_core.plugins import fused

    ours, theirs = twins([230, 1])
    monkeypatch.setattr(fused, "device_backend", lambda: "simulator")
    for one in (ours, theirs):
        for restored in (True, False):
            back = cache(True)
            if restored:
                back.state = one.state
            else:
                rebuild(back, *describe(one))
            assert held(back)["keys"] == "kivi_m16n8k16"
            assert_alike(back, theirs)


def test_a_state_in_an_unknown_form_is_refused() -> None:
    ours, _ = twins([230])
    text, *arrays = ours.state
    for changed, said in (
        (text.replace("kivi_m16n8k16", "kivi_other"), "kivi_other.*which the installed method has not"),
        (text.replace('"kivi_m16n8k16"', "3"), "device form of the keys"),
        (text.replace('"values": "kivi_m16n8k16"', '"other": ""'), "the device forms"),
        (text.replace('"values": "kivi_m16n8k16"', '"values": ""'), "values.codes is"),
    ):
        assert changed != text
        fresh = cache(True)
        with pytest.raises(FormatError, match=said):
            fresh.state = [changed, *arrays]
        assert fresh.empty()


# ---- where there is no form


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"method": "kivi:bits=3"}, "codes of 3 bits"), ({"method": "kivi:group_size=64"}, "groups of 64"),
     ({"kernels": "off"}, "kernels='off'"), ({"kernels": "auto"}, "no kernels on"),
     ({"method": None, "keys": "kivi:bits=2", "values": "kivi:bits=3"}, "the other side has none")],
)  # fmt: skip
def test_the_reason_stands_in_the_report(changes: dict[str, Any], said: str) -> None:
    ours, theirs = twins([150], **changes)
    assert held(ours) == {"keys": "", "values": ""}
    lines = [line for line in ours.report().operations if ".device: canonical order" in line]
    assert len(lines) == 2 and any(said in line for line in lines), lines
    assert_alike(ours, theirs)


def test_float32_models_have_none() -> None:
    ours, theirs = twins([150], dtype=mx.float32)
    assert any("are float32" in line for line in ours.report().operations)
    assert_alike(ours, theirs)


def test_numbers_that_widen_a_field() -> None:
    """A bfloat16 model whose scale does not fit a float16: the field is converted, and the order kept."""
    made = [cache(True), cache(False)]
    for one in made:
        one.update_and_fetch(*tokens(150, dtype=mx.bfloat16))
        keys, values = tokens(100, seed=3, dtype=mx.bfloat16)
        one.update_and_fetch(keys * 1e6, values)
    assert made[0]._history is not None
    assert made[0]._history.stores["keys"].paged["scale"].dtype == mx.float32
    assert_alike(*made)


def context() -> PrepareContext:
    return PrepareContext(side="keys", kv_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype="float16")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"from_device": lambda state, held: held}, "codes|does not undo|reshape|field"),
        ({"layout": lambda state: 3}, "its layout is int, not a Layout"),
        ({"run": lambda state, x, positions, sequence, backend: {}}, "give another codes"),
        ({"to_device": lambda state, packed: 1 / 0}, "ZeroDivisionError"),
        ({"declines": lambda state: 1 / 0}, "ZeroDivisionError"),
    ],
)
def test_a_form_that_breaks_its_promise_is_told(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "FORMS", (attrs.evolve(form.FORMS[0], **changes),))
    bound = binding.bind("kivi:bits=2", context(), "error", "simulator")
    with pytest.raises(PluginError, match=said):
        forms.in_device_form(bound, "simulator", "error")
    if "declines" in changes:
        return
    with pytest.warns(RuntimeWarning, match="canonical order is kept"):
        assert forms.in_device_form(bound, "simulator", "warn").held is None


@pytest.mark.parametrize(
    ("returned", "said"),
    [(lambda: 3, "must return a sequence of DeviceForm"), (lambda: form.FORMS * 2, "names a form twice"),
     (lambda: 1 / 0, "vq_device failed with ZeroDivisionError")],
)  # fmt: skip
def test_what_is_no_form_is_told(returned: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = binding.bind("kivi:bits=2", context(), "error", "simulator")

    class Hook:
        def vq_device(self) -> Any:
            return returned()

    class Manager:
        hook = Hook()

    monkeypatch.setattr(forms, "make_manager", lambda *given: Manager())
    with pytest.raises(PluginError, match=said):
        forms.forms_of(bound.record)


def test_a_declaration_that_cannot_be_is_told() -> None:
    for changes, said in (
        ({"name": "a b"}, "letters, digits"), ({"backends": ()}, "give one or more of"),
        ({"run": None}, "if and only if"),
    ):  # fmt: skip
        with pytest.raises(PluginError, match=said):
            attrs.evolve(form.FORMS[0], **changes)  # type: ignore[arg-type]


def test_constants_of_a_form_belong_to_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may be bound on a thread that is gone when the next one attends."""
    plain = form.FORMS[0]
    lazy = attrs.evolve(
        plain,
        snippet=lambda state: attrs.evolve(plain.snippet(state), constants={"spare": mx.ones(8) * 2}),  # type: ignore[misc]
    )
    monkeypatch.setattr(form, "FORMS", (lazy,))
    ctx = PrepareContext(side="keys", kv_heads=1, key_dim=64, value_dim=64, dtype="float16")
    bound = binding.bind("kivi:bits=2", ctx, kernels="simulator")
    made: list[binding.BoundSide] = []
    thread = threading.Thread(target=lambda: made.append(forms.in_device_form(bound, "simulator", "error")))
    thread.start()
    thread.join()
    assert made[0].snippet is not None and np.array(made[0].snippet.constants["spare"]).tolist() == [2.0] * 8
