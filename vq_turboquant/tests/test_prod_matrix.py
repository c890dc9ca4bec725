"""turboquant_prod on tensor cores: the device form, the kernels that write it, the passes. Needs vq-kivi."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import SIDES, PrepareContext, Side
from vq_core.attention.packed import attend
from vq_core.attention.verifying.matrix import matrix_kernel
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.state import describe
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Case, Kernel, nvrtc
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.skeleton.matrix import matrix_pass, scale_bits
from vq_core.kernels.verify import build_ahead, same_bits, verify
from vq_core.plugins.binding import BoundSide, bind
from vq_turboquant import prod
from vq_turboquant.kernels import prod_device, prod_matrix, prod_pack

BOUND = 2e-3
"""Of relative L2, as for every method on tensor cores."""
NORMAL = 1e-3
"""The same for normal queries and keys, of which 1e-4 to 5e-4 is measured."""


def bound(text: str, side: Side = "keys", dim: int = 128, dtype: str = "float16", in_form: bool = False) -> BoundSide:
    method = text if text.startswith("kivi") else f"turboquant_prod:{text}"
    return bind(method, PrepareContext(side, 2, dim, dim, dtype), kernels="simulator", device=in_form)


def state_of(text: str, dim: int = 128, dtype: str = "float16") -> prod.State:
    found: prod.State = bound(text, dim=dim, dtype=dtype).state
    return found


# ---- the device form


@pytest.mark.parametrize("bits", [2, 3])
def test_the_device_form_is_exact_both_ways(bits: int) -> None:
    state, rng = state_of(f"bits={bits}"), np.random.default_rng(bits)
    layout = prod_device.layout(state)
    for tokens in (32, 160):
        rows = {
            "codes": mx.array(rng.integers(0, 2**32, (2, 3, tokens, 4 * (bits - 1)), np.uint32)),
            "sketch": mx.array(rng.integers(0, 2**32, (2, 3, tokens, 4), np.uint32)),
        }
        for name in ("scale", "gap"):
            numbers = rng.standard_normal((2, 3, tokens, 1)).astype(np.float16)
            numbers[:, :, 5], numbers[:, :, 9], numbers[:, :, 11] = np.nan, -np.inf, -0.0
            rows[name] = mx.array(numbers)
        held = prod_device.to_device(state, rows)
        assert list(held) == [field.name for field in layout.paged]
        for field in layout.paged:
            shape = (2, 3, layout.units(field, tokens), *field.shape[1:])
            assert held[field.name].shape == shape and held[field.name].dtype == rows[field.name].dtype
        back = prod_device.from_device(state, held)
        assert all(same_bits(back[name], rows[name]) for name in rows)
        # A block is a piece of its own: what is made of many is what is made of each.
        one = prod_device.from_device(state, {name: a[:, :, -1:] for name, a in held.items()})
        again = prod_device.to_device(state, one)
        assert all(same_bits(again[name], held[name][:, :, -1:]) for name in held)


@pytest.mark.parametrize("bits", [2, 3])
def test_a_code_and_a_sign_lie_where_the_text_says(bits: int) -> None:
    """One token's code and sign among zeros, found where the module's docstring says."""
    rng, state = np.random.default_rng(bits), state_of(f"bits={bits}")
    for _ in range(30):
        token, channel, sign, code = (int(rng.integers(n)) for n in (32, 128, 128, 2 ** (bits - 1)))
        codes, signs = np.zeros((1, 1, 32, 128), np.uint32), np.zeros((1, 1, 32, 128), np.uint32)
        codes[0, 0, token, channel], signs[0, 0, token, sign] = code, 1
        numbers = mx.array((np.arange(32) == token).astype(np.float16)[None, None, :, None])
        packed = {"codes": prod.pack_bits(mx.array(codes), bits - 1), "sketch": prod.pack_bits(mx.array(signs), 1)}
        held = prod_device.to_device(state, packed | {"scale": numbers, "gap": 2 * numbers})
        i, a, g = token // 16, token // 8 % 2, token % 8
        for name, place, value in (("sketch", sign, 1), ("codes", channel, code)):
            t, b = place % 8 // 2, place % 2
            if name == "codes" and bits == 3:
                wanted, j = np.zeros((2, 8, 4, 2, 2), np.uint32), place % 64 // 8
                wanted[place // 64, g, t, i, a] = value << (16 * (j // 4) + 2 * (j // 2 % 2) + 4 * (j % 2 + 2 * b))
            else:
                wanted = np.zeros((8, 4, 2, 2), np.uint32)
                wanted[g, t, i, a] = value << (place // 8 + 16 * b)
            assert np.array_equal(np.array(held[name]).reshape(wanted.shape), wanted), name
        assert np.array(held["scale"]).reshape(8, 2, 2)[g, i, a] == 1
        assert np.array(held["gap"]).reshape(8, 2, 2)[g, i, a] == 2


@pytest.mark.parametrize(
    ("text", "dim", "dtype", "said"),
    [("bits=4", 128, "float16", "codes of 3 bits"), ("bits=1", 128, "float16", "a sketch without codes"),
     ("bits=3", 64, "float16", "head size 64 is not 128"), ("bits=3", 128, "bfloat16", "scales are float32")],
)  # fmt: skip
def test_what_does_not_fit_is_declined_with_its_reason(text: str, dim: int, dtype: str, said: str) -> None:
    state = state_of(text, dim, dtype)
    assert said in prod.no_tiles(state) and prod.vq_layout(state).block == 1
    with pytest.raises(UnsupportedShapeError, match=said):
        prod_matrix.snippet(state)


def test_what_fits_packs_in_blocks() -> None:
    for text in ("bits=2", "bits=3,sketch=orthogonal,rotation=haar"):
        state = state_of(text)
        assert prod.no_tiles(state) == "" and prod.vq_layout(state).block == prod_device.layout(state).block == 32


# ---- the kernels that write it

by_kernel = pytest.mark.parametrize("kernel", prod_pack.KERNELS, ids=lambda kernel: kernel.name)


@by_kernel
def test_packing_is_the_hooks_and_the_order(kernel: Kernel) -> None:
    for contract in ("off", "fast"):
        verdict = verify("turboquant_prod", kernel, "simulator", Simulated(1, contract))  # type: ignore[arg-type]
        assert verdict.passed and verdict.identical and verdict.configurations >= 72, verdict
    assert grows(kernel) == ""


def test_what_packing_refuses() -> None:
    kernel = prod_pack.PACK["hadamard"]
    case = next(iter(kernel.cases()))
    x, signs, high, low, tables = case.inputs
    given = case.parameters | {"backend": "simulator"}
    for inputs, changes, said in (
        ((x[:, :, :31], signs, high, low, tables), {}, "n a multiple of 32"), ((*case.inputs,), {"rows": 7}, "rows=7"),
        ((x[..., :64], signs, high, low, tables), {}, r"must be \(B, H, n, 128\)"),
        ((*case.inputs,), {"bits": 3}, "bits 3"),
        ((x, signs[:, :64], high, low, tables), {}, "are not .rounds"),
        ((x, signs, high[:, :64], low, tables), {}, "sketching"), ((x, signs, high, low, tables[:48]), {}, "tables"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedShapeError, match=said):
            kernel(*inputs, **given | changes)


PACK_BREAKS = [
    ("lane / 4u * 64u + 8u * j", "lane / 4u * 32u + 8u * j"), ("2u * (j / 2u & 1u) + 4u", "(j / 2u & 1u) + 4u"),
    ("code << (j + 16u * b)", "code << (2u * j + b)"),
    ("place * 4u + (lane & 3u) * 4u + quarter", "place * 4u + (lane & 3u) + quarter"),
    ("quarter = row / 8u & 3u", "quarter = row / 16u & 3u"), ("* (128u * uint(bits))", "* 128u"),
    ("kept = lane == j / 32u ? word : kept", "kept = word"), ("(two & 1u) << j", "(two & 1u) << (j ^ 1u)"),
    ("simd_shuffle(kept, j / 4u)", "simd_shuffle(kept, j % 4u)"), ("gap[token] = M(sqrt", "gap[row] = M(sqrt"),
    ("scale[token] = M(step)", "scale[token] = M(root)"),
]  # fmt: skip


@by_kernel
def test_a_broken_packer_is_seen(kernel: Kernel) -> None:
    made, some = [], list(kernel.cases())[:14]
    for old, new in PACK_BREAKS:
        assert old in kernel.body, old
        made.append(attrs.evolve(kernel, body=kernel.body.replace(old, new), cases=lambda: some))
    build_ahead(made)
    for (old, _), broken in zip(PACK_BREAKS, made, strict=True):
        assert not verify("turboquant_prod", broken, "simulator", Simulated(0)).passed, old


# ---- the pass

PAIRS = (("bits=3", "kivi:bits=2", 128), ("bits=2,sketch=orthogonal,rotation=haar", "kivi:bits=4", 128))


@cache
def kernels() -> tuple[Kernel, ...]:
    made = []
    for key, value, dim in PAIRS:
        sides = [bound(text, side, dim, in_form=True) for side, text in zip(SIDES, (key, value), strict=True)]
        made.append(matrix_kernel(*sides))
    return tuple(made)


BREAKS = [  # of keys of 3 bits, of 2 bits
    (3, "0x80008000u", "0x80000000u"), (3, "^ 0xbc00bc00u", "^ 0xbc003c00u"), (3, "15u - j", "14u - (j & 14u)"),
    (3, "query[128u / 8u + j]", "query[j]"), (3, "0x33333333u", "0x11111111u"), (3, "0x2404u", "0x2414u"),
    (3, "prod_code_mma(c1, w.z, w.w", "prod_code_mma(c1, w.w, w.z"),
    (3, "prod_whole(c1, y1, s.y, g.y)", "prod_whole(c1, y1, s.y, g.x)"),
    (3, "fma(y.z, g.y, x.z", "fma(y.z, g.x, x.z"), (3, "s.y * fma(y.w", "s.x * fma(y.w"),
    (3, "[x * 32u + lane]", "[lane]"),
    (3, "(K_GAP_AT + u * K_GAP_WORDS))[lane / 4u]", "(K_GAP_AT + u * K_GAP_WORDS))[lane & 3u]"),
    (2, "c0 = prod_sign_mma(c0, w.x, w.y", "c0 = prod_sign_mma(c0, w.x, w.x"),
    (2, "query[j], query[j + 1u]", "query[j + 1u], query[j]"),
    (2, "K_CODES_AT + u * K_CODES_WORDS", "K_SKETCH_AT + u * K_SKETCH_WORDS"),
    (2, "y1 = prod_sign_mma(y1, v.z", "y1 = prod_sign_mma(y1, v.x"),
]  # fmt: skip


@cache
def alone(bits: int) -> Kernel:
    """The pass without exact tokens, on one cache: vectors of all sizes, zero ones among them."""
    B, H, n, D, R, L = 1, 2, 96, 128, 3, 2
    rng, sides = (
        np.random.default_rng(3),
        [bound(text, side, D, in_form=True) for side, text in zip(SIDES, (f"bits={bits}", "kivi:bits=2"), strict=True)],
    )
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


@cache
def broken() -> tuple[Kernel, ...]:
    """That pass with one thing wrong."""
    made = []
    for bits, old, new in BREAKS:
        whole = alone(bits)
        assert old in whole.header + whole.body, old
        made.append(attrs.evolve(whole, header=whole.header.replace(old, new), body=whole.body.replace(old, new)))
    return tuple(made)


@pytest.fixture(scope="module")
def _compiled_together() -> None:
    build_ahead([*kernels(), alone(2), alone(3), *broken()])


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
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[f"{bits} {old}" for bits, old, _ in BREAKS])
def test_a_broken_text_is_seen(number: int) -> None:
    assert not verify("turboquant_prod", broken()[number], "simulator", Simulated(1)).passed


@pytest.mark.usefixtures("_compiled_together")
@pytest.mark.parametrize("bits", [2, 3])
def test_the_unbroken_text_passes(bits: int) -> None:
    kernel = alone(bits)
    assert verify("turboquant_prod", kernel, "simulator", Simulated(1)).passed and grows(kernels()[0]) == ""
    assert error_of(kernel, next(iter(kernel.cases()))) <= BOUND


# ---- in caches


def twins(chunks: Sequence[int], **rest: Any) -> list[PackedKVCache]:
    """A cache in device form and one in canonical order, filled alike."""
    given: dict[str, Any] = {"method": None, "keys": "turboquant_prod:bits=3", "values": "kivi:bits=2"} | rest
    policy = LayerPolicy.make(**given | {"residual": 32, "kernels": "simulator"})
    made = [PackedKVCache.from_policy(policy, device_form=form) for form in (True, False)]
    for seed, n in enumerate(chunks):
        x = np.random.default_rng(seed + n).standard_normal((2, 1, 2, n, 128)).astype(np.float16)
        for one in made:
            one.update_and_fetch(mx.array(x[0]), mx.array(x[1]))
    return made


def held(one: PackedKVCache) -> list[str]:
    assert one._history is not None
    return [side.held.form.name if side.held else "" for side in one._history.bound.values()]


@pytest.mark.parametrize("keys", ["turboquant_prod:bits=3", "turboquant_prod:bits=2,rotation=haar"])
def test_filled_in_any_chunks_it_saves_the_same_bytes(keys: str) -> None:
    for chunks in ([200], [7, 90, 1, 1, 64]):
        ours, theirs = twins(chunks, keys=keys)
        assert held(ours) == ["turboquant_prod_m16n8k16", "kivi_m16n8k16"] and held(theirs) == ["", ""]
        (a, mine), (b, plain) = describe(ours), describe(theirs)
        assert a == b and list(mine) == list(plain) and all(same_bits(mine[n], plain[n]) for n in plain)
        assert all(same_bits(x, y) for x, y in zip(ours.decode(), theirs.decode(), strict=True))
        assert ours.nbytes == theirs.nbytes and ours.trim(50) == theirs.trim(50) == 50


def test_all_tiers_answer_alike_and_the_report_says_which() -> None:
    """On pages in device form: tensor cores, the portable kernels for masks that are arrays, plain operations."""
    one = twins([161], attention="matrix")[0]
    q = mx.array(np.random.default_rng(3).standard_normal((1, 8, 3, 128)).astype(np.float16))
    causal = mx.arange(161)[None] <= mx.arange(158, 161)[:, None]
    given: tuple[tuple[str, Any], ...] = (
        ("reference", "causal"), ("matrix", "causal"), ("kernel", "causal"), ("auto", causal), ("mlx", "causal"),
    )  # fmt: skip
    outs = [np.array(attend(one._view(), q, scale=0.088, mask=m, tier=t)).astype(np.float32) for t, m in given]
    for (tier, _), out in zip(given, outs, strict=True):
        assert np.linalg.norm(out - outs[0]) < 2e-3 * np.linalg.norm(outs[0]), tier
    assert np.array_equal(outs[2], outs[3]) and not np.array_equal(outs[1], outs[2])
    said = [line for line in one.report().operations if "turboquant_prod_m16n8k16 (" in line]
    assert one.report().attention.startswith("matrix (simulator): attend_matrix_turboquant_prod3_k128_kivi2_v128")
    assert len(said) == 1 and "turboquant_prod_device_hadamard" in said[0]


def test_the_reason_stands_in_the_report() -> None:
    ours, _ = twins([64], keys="turboquant_prod:bits=4")
    lines = [line for line in ours.report().operations if ".device: canonical order" in line]
    assert len(lines) == 2 and any("codes of 3 bits: tensor cores take" in line for line in lines), lines


@pytest.mark.skipif(not nvrtc.installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
@pytest.mark.parametrize("kernel", [*kernels(), *prod_pack.KERNELS], ids=lambda kernel: kernel.name)
def test_it_compiles_for_cuda(kernel: Kernel) -> None:
    given = {name: values[0] for name, values in kernel.parameters.items()}
    assert nvrtc.compile_for_cuda(kernel, given)[:4] == b"\x7fELF"
