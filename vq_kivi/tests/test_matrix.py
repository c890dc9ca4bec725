"""KIVI on tensor cores: the device form, and the pass over it in the simulator against float32 attention."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import SIDES, Side
from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels import Kernel, nvrtc
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.skeleton.matrix import MatrixPlan, matrix_pass
from vq_core.kernels.verify import build_ahead, same_bits, verify
from vq_kivi import method
from vq_kivi.kernels import device, matrix
from vq_kivi.kernels.matrix_cases import cases, kernel_of, passes, states
from vq_kivi.kernels.reference import state_of

BOUND = 2e-3
DIMS = (32, 64, 96, 128, 160, 192, 256)


def packed_rows(state: method.KiviState, tokens: int, dtype: str = "float16") -> dict[str, mx.array]:
    x = np.random.default_rng(tokens + state.head_dim).standard_normal((2, 3, tokens, state.head_dim)) * 3
    x[:, :, 5, :7] = np.nan
    return dict(
        method.vq_pack(state, method.vq_encode(state, mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))))
    )


# ---- the device form


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bits", device.BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_the_device_form_is_exact_both_ways(side: Side, bits: int, dim: int) -> None:
    state = state_of(side, bits, 32, dim, "float16")
    layout = device.layout(state)
    for tokens in (32, 128, 160):
        rows = packed_rows(state, tokens)
        held = device.to_device(state, rows)
        for field in layout.paged:
            shape = (2, 3, layout.units(field, tokens), *field.shape[1:])
            assert held[field.name].shape == shape and held[field.name].dtype == rows[field.name].dtype
        assert sum(a.nbytes for a in held.values()) == sum(a.nbytes for a in rows.values())
        back = device.from_device(state, held)
        assert all(same_bits(back[name], rows[name]) for name in rows)
        # A block is a piece of its own: what is made of many is what is made of each.
        for at in range(0, tokens, 32):
            one = device.from_device(state, {name: a[:, :, at // 32 : at // 32 + 1] for name, a in held.items()})
            again = device.to_device(state, one)
            assert all(same_bits(again[n], held[n][:, :, at // 32 : at // 32 + 1]) for n in held)


@pytest.mark.parametrize("side", SIDES)
def test_a_code_lies_where_the_text_says(side: Side) -> None:
    """One code after another, found at the place that the module's docstring names."""
    bits, dim = 2, 128
    state = state_of(side, bits, 32, dim, "float16")
    rng = np.random.default_rng(0)
    for _ in range(40):
        token, channel = int(rng.integers(32)), int(rng.integers(dim))
        codes = np.zeros((1, 1, dim, 32) if side == "keys" else (1, 1, 32, dim), np.uint32)
        codes[(0, 0, channel, token) if side == "keys" else (0, 0, token, channel)] = 3
        rows = {"codes": method.pack_bits(mx.array(codes), bits)} | {
            name: mx.zeros((1, 1, dim, 1) if side == "keys" else (1, 1, 32, dim // 32), mx.float16)
            for name in ("scale", "zero")
        }
        words = np.array(device.to_device(state, rows)["codes"]).reshape(2, 8, 4, 2, 2)
        i, a, rest = token // 16, token // 8 % 2, token % 8
        chunk, inner = divmod(channel, 64)
        if side == "keys":
            place, t, b, g = inner // 8, inner % 8 // 2, inner % 2, rest
        else:
            place, g, t, b = inner // 8, inner % 8, rest // 2, rest % 2
        wanted = np.zeros_like(words)
        wanted[chunk, g, t, i, a] = 3 << (bits * place + 16 * b)
        assert np.array_equal(words, wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"bits": 3}, "codes of 3 bits"), ({"group_size": 64}, "groups of 64"), ({"head_dim": 80}, "head size 80"),
     ({"metadata": "float32"}, "are float32")],
)  # fmt: skip
def test_what_does_not_fit_is_declined_with_its_reason(changes: dict[str, Any], said: str) -> None:
    state = state_of("keys", 2, 32, 64, "float16")
    assert device.declines(state) == ""
    assert said in device.declines(attrs.evolve(state, **changes))
    with pytest.raises(UnsupportedShapeError, match=said):
        matrix.snippet(attrs.evolve(state, **changes))


# ---- the pass


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    build_ahead(passes())


def error_of(kernel: Kernel, case: Any, seed: int = 0) -> float:
    got = kernel.run_on(Simulated(seed), *case.inputs, **case.parameters)
    out = np.array(kernel.compared(*got)[0]) if kernel.compared else None
    want = np.array(kernel.equals(*case.inputs, **case.parameters)[0])
    assert out is not None and np.array_equal(np.isnan(out), np.isnan(want)), case.name
    there = ~np.isnan(want)
    return float(np.linalg.norm((out - want)[there]) / max(float(np.linalg.norm(want[there])), 1e-30))


