"""The pass kernels of fused attention against what the methods' hooks say, split by split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api.facts import SIDES, PrepareContext
from vq_core.attention.verifying import SHAPES, Shape, installed, pass_kernel
from vq_core.attention.verifying.decoding import decoding_kernels
from vq_core.attention.verifying.installed import passes
from vq_core.attention.verifying.matrix import matrix_kernel
from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels import Kernel
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import build_ahead, verify
from vq_core.plugins import binding, partner
from vq_core.plugins.offered import offered_kernels
from vq_core.plugins.registry import resolve
from vq_core.testing import load_plugin, registered

METHODS = Path(__file__).parent / "methods"
FOUR = tuple(SHAPES[i] for i in (2, 6, 7, 8))
"""Shapes of one variant, four rows at once: look-up and additive mask, causal, hidden tokens, a masked split."""
CHOSEN = {
    "kivi:bits=3": (80, "bfloat16", (SHAPES[0], SHAPES[1], SHAPES[3], *FOUR)),
    "example": (64, "float16", (*FOUR, SHAPES[5])),
    "centred": (64, "float32", FOUR),
    "sign_sketch": (128, "float16", FOUR[:3]),
    "picky": (64, "bfloat16", FOUR[:3]),
}


def bound(text: str, side: Any, dim: int, dtype: str) -> Any:
    ctx = PrepareContext(side, kv_heads=2, key_dim=dim, value_dim=dim, dtype=dtype)
    sides = resolve(text.partition(":")[0]).facts.sides  # type: ignore[union-attr]
    return binding.bind(text, ctx, kernels="off") if side in sides else partner.bound(ctx)


def made(text: str, dim: int, dtype: str, shapes: Any = None, **options: Any) -> Kernel:
    return pass_kernel(*(bound(text, side, dim, dtype) for side in ("keys", "values")), shapes, **options)


@pytest.fixture(scope="module")
def kernels() -> Any:
    """One of each method, compiled in one unit: tiles with units, look-ups, a mean, a sketch, tiles of values."""
    plugins = [load_plugin(METHODS / f"{name}.py") for name in ("centred", "sign_sketch", "picky")]
    with registered(plugins[0]), registered(plugins[1]), registered(plugins[2]):
        found = {text: made(text, *rest) for text, rest in CHOSEN.items()}
        build_ahead(found.values())
        yield found


@pytest.mark.parametrize("text", CHOSEN)
def test_each_split_is_what_the_hooks_say(kernels: Any, text: str) -> None:
    for seed in (0, 1):
        verdict = verify(text, kernels[text], "simulator", Simulated(seed))
        assert verdict.passed and verdict.configurations == len(CHOSEN[text][2]), verdict


def test_contraction_of_multiply_and_add_stays_within_the_tolerance(kernels: Any) -> None:
    one = kernels["sign_sketch"]
    build_ahead([one], "fast")
    verdict = verify("sign_sketch", one, "simulator", Simulated(1, "fast"))
    assert verdict.passed, verdict


def test_the_tolerance_is_what_is_needed(kernels: Any) -> None:
    """A last place of float32 by the hundred: a wrong token, or one in the wrong split, is hundreds of times more."""
    worst = max(verify(text, kernel, "simulator", Simulated()).max_difference for text, kernel in kernels.items())
    assert 1e-7 < worst < 5e-6 and all(kernel.tolerance == 1e-5 for kernel in kernels.values())


BROKEN = {
    "the first unit": ("begin = (split - exact_splits) * 4u + sg", "begin = (split - exact_splits) * 4u + sg + 1u"),
    "other splits": ("begin = (split - exact_splits) * 4u + sg", "begin = (splits - 1u - split) * 4u + sg"),
    "natural logarithms": ("added * 1.4426950408889634f", "added"),
    "causal off by one": ("place <= last[m]", "place < last[m]"),
    "hidden tokens": ("pad - hidden + first", "pad + first"),
    "the table": ("k_table[b * uint(k_table_shape[1]) + k_depth]", "k_table[k_depth]"),
    "the rest of a page": ("i < left ? exp2(f[i * M + m] - next) : 0.0f", "exp2(f[i * M + m] - next)"),
    "the old maximum": ("sum[m] * shrink + added", "sum[m] + added"),
}


def test_broken_it_differs() -> None:
    """Each in one way; compiled in one unit."""
    whole = made("kivi:bits=2", 64, "float16", [attrs.evolve(s, repeats=1, queries=1) for s in FOUR])
    changed = {}
    for name, (old, new) in BROKEN.items():
        assert old in whole.body, name
        changed[name] = attrs.evolve(whole, name=f"broken{len(changed)}", body=whole.body.replace(old, new))
    build_ahead(changed.values())
    for name, kernel in changed.items():
        verdict = verify("kivi", kernel, "simulator", Simulated())
        assert not verdict.passed and (verdict.error or verdict.differing), f"{name}: {verdict}"


def test_the_cases_hold_what_they_are_for() -> None:
    kernel = made("kivi:bits=2", 128, "bfloat16")
    kinds: set[str] = set()
    for case in kernel.cases():
        a = dict(zip(kernel.inputs, case.inputs, strict=True))
        rows = np.array(a["rows"])
        kinds |= {f"M={case.parameters['M']}", f"splits of exact tokens: {case.parameters['exact_splits']}"}
        kinds |= {name for name, column in (("first", 1), ("padding", 3), ("hidden", 4)) if rows[:, column].any()}
        kinds |= {"ragged page"} if (rows[:, 0] % 128).any() else set()
        kinds |= {"no packed tokens"} if not rows[:, 0].all() else set()
        kinds |= {"float32 queries"} if a["q"].dtype == mx.float32 else set()
        if not case.parameters["regular"]:
            table = np.array(a["k_table"])
            kinds |= {"tables that differ"} if not np.array_equal(table, np.array(a["v_table"])) else set()
            kinds |= {"page out of order"} if (np.diff(table[0, : -(-rows[0, 0] // 128)]) < 0).any() else set()
        kinds |= {name for name in ("k_scale", "exact_k", "sink_k") if mx.isnan(a[name]).any()}
        kinds |= {"causal"} if case.parameters["causal"] else set()
        kinds |= {f"mask {a['mask'].shape[1] > 1}"} if case.parameters["masked"] else set()
    assert kinds == {
        *(f"M={m}" for m in (1, 2, 3, 4)), *(f"splits of exact tokens: {n}" for n in (0, 1, 2)), "first", "padding",
        "hidden", "ragged page", "no packed tokens", "float32 queries", "tables that differ", "page out of order",
        "k_scale", "exact_k", "sink_k", "causal", "mask True", "mask False",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["kivi:bits=2", "example"])
def test_its_text_does_not_grow(text: str) -> None:
    assert grows(made(text, 64, "float16")) == ""


def test_a_field_that_has_widened_is_another_kernel() -> None:
    narrow, wide = (made("kivi:bits=2", 128, "bfloat16", FOUR[:1], wide=w) for w in (False, True))
    assert narrow.name.endswith("u32hhu32hh") and wide.name.endswith("u32ffu32ff")
    assert verify("kivi", wide, "simulator", Simulated()).passed


# ---- on tensor cores, and for long queries


def in_form(text: str, dim: int, dtype: str) -> Kernel:
    contexts = [PrepareContext(side, kv_heads=2, key_dim=dim, value_dim=dim, dtype=dtype) for side in SIDES]
    return matrix_kernel(*(binding.bind(text, ctx, kernels="simulator", device=True) for ctx in contexts))


@pytest.mark.parametrize(("text", "dim", "dtype"), [("kivi:bits=2", 128, "float16"), ("kivi:bits=4", 96, "bfloat16")])
def test_the_pass_on_tensor_cores(text: str, dim: int, dtype: str) -> None:
    verdict = verify("kivi", in_form(text, dim, dtype), "simulator", Simulated(3))
    assert verdict.passed and verdict.configurations == 17 and verdict.max_difference < 2e-3, verdict


MATRIX_BROKEN = {
    "what lies past the last token": ("if (step * STEP + STEP > uint(packed))", "if (false)"),
    "the exact tokens' splits": ("turn * 4u + warp; n", "turn * 4u + warp + 1u; n"),
    "first tokens": ("old ? sink_k : exact_k", "old ? exact_k : exact_k"),
    "pairs of tokens": ("matrix_highs(r[o],", "matrix_lows(r[o],"),
    "where new tokens begin": ("token < edge ?", "token <= edge ?"),
    "the next window": ("grown_k)[((to + token)", "grown_k)[((to + (token ^ 1u))"),
    "who takes fewer steps": ("part < exact_splits ? cut : 0u", "part < exact_splits ? cut + 1u : 0u"),
}


def test_a_broken_pass_on_tensor_cores_differs() -> None:
    whole = in_form("kivi:bits=2", 64, "float16")
    step = "step * 64u + 64u > uint(packed)"
    for name, (old, new) in MATRIX_BROKEN.items():
        old = f"if ({step})" if new == "if (false)" else old
        assert old in whole.body, name
        broken = attrs.evolve(whole, name=f"broken_matrix_{len(name)}", body=whole.body.replace(old, new))
        verdict = verify("kivi", broken, "simulator", Simulated())
        assert not verdict.passed and (verdict.error or verdict.differing), f"{name}: {verdict}"


@pytest.mark.parametrize(("text", "dim", "dtype"), [("kivi:bits=3", 80, "bfloat16"), ("centred", 64, "float16")])
def test_decoding_is_that_of_the_hooks_bit_for_bit(text: str, dim: int, dtype: str) -> None:
    with registered(load_plugin(METHODS / "centred.py")):
        for kernel in decoding_kernels(*(bound(text, side, dim, dtype) for side in SIDES)):
            verdict = verify(text, kernel, "simulator", Simulated(1))
            assert verdict.identical and verdict.configurations == 5, verdict


# ---- which are run


def test_every_bit_width_head_size_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    found, refused = passes(resolve("kivi"))
    names = [kernel.name for kernel in found]
    assert refused == [] and len(set(names)) == len(names)
    kinds = [sum(name.startswith(start) for name in names) for start in ("attend_kivi_", "gather_", "attend_matrix_")]
    assert kinds == [4 * (3 * 3 + 1), 4 * 2, 3 * 4] and sum(kinds) == len(names)
    for bits in (2, 3, 4, 8):
        for dim in (64, 80, 128):
            assert {name[len(start)] for name in names if name.startswith(
                start := f"attend_kivi_keys_{bits}_32_kivi_values_{bits}_32_{dim}_{dim}_"
            )} == {"h", "b", "f"}  # fmt: skip
    assert [kernel.name for kernel in passes(resolve("kivi"), only_one=True)[0]] == [
        "attend_kivi_keys_2_32_kivi_values_2_32_128_128_h_u32hhu32hh"
    ]
    (one,) = [o for o in offered_kernels("kivi", one_pass=True)[0] if o.kernel.name.startswith("attend_")]
    assert one.version.startswith("vq-kivi ")


def test_a_one_sided_method_is_run_with_the_partner_and_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = load_plugin(METHODS / "picky.py")
    monkeypatch.setattr(installed, "DTYPES", ("float16",))
    with registered(plugin) as record:
        found, refused = passes(record)
    assert [kernel.name for kernel in found if kernel.stands_for == "attend"] == [
        f"attend_kit_exact_2_8_{dim}_picky_{dim}_{dim}_h_hh" for dim in (128, 64)
    ]
    (line,) = refused
    assert line == "in-test:picky, head size 80: picky: head size 80; accepted are 64 and 128"


def test_what_has_no_reference_is_refused() -> None:
    sides = [bound("example", side, 64, "float16") for side in ("keys", "values")]
    with pytest.raises(UnsupportedShapeError, match="example has no snippet for its values"):
        pass_kernel(sides[0], attrs.evolve(sides[1], snippet=None))
    with pytest.raises(UnsupportedShapeError, match="without vq_attend nothing says in which"):
        pass_kernel(sides[0], attrs.evolve(sides[1], attend=None))
    from vq_core.attention.choice import pair_of

    with pytest.raises(PluginError, match=r"verifying\.pass_kernel"):
        pair_of(*sides, mx.float16).run.equals()
    assert list(pair_of(*sides, mx.float16).run.cases()) == [] and Shape(1, 1, (1,)).splits == (1, 2)


def test_the_report_of_a_field_that_has_widened_names_its_kernel() -> None:
    """And asking for it makes nothing that is held."""
    cache = PackedKVCache(method="kivi:bits=2", kernels="simulator", residual=0)
    x = mx.full((1, 2, 64, 64), 1e6, mx.bfloat16)
    cache.update_and_fetch(x, x)
    held = cache.nbytes
    assert "_64_64_b_u32ffu32ff (matrix: " in cache.report().attention and cache.nbytes == held
