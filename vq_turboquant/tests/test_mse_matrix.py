"""turboquant_mse on tensor cores: the device form, and the passes in the simulator against float32 attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import SIDES, PrepareContext, Side
from vq_core.attention.verifying.matrix import matrix_kernel
from vq_core.codec.codebook import gaussian_centroids
from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels import Case, Kernel, nvrtc
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.skeleton.matrix import matrix_pass, merged, scale_bits
from vq_core.kernels.verify import build_ahead, same_bits, verify
from vq_core.plugins.binding import BoundSide, bind
from vq_turboquant import mse
from vq_turboquant.kernels import mse_device, mse_matrix, tile_matrix, tile_order
from vq_turboquant.kernels.mse_order import ORDER

BOUND = 2e-3
"""Of relative L2, as for every method on tensor cores."""
NORMAL = 1e-3
"""The same for normal queries and keys, of which 1e-4 to 6e-4 is measured."""
DIMS = (64, 96, 128, 256)


def bound(text: str, side: Side, dim: int = 128, dtype: str = "float16", device: bool = False) -> BoundSide:
    method = text if ":" in text else f"turboquant_mse:{text}"
    return bind(method, PrepareContext(side, 2, dim, dim, dtype), kernels="simulator", device=device)


def state_of(text: str, side: Side, dim: int = 128, dtype: str = "float16") -> mse.MseState:
    found: mse.MseState = bound(text, side, dim, dtype).state
    return found


# ---- the device form


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dim", DIMS)
def test_the_device_form_is_exact_both_ways(side: Side, bits: int, dim: int) -> None:
    state, rng = state_of(f"bits={bits}", side, dim), np.random.default_rng(dim)
    layout = mse_device.layout(state)
    for tokens in (32, 160):
        words = rng.integers(0, 2**32, (2, 3, tokens, dim * bits // 32), np.uint32)
        scale = rng.standard_normal((2, 3, tokens, 1)).astype(np.float16)
        scale[:, :, 5], scale[:, :, 9], scale[:, :, 11] = np.nan, -np.inf, -0.0
        rows = {"codes": mx.array(words), "scale": mx.array(scale)}
        held = mse_device.to_device(state, rows)
        for field in layout.paged:
            shape = (2, 3, layout.units(field, tokens), *field.shape[1:])
            assert held[field.name].shape == shape and held[field.name].dtype == rows[field.name].dtype
        back = mse_device.from_device(state, held)
        assert all(same_bits(back[name], rows[name]) for name in rows)
        # A block is a piece of its own: what is made of many is what is made of each.
        one = mse_device.from_device(state, {name: a[:, :, -1:] for name, a in held.items()})
        again = mse_device.to_device(state, one)
        assert all(same_bits(again[name], held[name][:, :, -1:]) for name in held)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bits", [2, 4])
def test_a_code_lies_where_the_text_says(side: Side, bits: int) -> None:
    """One token's code among zeros, found where the module's docstring says."""
    rng, chunk, places = np.random.default_rng(bits), 128 // bits, 16 // bits
    for _ in range(30):
        token, channel, code = int(rng.integers(32)), int(rng.integers(128)), int(rng.integers(2**bits))
        codes = np.zeros((1, 1, 32, 128), np.uint32)
        codes[0, 0, token, channel] = code
        scale = mx.array((np.arange(32) == token).astype(np.float16)[None, None, :, None])
        words, scales = tile_order.ordered(side, bits, mx.array(codes), scale)
        i, a, rest = token // 16, token // 8 % 2, token % 8
        c, inner = divmod(channel, chunk)
        if side == "keys":
            j, t, b, g = inner // 8, inner % 8 // 2, inner % 2, rest
            place = 4 * g + 2 * i + a
        else:
            j, g, t, b = inner // 8, inner % 8, rest // 2, rest % 2
            place = 8 * t + 4 * i + 2 * a + b
        wanted = np.zeros((128 * bits // 128, 8, 4, 2, 2), np.uint32)
        if bits == 2:
            wanted[c, g, t, i, a] = code << (16 * (j // 4) + 2 * (j // 2 % 2) + 4 * (j % 2 + 2 * b))
        else:
            n, above = 2 * j + b, code >= 8
            size = 15 - code if above else code
            wanted[c, g, t, i, a] = size << 4 * n | above << 3 + 4 * (2 * n + 1 if n < 4 else 2 * n - 8)
        assert places in (8, 4) and np.array_equal(np.array(words).reshape(wanted.shape), wanted)
        assert np.array(scales).reshape(32)[place] == 1


@pytest.mark.parametrize(
    ("text", "dim", "dtype", "said"),
    [("bits=3", 128, "float16", "codes of 3 bits"), ("bits=2.5", 128, "float16", "two groups of channels"),
     ("bits=2,mean=first", 128, "float16", "mean=first"), ("bits=4", 80, "float16", "head size 80"),
     ("bits=2", 128, "bfloat16", "scales are float32")],
)  # fmt: skip
def test_what_does_not_fit_is_declined_with_its_reason(text: str, dim: int, dtype: str, said: str) -> None:
    state = state_of(text, "keys", dim, dtype)
    assert said in mse.no_tiles(state)
    with pytest.raises(UnsupportedShapeError, match=said):
        mse_matrix.snippet(state)
    assert mse.vq_layout(state).block == (32 if state.mean else 1)


@pytest.mark.parametrize("text", ["bits=2", "bits=4,scale=raw", "bits=2,rotation=haar,scale=unbiased"])
def test_what_fits_packs_in_blocks(text: str) -> None:
    for side in SIDES:
        state = state_of(text, side)
        assert mse.no_tiles(state) == "" and mse.vq_layout(state).block == mse_device.layout(state).block == 32


@pytest.mark.parametrize("side", SIDES)
def test_the_ordering_kernel_is_the_permutation(side: Side) -> None:
    for contract in ("off", "fast"):
        verdict = verify("turboquant_mse", ORDER[side], "simulator", Simulated(1, contract))  # type: ignore[arg-type]
        assert verdict.passed and verdict.identical and verdict.configurations >= 72, verdict


ORDER_BREAKS = [
    ("16u * i + 8u * a", "16u * a + 8u * i"), ("j / (places / 2u)", "j % 2u"), ("8u * k - 29u", "8u * k - 25u"),
    ("half_chunk ? inner / 2u : inner / 4u", "inner / 4u"), ("(above != 0u ? ~code : code)", "code"),
    ("4u * ((j & 1u) + 2u * b)", "4u * (2u * (j & 1u) + b)"), ("(r & 1u)", "0u"), ("r < 32u", "r < 31u"),
    ("uint(bits) / 32u]", "uint(bits) / 64u]"),
]  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
def test_a_broken_ordering_is_seen(side: Side) -> None:
    kernel, made = ORDER[side], []
    for old, new in ORDER_BREAKS:
        assert old in kernel.body, old
        made.append(attrs.evolve(kernel, body=kernel.body.replace(old, new)))
    build_ahead(made)
    for (old, _), broken in zip(ORDER_BREAKS, made, strict=True):
        assert not verify("turboquant_mse", broken, "simulator", Simulated(0)).passed, old


# ---- centroids as halves


@pytest.mark.parametrize(("bits", "most"), [(2, 1e-5), (4, 2.0**-11)])
def test_centroids_as_halves_are_the_codebook_s(bits: int, most: float) -> None:
    found = tile_matrix.codebook(mse_matrix.lower_levels(bits))
    want = [2 * v for v in gaussian_centroids(bits)[: 2 ** (bits - 1)]]
    assert all(abs(a / b - 1) <= most for a, b in zip(found.levels(), want, strict=True))
    assert bits == 4 or len({half & 255 for half in found.halves}) == 1


# ---- the pass

PAIRS = (
    ("bits=2", "bits=2", 128), ("bits=4", "bits=4", 256), ("bits=2,scale=raw", "bits=4", 96),
    ("bits=4", "kivi:bits=2", 128), ("kivi:bits=4", "bits=2,rotation=haar", 64),
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


def alone(key_bits: int, value_bits: int, dtype: str = "float16") -> Kernel:
    """The pass without exact tokens, on one cache: vectors of all sizes, zero ones among them."""
    B, H, n, D, R, L = 1, 2, 96, 64, 3, 2
    rng = np.random.default_rng(key_bits)
    states = [state_of(f"bits={bits}", side, D) for side, bits in zip(SIDES, (key_bits, value_bits), strict=True)]
    fields, dense = [], []
    for state in states:
        x = rng.standard_normal((B, H, 128, D)) * np.exp(rng.standard_normal((B, H, 128, 1)))
        x[:, :, 7] = 0
        rows = mse.vq_pack(state, mse.vq_encode(state, mx.array(x.astype(np.float16)), {}))
        dense.append(np.array(mse.vq_decode(state, rows), np.float64)[:, :, :n])
        fields += mse_device.to_device(state, rows).values()
    q = mx.array(rng.standard_normal((B, H * R, L, D)).astype(np.float32)).astype(getattr(mx, dtype))
    scores = np.array(q.astype(mx.float32), np.float64).reshape(B, H, R * L, D) @ dense[0].swapaxes(-1, -2) * D**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = mx.array((weights @ dense[1] / weights.sum(axis=-1, keepdims=True)).astype(np.float32))
    prepared = states[0].prepare_query(q.astype(mx.float32))
    inputs = (q, prepared, mx.array([[n, 0, L, 0, 0, 0, 0, 0]]), *fields, *[mx.array([[0]])] * 2)
    numbers = {"scale_bits": scale_bits(D**-0.5), "causal": 1, "splits": 2, "exact_splits": 0, "folded": 0}
    kernel = matrix_pass(
        *map(mse_matrix.snippet, states),
        cases=lambda: [Case(inputs, numbers | {"regular": 1}, "alone")],
        equals=lambda *given, **more: (want,),
    )
    return attrs.evolve(kernel, compared=lambda sums, tops: (states[1].finish(merged(sums, tops)[0]),))


@pytest.mark.parametrize(("bits", "dtype"), [((2, 2), "bfloat16"), ((4, 4), "float16")])
def test_packed_tokens_alone(bits: tuple[int, int], dtype: str) -> None:
    """Against float32 attention on their decoded numbers, where scores are spread."""
    kernel = alone(*bits, dtype)
    case = next(iter(kernel.cases()))
    assert error_of(kernel, case) <= BOUND
    inputs = (case.inputs[0], case.inputs[1][:, :, :1], *case.inputs[2:])
    with pytest.raises(UnsupportedShapeError, match=r"prepared \(1, 6, 1, 64\) must be \(1, 6, 2, 64\)"):
        kernel(*inputs, **case.parameters, backend="simulator")


KEY, VALUE = "one.x, two.x, one.y, two.y", "one.x, one.y, two.x, two.y"
BREAKS = [  # text of 2-bit keys, of 4-bit values, of what is common, of the prepared query
    (0, "0x33333333u", "0x11111111u"), (0, "0x2404u", "0x2414u"), (0, "0x3414u", "0x1434u"), (0, "0x4432u", "0x4423u"),
    (0, "word >> 2", "word >> 1"), (0, "? word >> 2 : word", "? word : word >> 2"),
    (0, KEY, VALUE), (0, "c0.z * s0.y", "c0.z * s0.x"), (0, "[lane / 4u]", "[lane & 3u]"), (0, "w.z, w.w", "w.w, w.z"),
    (1, "0x77777777u", "0x33333333u"), (1, "0x5140u", "0x4150u"), (1, "0x7362u", "0x6372u"),
    (1, "^ ((l == 0u ? word : word << 4) & 0x80808080u)", ""), (1, "word << 4", "word"), (1, VALUE, KEY),
    (1, "matrix_times(p[4u * u + 1u], s.y)", "matrix_times(p[4u * u + 1u], s.x)"), (1, "[lane & 3u]", "[lane / 8u]"),
    (1, "lane < 4u ? 0x3c003c00u : 0u", "lane < 3u ? 0x3c003c00u : 0u"), (1, "acc[n].z * 1.0", "acc[n].z * 2.0"),
    (0, "vq_view<float2>(prepared)[first + 4u * p]", "matrix_floats(vq_view<uint>(q)[first + 4u * p], Q(0.0f))"),
]  # fmt: skip


@cache
def broken() -> tuple[Kernel, ...]:
    """2-bit keys and 4-bit values: the text of a side, or of the body, with one thing wrong."""
    made, whole = [], alone(2, 4)
    border = whole.header.index("Centroids of places", whole.header.index("Centroids of places") + 1)
    for side, old, new in BREAKS:
        parts = [whole.header[:border], whole.header[border:]]
        assert old in parts[side] + whole.body, old
        parts[side] = parts[side].replace(old, new)
        made.append(attrs.evolve(whole, header="".join(parts), body=whole.body.replace(old, new)))
    return tuple(made)


@pytest.fixture(scope="module")
def _broken_together() -> None:
    build_ahead([alone(2, 4), *broken()])


@pytest.mark.usefixtures("_broken_together")
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[old for _, old, _ in BREAKS])
def test_a_broken_text_is_seen(number: int) -> None:
    assert not verify("turboquant_mse", broken()[number], "simulator", Simulated(1)).passed


@pytest.mark.usefixtures("_broken_together")
def test_the_unbroken_text_passes() -> None:
    verdict = verify("turboquant_mse", alone(2, 4), "simulator", Simulated(1))
    assert verdict.passed and grows(kernels()[0]) == "", verdict


def test_a_snippet_of_the_wrong_side_is_told() -> None:
    keys, values = (mse_matrix.snippet(state_of("bits=2", side)) for side in SIDES)
    with pytest.raises(PluginError, match="queries are prepared for keys"):
        attrs.evolve(values, prepare=keys.prepare)
    with pytest.raises(PluginError, match="sums are finished for values"):
        attrs.evolve(keys, finish=values.finish)


@pytest.mark.skipif(not nvrtc.installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_it_compiles_for_cuda(kernel: Kernel) -> None:
    assert nvrtc.compile_for_cuda(kernel, {"Q": "float16"})[:4] == b"\x7fELF"