@pytest.mark.parametrize("kernel", passes(), ids=lambda kernel: kernel.name)
def test_the_pass_is_float32_attention_within_its_bound(kernel: Kernel) -> None:
    errors = {case.name: error_of(kernel, case, seed) for seed, case in enumerate(kernel.cases())}
    assert len(errors) >= 16 and max(errors.values()) <= BOUND, sorted(errors.items(), key=lambda one: -one[1])[:3]
    assert sorted(errors.values())[len(errors) // 2] > 1e-5  # it is not the reference that was measured


def test_repeated_runs_and_orders_of_splits_agree() -> None:
    """Bit for bit: a split has one writer, and nothing depends on the order of warps."""
    kernel = passes()[0]
    for case in list(kernel.cases())[:4]:
        runs = [kernel.run_on(Simulated(0), *case.inputs, **case.parameters) for _ in range(2)]
        assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("laid", [MatrixPlan(1, 4, 3), MatrixPlan(2, 2, 3), MatrixPlan(2, 8, 2), MatrixPlan(1, 1, 4)])
def test_every_plan_gives_the_same(laid: MatrixPlan) -> None:
    kernel = kernel_of(2, 2, 64, 64, laid)
    for case in list(cases(2, 2, 64, 64, 4, seed=3)):
        if case.inputs[0].dtype == mx.float16:
            assert error_of(kernel, case) <= BOUND, case.name


def test_another_row_s_nan_stays_there() -> None:
    kernel = passes()[0]
    case = next(c for c in kernel.cases() if c.inputs[0].shape[0] == 3 and c.parameters["regular"])
    plain = kernel.run_on(Simulated(0), *case.inputs, **case.parameters)
    inputs = list(case.inputs)
    for i in (3, 6, 7):  # scale of the keys, scale and zero of the values
        broken = np.array(inputs[i])
        broken[1::3] = np.nan if i != 6 else np.inf
        inputs[i] = mx.array(broken)
    got = kernel.run_on(Simulated(0), *inputs, **case.parameters)
    for a, b in zip(plain, got, strict=True):
        assert same_bits(a[0::2], b[0::2])
    assert not np.isfinite(np.array(got[0][1])).all()


def test_queries_of_all_sizes_are_read_alike() -> None:
    """Halves have a narrow range; a power of two is taken out of each query row, and put back."""
    kernel = passes()[0]
    case = next(c for c in kernel.cases() if c.inputs[0].dtype == mx.bfloat16)
    want = kernel.equals(*case.inputs, **case.parameters)[0]
    for power in (-60, -20, 20, 60):
        inputs = (case.inputs[0] * 2.0**power, *case.inputs[1:])
        bits = case.parameters["scale_bits"] - power * 2**23
        got = kernel.run_on(Simulated(0), *inputs, **case.parameters | {"scale_bits": bits})
        out = np.array(kernel.compared(*got)[0])  # type: ignore[misc]
        there = ~np.isnan(np.array(want))
        assert np.linalg.norm((out - np.array(want))[there]) <= BOUND * np.linalg.norm(np.array(want)[there])


BREAKS = [
    ("vq_copy_wait<int(2u) - 1>();", "vq_copy_wait<int(2u)>();"),
    ("  matrix_values(mine, lane, p, acc, extra);\n  simdgroup_barrier(mem_flags::mem_threadgroup);",
     "  matrix_values(mine, lane, p, acc, extra);"),
    ("vq_copy_wait<int(2u) - 1>();\n  simdgroup_barrier(mem_flags::mem_threadgroup);",
     "vq_copy_wait<int(2u) - 1>();"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);\nVQ_SHARED_PTR(float) mixed", "VQ_SHARED_PTR(float) mixed"),
    ("a1 = kivi_k_pair(high, j);", "a1 = kivi_k_pair(low, j + 1u);"),
    ("a0 = kivi_v_pair(low, j), a1 = kivi_v_pair(low, j + 1u)",
     "a1 = kivi_v_pair(low, j), a0 = kivi_v_pair(low, j + 1u)"),
    ("kivi_k_mma(c1, w.z, w.w, j, b0, b1)", "kivi_k_mma(c1, w.w, w.z, j, b0, b1)"),
    ("4u * x + 1u], s.y)", "4u * x + 1u], s.x)"),
    ("(kivi_k_place(pair % 8u) << 10)", "0u"),
    ("float(1u << kivi_k_place(pair % 8u))", "1.0f"),
    ("fma(acc[n].z, next", "fma(acc[n].z, by"),
    ("p[2u * i + 1u] = vq_transpose_8x8(vq_half_pair(w2, w3))", "p[2u * i + 1u] = vq_half_pair(w2, w3)"),
    ("two >= end0", "two >= packed"),
    ("const int end0 = min(packed, ", "const int end0 = min(packed + 32, "),
    ("one < hidden ||", "false ||"),
    ("acc[i].y * less1", "acc[i].y * less0"),
    ("simd_shuffle(back, 8u * t + 4u)", "simd_shuffle(back, 8u * t)"),
    ("share * float(marks[w * 16u + 8u + n])", "float(marks[w * 16u + 8u + n])"),
    ("regular != 0u ? v_deep * rows_all + b", "true ? v_deep * rows_all + b"),
    ("lane < 4u ? 0x3c003c00u : 0u", "lane < 3u ? 0x3c003c00u : 0u"),
]  # fmt: skip
HALVES = [  # of one dtype: one variant of each broken text to compile
    attrs.evolve(case, inputs=(case.inputs[0].astype(mx.float16), *case.inputs[1:])) for case in cases(2, 2, 64, 64)
]
SMALL = attrs.evolve(kernel_of(2, 2, 64, 64), cases=lambda: HALVES)


def broken(old: str, new: str) -> Kernel:
    text = SMALL.header + SMALL.body
    assert old in text, old
    return attrs.evolve(SMALL, header=SMALL.header.replace(old, new), body=SMALL.body.replace(old, new))


MADE = [broken(*item) for item in BREAKS]


@pytest.fixture(scope="module")
def _broken_together() -> None:
    build_ahead([SMALL, *MADE])


@pytest.mark.usefixtures("_broken_together")
@pytest.mark.parametrize("kernel", MADE, ids=[old.split("\n")[0] for old, _ in BREAKS])
def test_a_broken_text_is_seen(kernel: Kernel) -> None:
    verdict = verify("kivi", kernel, "simulator", Simulated(1))
    assert not verdict.passed, verdict


@pytest.mark.usefixtures("_broken_together")
def test_the_unbroken_text_passes() -> None:
    verdict = verify("kivi", SMALL, "simulator", Simulated(1))
    assert verdict.passed and verdict.configurations == 16, verdict


def test_the_text_is_one_for_all_lengths() -> None:
    assert grows(passes()[0]) == ""


# ---- refused


def test_a_call_that_does_not_fit_is_told() -> None:
    kernel = passes()[0]
    case = next(iter(kernel.cases()))
    q, rows, *rest = case.inputs
    given = dict(case.parameters)
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ((q[..., :64], rows, *rest), {}, "must be .B, H_q, L, 128"),
        ((mx.zeros((1, 8, 17, 128), mx.float16), rows, *rest), {}, "17 queries a row: at most 16"),
        ((mx.zeros((1, 3, 1, 128), mx.float16), rows, *rest), {}, "3 query heads are no multiple of the 2"),
        ((q, rows[:, :4], *rest), {}, "rows .* must be"),
        ((q, rows, rest[0][:, :, :2], *rest[1:]), {}, "k_codes .* must be"),
        ((q, rows, *rest[:4], rest[4][:, :, :, :64], *rest[5:]), {}, "v_scale .* must be"),
        ((q, rows, *rest[:6], rest[6].reshape(-1), rest[7]), {}, "k_table .* must be"),
        (case.inputs, {"exact_splits": given["splits"]}, "at least one more is needed"),
        (case.inputs, {"scale_bits": 0x80000000}, "the scale must be above 0 and finite"),
        ((q.astype(mx.float32), rows, *rest), {}, "float32 is not accepted|Q 'float32' is not accepted"),
    ]
    for inputs, changes, said in bad:
        with pytest.raises(UnsupportedShapeError, match=said):
            kernel(*inputs, **given | changes, backend="simulator")


def test_a_snippet_that_does_not_fit_is_told() -> None:
    keys, values = (matrix.snippet(state) for state in states(2, 2, 64, 64))
    with pytest.raises(PluginError, match="are not of keys and of values"):
        matrix_pass(values, keys, cases=lambda: [], equals=lambda: ())
    for changes, said in (
        ({"name": "a b"}, "letters, digits"), ({"head_dim": 80}, "head size 80: accepted are 64"),
        ({"page": 96}, "pages of 96 tokens"), ({"scale": 0.0}, "scale 0.0 is out of range"),
    ):  # fmt: skip
        with pytest.raises(PluginError, match=said):
            attrs.evolve(keys, **changes)


@pytest.mark.skipif(not nvrtc.installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
@pytest.mark.parametrize("kernel", passes(), ids=lambda kernel: kernel.name)
def test_it_compiles_for_cuda(kernel: Kernel) -> None:
    for dtype in ("float16", "bfloat16"):
        assert nvrtc.compile_for_cuda(kernel, {"Q": dtype})[:4] == b"\x7fELF"
