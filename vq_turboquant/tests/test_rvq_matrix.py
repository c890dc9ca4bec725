"""turboquant_rvq on tensor cores: the device form, the kernels that write it, and the passes in the simulator."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import SIDES, PrepareContext, Side
from vq_core.attention.verifying.matrix import matrix_kernel
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Case, Kernel, nvrtc
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.skeleton.matrix import HEAD_DIMS, matrix_pass, merged, scale_bits
from vq_core.kernels.verify import build_ahead, same_bits, verify
from vq_core.plugins.binding import BoundSide, bind
from vq_turboquant import rvq
from vq_turboquant.kernels import rvq_device, rvq_matrix, rvq_pack, tile_matrix, tile_order
from vq_turboquant.kernels.cases import FAMILIES

BOUND = 2e-3
"""Of relative L2, as for every method on tensor cores."""
NORMAL = 1e-3
"""The same for normal queries and keys."""


def bound(text: str, side: Side, dim: int = 128, dtype: str = "float16", device: bool = False) -> BoundSide:
    method = text if text.startswith(("kivi", "turboquant")) else f"turboquant_rvq:{text}"
    return bind(method, PrepareContext(side, 2, dim, dim, dtype), kernels="simulator", device=device)


def state_of(text: str, side: Side, dim: int = 128, dtype: str = "float16") -> rvq.State:
    found: rvq.State = bound(text, side, dim, dtype).state
    return found


# ---- the device form


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_device_form_is_exact_both_ways(side: Side, bits: int, dim: int) -> None:
    state, rng = state_of(f"bits={bits}+{bits}", side, dim), np.random.default_rng(dim)
    layout = rvq_device.layout(state)
    for tokens in (32, 160):
        streams = rng.integers(0, 2**32, (2, 2, 3, tokens, dim * bits // 32), np.uint32)
        scale = rng.standard_normal((2, 3, tokens, 1)).astype(np.float16)
        scale[:, :, 5], scale[:, :, 9], scale[:, :, 11] = np.nan, -np.inf, -0.0
        rows = {"codes": mx.array(streams[0]), "rest": mx.array(streams[1]), "scale": mx.array(scale)}
        held = rvq_device.to_device(state, rows)
        for field in layout.paged:
            shape = (2, 3, layout.units(field, tokens), *field.shape[1:])
            assert held[field.name].shape == shape and held[field.name].dtype == rows[field.name].dtype
        back = rvq_device.from_device(state, held)
        assert all(same_bits(back[name], rows[name]) for name in rows)
        one = rvq_device.from_device(state, {name: a[:, :, -1:] for name, a in held.items()})
        again = rvq_device.to_device(state, one)
        assert all(same_bits(again[name], held[name][:, :, -1:]) for name in held)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bits", [1, 2])
def test_two_codes_lie_as_one_of_both(side: Side, bits: int) -> None:
    """Words of the tokens 16 i + 0 to 7 in the one field, of the others in the other; zeros are zeros."""
    rng, state = np.random.default_rng(bits), state_of(f"bits={bits}+{bits}", side)
    codes = mx.array(rng.integers(0, 2**bits, (2, 1, 1, 32, 128), np.uint32))
    packed = {name: rvq.pack_bits(c, bits) for name, c in zip(("codes", "rest"), codes, strict=True)}
    held = rvq_device.to_device(state, packed | {"scale": mx.zeros((1, 1, 32, 1), mx.float16)})
    words, _ = tile_order.ordered(side, 2 * bits, codes[0] + codes[1] * 2**bits, mx.zeros((1, 1, 32, 1)))
    assert mx.array_equal(held["codes"], words[..., 0::2]) and mx.array_equal(held["rest"], words[..., 1::2])
    late = mx.arange(32)[:, None] // 8 % 2 == 1
    only = rvq_device.to_device(
        state,
        {name: mx.where(late, a, 0) for name, a in packed.items()} | {"scale": held["scale"].reshape(1, 1, 32, 1)},
    )
    assert not only["codes"].any().item() and mx.array_equal(only["rest"], held["rest"])


@pytest.mark.parametrize(
    ("text", "dim", "dtype", "said"),
    [("bits=3+3", 128, "float16", "codes of 3.3 bits have 64 sums"), ("bits=4+4", 128, "float16", "256 sums"),
     ("bits=2+2", 80, "float16", "head size 80"), ("bits=1+1", 128, "bfloat16", "scales are float32")],
)  # fmt: skip
def test_what_does_not_fit_is_declined_with_its_reason(text: str, dim: int, dtype: str, said: str) -> None:
    state = state_of(text, "keys", dim, dtype)
    with pytest.raises(UnsupportedShapeError, match=said):
        rvq_matrix.snippet(state)
    assert rvq.no_tiles(state) and rvq.vq_layout(state).block == 1


@pytest.mark.parametrize("text", ["bits=2+2", "bits=1+1,stage2=fitted,rotation=haar"])
def test_what_fits_packs_in_blocks(text: str) -> None:
    for side in SIDES:
        state = state_of(text, side)
        assert rvq.no_tiles(state) == "" and rvq.vq_layout(state).block == rvq_device.layout(state).block == 32


# ---- the kernels that write it

by_kernel = pytest.mark.parametrize("kernel", rvq_pack.KERNELS, ids=lambda kernel: kernel.name)


@pytest.fixture(scope="module", params=["off", "fast"])
def contract(request: pytest.FixtureRequest) -> str:
    build_ahead(rvq_pack.KERNELS, request.param)
    return str(request.param)


@by_kernel
def test_packing_is_the_hooks_and_the_order(contract: str, kernel: Kernel) -> None:
    verdict = verify("turboquant_rvq", kernel, "simulator", Simulated(contract == "fast", contract))
    assert verdict.passed and verdict.identical and verdict.configurations >= 72, verdict


@by_kernel
def test_what_the_configurations_hold(kernel: Kernel) -> None:
    seen = Counter[object]()
    for case in kernel.cases():
        x = case.inputs[0]
        seen.update([x.shape[3], case.name.split()[0], f"{case.parameters['bits']} bits", x.shape[:3]])
    assert {*HEAD_DIMS, *FAMILIES, "1 bits", "2 bits", (2, 1, 64)} <= set(seen) and grows(kernel) == ""


def test_what_packing_refuses() -> None:
    kernel = rvq_pack.PACK["keys", "hadamard"]
    case = next(iter(kernel.cases()))
    x, signs, tables = case.inputs
    given = case.parameters | {"backend": "simulator"}
    for inputs, changes, said in (
        ((x[:, :, :31], signs, tables), {}, "n a multiple of 32"), ((x, signs, tables), {"blocks": 7}, "with blocks=7"),
        ((x[..., :63], signs, tables), {}, "D one of 64, 96, 128, 192, 256"),
        ((x, signs[:, :32], tables), {}, "are not .rounds"),
        ((x, signs, tables[:48]), {}, "must be .64,."), ((x.astype(mx.float32), signs, tables), {}, "x is float32"),
        ((x, signs, tables), {"bits": 3}, "bits 3 is not accepted"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedShapeError, match=said):
            kernel(*inputs, **given | changes)


PACK_BREAKS = {
    "another token's scale": ("* 8u + r / ", "* 8u + r / 2u / "),
    "streams swapped": ("(both & 255u) | both >> 8u << uint(bits)", "both >> 8u | (both & 255u) << uint(bits)"),
    "fields swapped": ("if ((r & 1u) != 0u) rest", "if ((r & 1u) == 0u) rest"),
    "all blocks one": ("row = block * 32u + mine", "row = mine"),
    "signs not turned": ("(above != 0u ? ~code : code)", "code"),
    "halves of the tokens swapped": ("16u * i + 8u * a", "16u * a + 8u * i"),
    "a code from a scale that is not stored": ("step = float(half(step))", "step = step"),
    "the last words left out": ("r < total", "r + 64u < total"),
    "half a chunk as a whole": ("chunk * 128u + 128u > total", "false"),
}


@by_kernel
def test_a_broken_packer_is_seen(kernel: Kernel) -> None:
    """On a quarter of the configurations, which unbroken it passes."""
    few, made = list(kernel.cases())[::4], {}
    for what, (old, new) in PACK_BREAKS.items():
        assert old in kernel.body, old
        made[what] = attrs.evolve(kernel, body=kernel.body.replace(old, new), cases=lambda: iter(few))
    build_ahead(made.values())
    for what, broken in made.items():
        assert not verify("turboquant_rvq", broken, "simulator", Simulated(0)).passed, what


# ---- sums of centroids as halves


@pytest.mark.parametrize("table", ["laplace", "fitted"])
@pytest.mark.parametrize("bits", [1, 2])
def test_sums_as_halves(bits: int, table: str) -> None:
    """Within 2^-11 of themselves, and that of the code from the other end has the other sign, exactly."""
    state = state_of(f"bits={bits}+{bits},stage2={table}", "keys")
    sums, lower = state.sums.tolist(), rvq_matrix.lower_levels(state)
    assert isinstance(sums, list) and sums == [-v for v in reversed(sums)] and len(lower) == len(sums) // 2
    found = tile_matrix.codebook(lower).levels()
    assert all(abs(a / b - 1) <= 2.0**-11 for a, b in zip(found, lower, strict=True))


# ---- the pass

PAIRS = (
    ("bits=2+2", "bits=2+2", 128), ("bits=1+1", "bits=1+1,stage2=fitted", 96),
    ("bits=2+2,rotation=haar", "kivi:bits=2", 64), ("turboquant_mse:bits=4", "bits=2+2", 96),
)  # fmt: skip


@cache
def kernels() -> tuple[Kernel, ...]:
    made = []
    for key, value, dim in PAIRS:
        sides = [bound(text, side, dim, device=True) for side, text in zip(SIDES, (key, value), strict=True)]
        made.append(matrix_kernel(*sides))
    return tuple(made)


@pytest.fixture(scope="module")
def _compiled_together() -> None:
    build_ahead(kernels())


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


def alone(key_bits: int, value_bits: int, dim: int) -> Kernel:
    """The pass without exact tokens, on one cache: vectors of all sizes, zero ones among them."""
    B, H, n, R, L = 1, 2, 96, 3, 2
    rng = np.random.default_rng(key_bits)
    states = [state_of(f"bits={b}+{b}", side, dim) for side, b in zip(SIDES, (key_bits, value_bits), strict=True)]
    fields, dense = [], []
    for state in states:
        x = rng.standard_normal((B, H, 128, dim)) * np.exp(rng.standard_normal((B, H, 128, 1)))
        x[:, :, 7] = 0
        rows = rvq.vq_pack(state, rvq.vq_encode(state, mx.array(x.astype(np.float16))))
        dense.append(np.array(rvq.vq_decode(state, rows), np.float64)[:, :, :n])
        fields += rvq_device.to_device(state, rows).values()
    q = mx.array(rng.standard_normal((B, H * R, L, dim)).astype(np.float16))
    scores = (
        np.array(q.astype(mx.float32), np.float64).reshape(B, H, R * L, dim) @ dense[0].swapaxes(-1, -2) * dim**-0.5
    )
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = mx.array((weights @ dense[1] / weights.sum(axis=-1, keepdims=True)).astype(np.float32))
    prepared = states[0].prepare_query(q.astype(mx.float32))
    inputs = (q, prepared, mx.array([[n, 0, L, 0, 0, 0, 0, 0]]), *fields, *[mx.array([[0]])] * 2)
    numbers = {"scale_bits": scale_bits(dim**-0.5), "causal": 1, "splits": 2, "exact_splits": 0, "folded": 0}
    kernel = matrix_pass(
        *map(rvq_matrix.snippet, states),
        cases=lambda: [Case(inputs, numbers | {"regular": 1}, "alone")],
        equals=lambda *given, **more: (want,),
    )
    return attrs.evolve(kernel, compared=lambda sums, tops: (states[1].finish(merged(sums, tops)[0]),))


BREAKS = [  # of keys of 1+1 bits and values of 2+2, at a head size of which half a chunk is left over
    ("tile_k_four", "one.x, two.x, one.y, two.y", "two.x, one.x, two.y, one.y"),
    ("tile_v_four", "one.x, two.x, one.y, two.y", "one.x, one.y, two.x, two.y"),
    ("matrix_scores", "step[K_REST_AT + ", "step[K_CODES_AT + "),
    ("matrix_scores", "K_REST_AT + u * K_REST_WORDS + 96u / 64u * 64u + lane", "K_REST_AT + u * K_REST_WORDS + lane"),
    ("matrix_values", "V_REST_AT + u * V_REST_WORDS", "V_REST_AT"),
    ("matrix_values", "x * 32u + lane], vq_view", "lane], vq_view"),
    ("tile_k_pairs", "0x2404u", "0x2414u"), ("tile_k_pairs", "0x33333333u", "0x11111111u"),
    ("tile_v_pairs", "0x80808080u", "0x00808080u"), ("tile_v_pairs", "0x77777777u", "0x33333333u"),
]  # fmt: skip


@cache
def broken() -> tuple[Kernel, ...]:
    """The text of one function with one thing wrong."""
    made, whole = [], alone(1, 2, 96)
    for name, old, new in BREAKS:
        begin = whole.header.index(f" {name}(")
        end = whole.header.find("\nVQ_FN", begin)
        end = len(whole.header) if end < 0 else end
        part = whole.header[begin:end]
        assert old in part, (name, old)
        made.append(attrs.evolve(whole, header=whole.header[:begin] + part.replace(old, new) + whole.header[end:]))
    return tuple(made)


@pytest.fixture(scope="module")
def _broken_together() -> None:
    build_ahead([alone(1, 2, 96), *broken()])


@pytest.mark.usefixtures("_broken_together")
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[f"{name} {old}" for name, old, _ in BREAKS])
def test_a_broken_text_is_seen(number: int) -> None:
    assert not verify("turboquant_rvq", broken()[number], "simulator", Simulated(1)).passed


@pytest.mark.usefixtures("_broken_together")
def test_packed_tokens_alone() -> None:
    """Against float32 attention on their decoded numbers, where scores are spread; and unbroken it passes."""
    kernel = alone(1, 2, 96)
    assert error_of(kernel, next(iter(kernel.cases()))) <= BOUND
    assert verify("turboquant_rvq", kernel, "simulator", Simulated(1)).passed and grows(kernels()[0]) == ""


@pytest.mark.skipif(not nvrtc.installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_it_compiles_for_cuda(kernel: Kernel) -> None:
    assert nvrtc.compile_for_cuda(kernel, {"Q": "float16"})[:4] == b"\x7fELF"
