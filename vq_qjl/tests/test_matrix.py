"""QJL on tensor cores: the device form, and the passes in the simulator against float32 attention. Needs vq-kivi."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import SIDES, PrepareContext, Side
from vq_core.attention.verifying.matrix import matrix_kernel
from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels import Case, Kernel, nvrtc
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.skeleton.matrix import matrix_pass, scale_bits
from vq_core.kernels.verify import build_ahead, same_bits, verify
from vq_core.plugins.binding import BoundSide, bind
from vq_qjl.kernels import device, matrix
from vq_qjl.kernels.device_pack import PACK
from vq_qjl.method import Qjl

BOUND = 2e-3
"""Of relative L2, as for every method on tensor cores."""
NORMAL = 1e-3
"""The same for normal queries and keys, of which 1e-4 to 5e-4 is measured."""


def bound(text: str, side: Side = "keys", dim: int = 128, dtype: str = "float16", in_form: bool = False) -> BoundSide:
    method = text if text.startswith("kivi") else f"qjl:{text}"
    return bind(method, PrepareContext(side, 2, dim, dim, dtype), kernels="simulator", device=in_form)


def state_of(text: str, dim: int = 128, dtype: str = "float16") -> Qjl:
    found: Qjl = bound(text, dim=dim, dtype=dtype).state
    return found


# ---- the device form


@pytest.mark.parametrize(("text", "dim"), [("bits=1", 128), ("bits=2", 128), ("bits=2", 64), ("sketch=256", 96)])
def test_the_device_form_is_exact_both_ways(text: str, dim: int) -> None:
    state, rng = state_of(text, dim), np.random.default_rng(dim)
    layout = device.layout(state)
    for tokens in (32, 160):
        words = rng.integers(0, 2**32, (2, 3, tokens, state.sketch.width // 32), np.uint32)
        weight = rng.standard_normal((2, 3, tokens, 1)).astype(np.float16)
        weight[:, :, 5], weight[:, :, 9], weight[:, :, 11] = np.nan, -np.inf, -0.0
        rows = {"signs": mx.array(words), "weight": mx.array(weight)}
        held = device.to_device(state, rows)
        for field in layout.paged:
            shape = (2, 3, layout.units(field, tokens), *field.shape[1:])
            assert held[field.name].shape == shape and held[field.name].dtype == rows[field.name].dtype
        back = device.from_device(state, held)
        assert all(same_bits(back[name], rows[name]) for name in rows)
        # A block is a piece of its own: what is made of many is what is made of each.
        one = device.from_device(state, {name: a[:, :, -1:] for name, a in held.items()})
        again = device.to_device(state, one)
        assert all(same_bits(again[name], held[name][:, :, -1:]) for name in held)


def test_a_sign_lies_where_the_text_says() -> None:
    """One token's sign among others, found where the module's docstring says."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        token, sign = int(rng.integers(32)), int(rng.integers(256))
        words, weight = np.zeros((1, 1, 32, 8), np.uint32), np.zeros((1, 1, 32, 1), np.float16)
        words[0, 0, token, sign // 32], weight[0, 0, token] = 1 << sign % 32, 1
        held = device.ordered(mx.array(words), mx.array(weight))
        i, a, g = token // 16, token // 8 % 2, token % 8
        x, j, t, b = sign // 128, sign % 128 // 8, sign % 8 // 2, sign % 2
        wanted = np.zeros((2, 8, 4, 2, 2), np.uint32)
        wanted[x, g, t, i, a] = 1 << (j + 16 * b)
        assert np.array_equal(np.array(held["signs"]).reshape(wanted.shape), wanted)
        assert np.array(held["weight"]).reshape(8, 2, 2)[g, i, a] == 1


@pytest.mark.parametrize(
    ("text", "dim", "dtype", "said"),
    [("bits=3", 128, "float16", "a sketch of 384 signs is none of 128, 256"),
     ("sketch=64", 128, "float16", "a sketch of 64 signs"), ("sketch=128", 80, "float16", "head size 80"),
     ("bits=2,outliers=8", 128, "float16", "a sketched query of its own"),
     ("bits=2", 128, "bfloat16", "norms are float32")],
)  # fmt: skip
def test_what_does_not_fit_is_declined_with_its_reason(text: str, dim: int, dtype: str, said: str) -> None:
    state = state_of(text, dim, dtype)
    assert said in device.declines(state)
    with pytest.raises(UnsupportedShapeError, match=said):
        matrix.snippet(state)


def test_the_packing_kernel_is_the_hooks_and_the_permutation() -> None:
    for contract in ("off", "fast"):
        verdict = verify("qjl", PACK, "simulator", Simulated(1, contract))  # type: ignore[arg-type]
        assert verdict.passed and verdict.identical and verdict.configurations >= 72, verdict


def test_what_the_packing_kernel_is_not_for_is_refused() -> None:
    x, columns = mx.zeros((1, 2, 64, 64), mx.float16), mx.zeros((64, 128))
    for arrays, said in (
        ((x[:, :, :33], columns), "blocks of 32 tokens"), ((x, columns[:63]), "D at most 512"),
        ((x, columns[:, :96]), "96 signs are no whole runs of 128"), ((x.astype(mx.float32), columns), "T 'float32'"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedShapeError, match=said):
            PACK(*arrays, backend="simulator")


PACK_BREAKS = [
    ("(8u * (j & 3u) + 2u * (lane & 3u))", "(8u * (j & 3u) + 2u * (lane / 4u & 3u))"), ("+ j / 4u]", "+ j % 4u]"),
    ("(16u + j)", "(15u + j)"), ("(first / 8u & 3u)] = word", "(first / 16u & 3u)] = word"),
    ("* (m / 128u) + threadgroup", "+ threadgroup"), ("(row & 7u) * 4u", "(row & 7u)"), ("two >> 1 & 1u", "two & 1u"),
    ("row / 32u * 32u", "row / 32u * 16u"), ("taken[lane * 4u + member]", "taken[lane + member * 8u]"),
    ("> 0.0f;  // false", ">= 0.0f;  // false"),
    ("= kept;\nthreadgroup_barrier(mem_flags::mem_threadgroup);", "= kept;"),
]  # fmt: skip


def test_a_broken_packing_is_seen() -> None:
    made, some = [], list(PACK.cases())[:16]
    for old, new in PACK_BREAKS:
        assert old in PACK.body, old
        made.append(attrs.evolve(PACK, body=PACK.body.replace(old, new), cases=lambda: some))
    build_ahead(made)
    for (old, _), broken in zip(PACK_BREAKS, made, strict=True):
        assert not verify("qjl", broken, "simulator", Simulated(0)).passed, old


# ---- the pass

PAIRS = (
    ("bits=2", "kivi:bits=2", 128), ("bits=2,projection=gaussian", "kivi:bits=4", 64),
    ("sketch=256", "kivi:bits=2", 96),
)  # fmt: skip


@cache
def kernels() -> tuple[Kernel, ...]:
    made = []
    for key, value, dim in PAIRS:
        sides = [bound(text, side, dim, in_form=True) for side, text in zip(SIDES, (key, value), strict=True)]
        made.append(matrix_kernel(*sides))
    return tuple(made)


BREAKS = [
    ("0x80008000u", "0x80000000u"), ("^ 0xbc00bc00u", "^ 0xbc003c00u"), ("15u - j", "14u - (j & 14u)"),
    ("qjl_mma(c1, w.z, w.w, j, b0, b1)", "qjl_mma(c1, w.w, w.z, j, b0, b1)"), ("c0.z * s0.y", "c0.z * s0.x"),
    ("[lane / 4u]", "[lane & 3u]"), ("a1 = qjl_pair(high, j), a2", "a2 = qjl_pair(high, j), a1"),
    ("[x * 32u + lane]", "[lane]"), ("query[x * 16u + j]", "query[j]"), ("c1.y * s1.x", "c1.y * s0.x"),
    ("(m - group * L)) * 256u + 2u * t", "(m - group * L)) * 128u + 2u * t"),
]  # fmt: skip


def alone() -> Kernel:
    """The pass without exact tokens, on one cache: 256 signs, vectors of all sizes, zero ones among them."""
    B, H, n, D, R, L = 1, 2, 96, 64, 3, 2
    rng, sides = np.random.default_rng(3), [bound(text, side, D, in_form=True) for text, side in ALONE]
    positions, fields, dense = mx.arange(128, dtype=mx.int32)[None], [], []
    for side in sides:
        x = rng.standard_normal((B, H, 128, D)) * np.exp(rng.standard_normal((B, H, 128, 1)))
        x[:, :, 7] = 0
        held = side.pack(mx.array(x.astype(np.float16)), positions, {})
        dense.append(np.array(side.decode(held, positions).astype(mx.float32), np.float64)[:, :, :n])
        fields += held.values()
    q = mx.array(rng.standard_normal((B, H * R, L, D)).astype(np.float32)).astype(mx.float16)
    scores = np.array(q.astype(mx.float32), np.float64).reshape(B, H, R * L, D) @ dense[0].swapaxes(-1, -2) * D**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = mx.array((weights @ dense[1] / weights.sum(axis=-1, keepdims=True)).astype(np.float32))
    keys, values = (side.held.matrix for side in sides if side.held is not None)
    prepared = keys.prepare(q.astype(mx.float32))
    inputs = (q, prepared, mx.array([[n, 0, L, 0, 0, 0, 0, 0]]), *fields, *[mx.array([[0]])] * 2)
    numbers = {"scale_bits": scale_bits(D**-0.5), "causal": 1, "splits": 2, "exact_splits": 0, "folded": 0}
    return matrix_pass(
        keys,
        values,
        cases=lambda: [Case(inputs, numbers | {"regular": 1}, "alone")],
        equals=lambda *given, **more: (want,),
    )


ALONE: tuple[tuple[str, Side], ...] = (("bits=4", "keys"), ("kivi:bits=2", "values"))


@cache
def broken() -> tuple[Kernel, ...]:
    """That pass with one thing wrong."""
    whole, made = alone(), []
    for old, new in BREAKS:
        assert old in whole.header + whole.body, old
        made.append(attrs.evolve(whole, header=whole.header.replace(old, new), body=whole.body.replace(old, new)))
    return tuple(made)


@pytest.fixture(scope="module")
def _compiled_together() -> None:
    build_ahead([*kernels(), alone(), *broken()])


def error_of(kernel: Kernel, case: Any, seed: int = 0) -> float:
    got = kernel.run_on(Simulated(seed), *case.inputs, **case.parameters)
    assert kernel.compared is not None
    out, want = (np.array(a[0]) for a in (kernel.compared(*got), kernel.equals(*case.inputs, **case.parameters)))
    assert np.array_equal(np.isnan(out), np.isnan(want)), case.name
    there = ~np.isnan(want)
    return float(np.linalg.norm((out - want)[there]) / max(float(np.linalg.norm(want[there])), 1e-30))


@pytest.mark.usefixtures("_compiled_together")
@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_the_pass_is_float32_attention_within_its_bound(kernel: Kernel) -> None:
    """Uneven and empty rows, tables, causal masks, first tokens, windows, hidden tokens, all ways to fold."""
    errors = {case.name: error_of(kernel, case, seed) for seed, case in enumerate(kernel.cases())}
    assert len(errors) >= 4 and max(errors.values()) <= NORMAL, errors
    assert sorted(errors.values())[len(errors) // 2] > 1e-5  # it is not the reference that was measured


@pytest.mark.usefixtures("_compiled_together")
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[old for old, _ in BREAKS])
def test_a_broken_text_is_seen(number: int) -> None:
    assert not verify("qjl", broken()[number], "simulator", Simulated(1)).passed


@pytest.mark.usefixtures("_compiled_together")
def test_the_unbroken_text_passes() -> None:
    kernel = alone()
    assert verify("qjl", kernel, "simulator", Simulated(1)).passed
    assert error_of(kernel, next(iter(kernel.cases()))) <= BOUND


@pytest.mark.usefixtures("_compiled_together")
def test_the_text_does_not_grow_and_is_told_what_it_is_not_for() -> None:
    kernel = kernels()[0]
    assert grows(kernel) == ""
    case = next(iter(kernel.cases()))
    inputs = (case.inputs[0], case.inputs[1][..., :128], *case.inputs[2:])
    with pytest.raises(UnsupportedShapeError, match=r"prepared \(1, 2, 1, 128\) must be \(1, 2, 1, 256\)"):
        kernel(*inputs, **case.parameters, backend="simulator")


def test_a_snippet_of_a_wrong_width_is_told() -> None:
    found = matrix.snippet(state_of("bits=2"))
    for changes, said in (
        ({"width": 264}, "width 264: accepted are multiples of 16 up to 256"), ({"width": 272}, "width 272"),
        ({"prepare": None}, "queries of 128 numbers need a prepare for keys of 256"),
        ({"constants": {"book": mx.zeros((8,))}}, "its constants must be arrays of uint32"),
        ({"constants": {"book": mx.zeros((6,), mx.uint32)}}, "multiples of 4 words"),
    ):  # fmt: skip
        with pytest.raises(PluginError, match=said):
            attrs.evolve(found, **changes)


@pytest.mark.skipif(not nvrtc.installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
@pytest.mark.parametrize("kernel", [*kernels(), PACK], ids=lambda kernel: kernel.name)
def test_it_compiles_for_cuda(kernel: Kernel) -> None:
    given = {name: values[0] for name, values in kernel.parameters.items()}
    assert nvrtc.compile_for_cuda(kernel, given)[:4] == b"\x7fELF"
