"""Caches that hold pages in device form: what they store, give and save is what canonical ones do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache, UnsupportedShapeError
from vq_core.api import PluginError, PrepareContext, Side
from vq_core.attention.packed import attend
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.state import describe, rebuild
from vq_core.evaluate.random_attention import BOUND, Variant, configurations, error
from vq_core.kernels import Kernel
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import same_bits
from vq_core.plugins.binding import bind
from vq_turboquant.mse import MseState

FORMS = {"turboquant_mse_m16n8k16", "turboquant_rvq_m16n8k16"}
HEADS, DIM = 2, 64


def cache(device: bool = True, **rest: Any) -> PackedKVCache:
    given = {"method": "turboquant_mse:bits=2", "residual": 32, "kernels": "simulator"} | rest
    return PackedKVCache.from_policy(LayerPolicy.make(**given), device_form=device)


def tokens(n: int, rows: int = 1, seed: int = 0, dtype: Any = mx.float16) -> tuple[mx.array, mx.array]:
    x = np.random.default_rng(seed + n).standard_normal((2, rows, HEADS, n, DIM)).astype(np.float32)
    return mx.array(x[0]).astype(dtype), mx.array(x[1]).astype(dtype)


def twins(chunks: Sequence[int], rows: int = 1, dtype: Any = mx.float16, **rest: Any) -> list[PackedKVCache]:
    """A cache in device form and one in canonical order, filled alike."""
    made = [cache(True, **rest), cache(False, **rest)]
    for seed, n in enumerate(chunks):
        for one in made:
            one.update_and_fetch(*tokens(n, rows, seed, dtype))
    return made


def assert_alike(ours: PackedKVCache, theirs: PackedKVCache) -> None:
    """What they save, byte for byte; what they decode; what they count."""
    (a, mine), (b, plain) = describe(ours), describe(theirs)
    assert json.dumps(a) == json.dumps(b) and list(mine) == list(plain)
    assert all(mine[n].dtype == plain[n].dtype and same_bits(mine[n], plain[n]) for n in plain)
    assert all(same_bits(x, y) for x, y in zip(ours.decode(), theirs.decode(), strict=True))
    assert ours.nbytes == theirs.nbytes and ours.report().bytes == theirs.report().bytes


def held(one: PackedKVCache) -> list[str]:
    assert one._history is not None
    return [side.held.form.name if side.held else "" for side in one._history.bound.values()]


@pytest.mark.parametrize(
    "methods",
    [{"method": "turboquant_mse:bits=2"}, {"method": "turboquant_mse:bits=4,rotation=haar,scale=raw"},
     {"method": None, "keys": "turboquant_mse:bits=2", "values": "kivi:bits=4"},
     {"method": "turboquant_rvq:bits=2+2"},
     {"method": None, "keys": "turboquant_rvq:bits=1+1,rotation=haar", "values": "turboquant_mse:bits=4"}],
)  # fmt: skip
def test_filled_in_any_chunks_it_saves_the_same_bytes(methods: dict[str, Any]) -> None:
    for chunks in ([300], [7, 90, 1, 1, 64, 130]):
        ours, theirs = twins(chunks, **methods)
        assert FORMS & set(held(ours)) and all(held(ours)) and held(theirs) == ["", ""]
        assert_alike(ours, theirs)
    assert ours.trim(133) == theirs.trim(133) == 133
    for one in (ours, theirs):
        one.update_and_fetch(*tokens(70, seed=5))
    assert_alike(ours, theirs)


@pytest.mark.parametrize("method", ["turboquant_mse:bits=2", "turboquant_rvq:bits=1+1,stage2=fitted"])
def test_rows_selected_joined_and_loaded(method: str) -> None:
    ours, theirs = twins([150], rows=2, sink_tokens=4, method=method)
    others = twins([290], rows=1, sink_tokens=4, method=method)
    joined = [PackedKVCache.join([a, b]) for a, b in zip((ours, theirs), others, strict=True)]
    assert_alike(*joined)
    assert_alike(*[one.select([2, 0]) for one in joined])
    back = cache(True, sink_tokens=4, method=method)
    rebuild(back, *describe(joined[0]))
    assert_alike(back, joined[1])


@pytest.mark.parametrize(
    ("method", "names", "packer"),
    [("turboquant_mse:bits=2", ("turboquant_mse2_k64", "turboquant_mse2_v64"), "turboquant_mse_order_values"),
     ("turboquant_rvq:bits=2+2", ("turboquant_rvq22_laplace_k64", "turboquant_rvq22_laplace_v64"),
      "turboquant_rvq_device_values_hadamard")],
)  # fmt: skip
def test_all_tiers_answer_alike_and_the_report_says_which(method: str, names: tuple[str, str], packer: str) -> None:
    """On pages in device form: tensor cores, the portable kernels for masks that are arrays, plain operations."""
    one = twins([301], attention="matrix", method=method)[0]
    q = mx.array(np.random.default_rng(3).standard_normal((1, 8, 3, DIM)).astype(np.float16))
    causal = mx.arange(301)[None] <= mx.arange(298, 301)[:, None]
    given: tuple[tuple[str, Any], ...] = (
        ("reference", "causal"), ("matrix", "causal"), ("kernel", "causal"), ("auto", causal), ("mlx", "causal"),
    )  # fmt: skip
    outs = [np.array(attend(one._view(), q, scale=0.125, mask=m, tier=t)).astype(np.float32) for t, m in given]
    for (tier, _), out in zip(given, outs, strict=True):
        assert np.linalg.norm(out - outs[0]) < 2e-3 * np.linalg.norm(outs[0]), tier
    assert np.array_equal(outs[2], outs[3]) and not np.array_equal(outs[1], outs[2])
    report = one.report()
    assert report.attention.startswith(
        f"matrix (simulator): attend_matrix_{'_'.join(names)}_float16; masks that are arrays by the kernel"
    )
    said = [line for line in report.operations if any(f"device: {form} (" in line for form in FORMS)]
    assert len(said) == 2 and all(packer in line for line in said)
    with pytest.raises(UnsupportedShapeError, match="masks that are arrays are not for tensor cores"):
        one.attend(q, scale=0.125, mask=causal)


AMONG = [
    Variant("turboquant_mse:bits=2", "turboquant_mse:bits=2", 64, 64, "float16"),
    Variant("turboquant_mse:bits=4", "turboquant_mse:bits=2", 192, 128, "float16"),
    Variant("turboquant_rvq:bits=2+2", "turboquant_rvq:bits=2+2", 64, 64, "float16"),
    Variant("turboquant_rvq:bits=1+1,stage2=fitted", "turboquant_rvq:bits=2+2,rotation=haar", 128, 96, "float16"),
]


def test_random_caches() -> None:
    """Shapes, query ratios, causal masks, rows of unequal length, first tokens, sinks, widths that differ."""
    cases = list(configurations(31, 24, AMONG, longest=300, matrix=True))
    errors = [error(case, "matrix", "simulator") for case in cases]
    assert max(errors) <= BOUND["float16"], cases[int(np.argmax(errors))]


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [({"method": "turboquant_mse:bits=3"}, "float16", "codes of 3 bits"),
     ({"method": "turboquant_rvq:bits=3+3"}, "float16", "codes of 3+3 bits have 64 sums, more than the 16"),
     ({"method": "turboquant_rvq:bits=2+2"}, "bfloat16", "scales are float32"),
     ({"method": "turboquant_mse:bits=2,mean=first"}, "float16", "mean=first: products on tensor cores"),
     ({"kernels": "off"}, "float16", "kernels='off'"), ({}, "bfloat16", "scales are float32"),
     ({"method": None, "keys": "turboquant_mse:bits=2", "values": "kivi:bits=3"}, "float16", "the other side has none"),
    ],
)  # fmt: skip
def test_the_reason_stands_in_the_report(changes: dict[str, Any], dtype: str, said: str) -> None:
    ours, theirs = twins([150], dtype=getattr(mx, dtype), **changes)
    assert held(ours) == ["", ""]
    lines = [line for line in ours.report().operations if ".device: canonical order" in line]
    assert len(lines) == 2 and any(said in line for line in lines), lines
    assert_alike(ours, theirs)


LAUNCHES = {
    "hadamard": ["sign_hadamard", "attend_matrix", "attend_merge_turned"],
    "haar": ["attend_matrix", "attend_merge_apart"],
}


@pytest.mark.parametrize("method", ["turboquant_mse:bits=4", "turboquant_rvq:bits=1+1"])
@pytest.mark.parametrize("rotation", LAUNCHES)
def test_launches_of_a_step(method: str, rotation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three where the rotation is one of signs, and nothing beside them; the plain functions where it is not."""
    one = cache(method=f"{method},rotation={rotation}", attention="matrix")
    one.update_and_fetch(*tokens(140))
    q = mx.array(np.random.default_rng(3).standard_normal((1, 4, 1, DIM)).astype(np.float16))
    want = attend(one._view(), q, scale=0.125, tier="reference")
    plain = one.attend(q, scale=0.125)  # tried out, and what is compiled is compiled
    names: list[str] = []
    run = Simulated.run

    def watched(self: Simulated, kernel: Kernel, *given: Any) -> Any:
        names.append(kernel.name)
        return run(self, kernel, *given)

    monkeypatch.setattr(Simulated, "run", watched)
    assert one._history is not None
    state = one._history.bound["values"].state
    monkeypatch.setattr(type(state), "finish", None if rotation == "hadamard" else type(state).finish)
    out = one.attend(q, scale=0.125)
    assert [name for name in names if not name.startswith(tuple(LAUNCHES[rotation]))] == []
    assert len(names) == len(LAUNCHES[rotation]) and out.dtype == mx.float16
    a, b = np.array(out).astype(np.float32), np.array(want).astype(np.float32)
    assert same_bits(out, plain) and np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_signs_of_another_rotation_are_seen(side: Side, device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch would turn queries as the keys are not: told when the side is bound, by the snippet's name."""
    ctx = PrepareContext(side, 2, DIM, DIM, "float16", seed=77 + device)  # bound nowhere else
    signs = MseState.signs.fget
    if device:
        bind("turboquant_mse:bits=2", ctx, kernels="simulator")
    monkeypatch.setattr(MseState, "signs", property(lambda state: signs(state)[::-1]))
    name = f"m16n8k16, snippet 'turboquant_mse_device_{side}'" if device else "snippet 'turboquant_mse'"
    with pytest.raises(PluginError, match=f"{name}: its (prepare|finish) is not the sign-Hadamard rotation"):
        bind("turboquant_mse:bits=2", ctx, kernels="simulator", device=device)
