"""VecInfer on tensor cores: the device form, the passes in the simulator against float32 attention. Needs vq-kivi."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import SIDES, PrepareContext, Side
from vq_core.attention.verifying.matrix import matrix_kernel
from vq_core.calibration.stand_in import completed
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Case, Kernel, nvrtc
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.skeleton.matrix import matrix_pass, scale_bits
from vq_core.kernels.skeleton.matrix_kernels import matrix_pair
from vq_core.kernels.verify import build_ahead, same_bits, verify
from vq_core.plugins.binding import BoundSide, bind
from vq_vecinfer.kernels import device, matrix
from vq_vecinfer.kernels.device_pack import PACK
from vq_vecinfer.kernels.query import QUERY, prepare
from vq_vecinfer.method import VecInfer

BOUND = 2e-3
"""Of relative L2, as for every method on tensor cores."""
NORMAL = 1e-3
"""The same for normal queries and keys, of which 1e-4 to 6e-4 is measured."""
TEXT = "vecinfer:sub=8,centroids=256"
PLACES = f"{TEXT},codebooks=subspace"


def bound(text: str, side: Side, dim: int = 128, dtype: str = "float16", in_form: bool = False) -> BoundSide:
    context = PrepareContext(side, 2, dim, dim, dtype)
    return bind(completed(text, [(2, dim)]), context, kernels="simulator", device=in_form)


def state_of(text: str, side: Side, dim: int = 128) -> VecInfer:
    found: VecInfer = bound(text, side, dim).state
    return found


# ---- the device form


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_the_device_form_is_exact_both_ways(side: Side, dim: int) -> None:
    state, rng = state_of(TEXT, side, dim), np.random.default_rng(dim)
    layout = device.layout(state)
    for tokens in (32, 160):
        rows = {"codes": mx.array(rng.integers(0, 2**32, (2, 3, tokens * dim // 32), np.uint32))}
        held = device.to_device(state, rows)["codes"]
        assert held.shape == (2, 3, layout.units(layout.paged[0], tokens), dim) and held.dtype == mx.uint32
        assert same_bits(device.from_device(state, {"codes": held})["codes"], rows["codes"])
        # A block is a piece of its own: what is made of many is what is made of each.
        one = device.from_device(state, {"codes": held[:, :, -1:]})
        assert same_bits(device.to_device(state, one)["codes"], held[:, :, -1:])


@pytest.mark.parametrize("side", SIDES)
def test_a_code_lies_where_the_text_says(side: Side) -> None:
    """One code among zeros, found where the module's docstring says."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        token, place, code = (int(rng.integers(n)) for n in (32, 16, 256))
        codes = np.zeros((1, 1, 32, 16), np.uint8)
        codes[0, 0, token, place] = code
        words = mx.array(codes.reshape(1, 1, -1).view(np.uint32))
        held = np.array(device.ordered(side, 128, words)).view(np.uint8)
        i, a, g, t, b = token // 16, token // 8 % 2, token % 8, token % 8 // 2, token % 2
        if side == "keys":
            wanted = np.zeros((4, 8, 2, 2, 4), np.uint8)
            wanted[place // 4, g, i, a, place % 4] = code
        else:
            wanted = np.zeros((4, 2, 4, 2, 2, 4), np.uint8)
            wanted[place // 4, place % 2, t, place // 2 % 2, i, 2 * a + b] = code
        assert np.array_equal(held.reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("text", "dim", "said"),
    [("vecinfer:sub=4,centroids=256", 128, "codes of 8 bits for 4 channels"), (f"{TEXT},mean=true", 128, "mean=true"),
     ("vecinfer:sub=8,centroids=1024", 128, "codes of 10 bits for 8 channels"), (TEXT, 80, "head size 80")],
)  # fmt: skip
def test_what_does_not_fit_is_declined_with_its_reason(text: str, dim: int, said: str) -> None:
    for side in SIDES:
        state = state_of(text, side, dim)
        assert said in device.declines(state)
        with pytest.raises(UnsupportedShapeError, match=said):
            matrix.snippet(state)


@pytest.mark.parametrize("kernel", [*PACK.values(), QUERY], ids=lambda kernel: kernel.name)
def test_kernels_equal_their_references(kernel: Kernel) -> None:
    for contract in ("off", "fast"):
        verdict = verify("vecinfer", kernel, "simulator", Simulated(1, contract))  # type: ignore[arg-type]
        assert verdict.passed and verdict.identical and verdict.configurations >= 72, verdict
    assert grows(kernel) == ""


def test_what_a_kernel_is_not_for_is_refused() -> None:
    x, book, halves, inverse = mx.zeros((1, 2, 32, 64)), mx.zeros((1, 256, 8)), mx.zeros((1, 256)), mx.zeros((2, 64))
    for arrays, said in (
        ((x[:, :, :31], inverse, book, halves), "n a multiple of 32"), ((x, inverse[:1], book, halves), "inverse"),
        ((x[..., :40], inverse, book, halves), "D one of 64, 96, 128, 192, 256"),
        ((x, inverse, book[:, :255], halves), r"must be \(1 or 8, 256, 8\)"),
        ((x, inverse, book, halves[:, :9]), "halves"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedShapeError, match=said):
            PACK["keys"](*arrays, backend="simulator")
    smooth, given = mx.zeros((2, 64)), {"L": 32, "factor": 0, "backend": "simulator"}
    for query, changes, said in (
        (x[:, :1], {}, "any multiple of H"), (x[..., :40], {}, "accepted are"), (x, {"L": 3}, "L is 3"),
        (x[0], {}, "accepted are"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedShapeError, match=said):
            QUERY(query, smooth, **given | changes)
    with pytest.raises(UnsupportedShapeError, match="of head sizes"):
        QUERY(x[..., :40], smooth[:, :40], **given)
    with pytest.raises(UnsupportedShapeError, match="for keys, not for values"):
        prepare(state_of(TEXT, "values"), x)


KERNEL_BREAKS: dict[str, list[tuple[str, str]]] = {
    "keys": [
        ("(r * 8u + (row & 7u))", "(r * 4u + (row & 7u))"), ("(row / 8u & 3u)", "(row / 16u & 3u)"),
        ("row / 32u * D", "row / 64u * D"), ("books == 1u ? 0u : own % M", "0u * M"),
        ("finite ? code : 0u", "code"), ("<< (8u * i)", "<< (24u - 8u * i)"), ("sum > best", "sum >= best"),
        ("row / n % heads * D", "0u * n"), ("lane, false)", "lane, true)"), ("row < rows", "row < rows - 1u"),
    ],
    "values": [
        ("2u * (r >> 4 & 3u)", "2u * (r >> 5 & 3u)"), ("8u * (r >> 1 & 1u)", "8u * (r & 1u)"),
        ("2u * (r >> 3 & 1u)", "(r >> 3 & 1u)"), ("(r >> 6 & 1u)", "(r >> 3 & 1u)"), ("4u * (r >> 7)", "0u"),
        ("found[4u * thread + i]", "found[thread + 32u * i]"),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    ],
    "query": [
        ("smooth[head * D + i]", "smooth[i]"), ("/ L % uint(x_shape[1])", "% uint(x_shape[1])"),
        ("lane, false)", "lane, true)"), (", as_type<float>(factor))", ", 1.0f)"),
        ("hadamard(all + own, D, lane, false);", ""), ("x[row * D + i]", "x[(row ^ 1u) % rows * D + i]"),
        ("uint(x_shape[1]) / uint(smooth_shape[0])", "uint(smooth_shape[0])"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", KERNEL_BREAKS)
def test_a_broken_kernel_is_seen(which: str) -> None:
    kernel, made = {**PACK, "query": QUERY}[which], []  # type: ignore[dict-item]
    some = [case for case in kernel.cases() if case.inputs[0].dtype == mx.float32]
    for old, new in KERNEL_BREAKS[which]:
        assert old in kernel.body, old
        made.append(attrs.evolve(kernel, body=kernel.body.replace(old, new), cases=lambda: some))
    build_ahead(made)
    for (old, _), broken in zip(KERNEL_BREAKS[which], made, strict=True):
        assert not verify("vecinfer", broken, "simulator", Simulated(0)).passed, old


# ---- centroids as halves


@pytest.mark.parametrize("size", [1e-24, 1e-3, 0.7, 1.0, 500.0, 1e25])
def test_centroids_keep_their_bits_whatever_their_size(size: float) -> None:
    rng = np.random.default_rng(2)
    book = mx.array((rng.standard_normal((1, 256, 8)) * size).astype(np.float32))
    power = matrix.power_of(book)
    words = matrix.constants(book, power)
    halves = np.array(words[:-4].view(mx.float16)).astype(np.float64).reshape(1, 256, 8)
    back = float(words[-4:].view(mx.float32)[0].item())  # type: ignore[arg-type]
    assert back == 2.0**-power and 2**14 <= np.abs(halves).max() < 2**15
    assert np.abs(halves * back / np.array(book, np.float64) - 1).max() <= 2.0**-11


def test_books_without_a_size_are_taken_as_they_are() -> None:
    assert matrix.power_of(mx.zeros((1, 256, 8))) == matrix.power_of(mx.full((1, 256, 8), np.inf)) == 0


def test_codebooks_that_have_no_room_are_refused_with_the_numbers() -> None:
    states = [state_of(TEXT, side, 256) for side in SIDES]
    keys, values = (matrix.snippet(attrs.evolve(state, codebook=mx.ones((32, 256, 8)))) for state in states)
    with pytest.raises(UnsupportedShapeError, match=r"takes \d+ bytes of threadgroup memory, of which .* 231424"):
        matrix_pair(keys, values, "float16")


# ---- the pass

PAIRS = ((TEXT, TEXT, 128), (PLACES, TEXT, 64), (TEXT, "kivi:bits=2", 96))


@cache
def kernels() -> tuple[Kernel, ...]:
    made = []
    for key, value, dim in PAIRS:
        sides = [bound(text, side, dim, in_form=True) for side, text in zip(SIDES, (key, value), strict=True)]
        made.append(matrix_kernel(*sides))
    return tuple(made)


BREAKS = [
    (0, "word << 2 : word", "word << 3 : word"), (0, "0x3fcu", "0x1fcu"), (0, "own + 1024u", "own + 0u"),
    (0, "kept + (lane & 3u)", "kept + (lane / 4u & 3u)"), (0, "[x * 8u + lane / 4u]", "[x * 8u + (lane & 7u)]"),
    (0, "w.z, w.w, k", "w.w, w.z, k"), (0, "a1 = vecinfer_k_pair(own, high", "a1 = vecinfer_k_pair(own, low"),
    (0, "mine + place * 1024u", "mine"), (1, "0x5410u", "0x7610u"), (1, "0x7632u", "0x3276u"),
    (1, "+ lane / 16u * 1024u", ""),
    (1, "(lane / 4u & 3u)", "(lane & 3u)"), (1, "one, w.y, p2", "one, w.z, p2"), (1, "(4u * x + 2u)", "(4u * x + 1u)"),
    (1, "vecinfer_v_pair(own, word, 2u), four", "vecinfer_v_pair(own, word, 3u), four"),
    (1, "lane / 8u * 4u", "lane / 8u"),
    (1, "odd ? z1", "odd ? z0"), (1, "(lane & 4u) != 0u", "false"),
    (1, "as_type<float>(uint(kept", "1.0f + 0.0f * (uint(kept"),
    (1, "lane < 4u ? 0x3c003c00u : 0u", "lane < 3u ? 0x3c003c00u : 0u"),
    (2, "[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);", "[i];"), (2, "i += 128u", "i += 256u"),
    (2, "matrix_values(ring + 10372u", "matrix_values(ring + 2176u"),
]  # fmt: skip


def alone() -> Kernel:
    """The pass without exact tokens, on one cache of codebooks of places: vectors of many sizes, and of zeros."""
    B, H, n, D, R, L = 1, 2, 96, 64, 3, 2
    rng, sides = np.random.default_rng(3), [bound(PLACES, side, D, in_form=True) for side in SIDES]
    positions, fields, dense = mx.arange(128, dtype=mx.int32)[None], [], []
    for side in sides:
        x = rng.standard_normal((B, H, 128, D)) * np.exp(rng.standard_normal((B, H, 128, 1)) / 2)
        x[:, :, 7] = 0
        held = side.pack(mx.array(x.astype(np.float16)), positions, {})
        dense.append(np.array(side.decode(held, positions).astype(mx.float32), np.float64)[:, :, :n])
        fields.append(held["codes"])
    q = mx.array(rng.standard_normal((B, H * R, L, D)).astype(np.float32)).astype(mx.float16)
    scores = np.array(q.astype(mx.float32), np.float64).reshape(B, H, R * L, D) @ dense[0].swapaxes(-1, -2) * D**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = mx.array((weights @ dense[1] / weights.sum(axis=-1, keepdims=True)).astype(np.float32))
    keys, values = (side.held.matrix for side in sides if side.held is not None)
    prepared = keys.prepare(q.astype(mx.float32))
    given = [a for field, m in zip(fields, (keys, values), strict=True) for a in (field, m.constants["book"])]
    inputs = (q, prepared, mx.array([[n, 0, L, 0, 0, 0, 0, 0]]), *given, *[mx.array([[0]])] * 2)
    numbers = {"scale_bits": scale_bits(D**-0.5), "causal": 1, "splits": 2, "exact_splits": 0, "folded": 0}
    return matrix_pass(
        keys,
        values,
        cases=lambda: [Case(inputs, numbers | {"regular": 1}, "alone")],
        equals=lambda *given, **more: (want,),
    )


@cache
def broken() -> tuple[Kernel, ...]:
    """That pass: the text of a side, or of the body, with one thing wrong."""
    whole, made = alone(), []
    border = whole.header.index("Two halves of", whole.header.index("Two halves of") + 1)
    for side, old, new in BREAKS:
        parts = [whole.header[:border], whole.header[border:], whole.body]
        assert old in parts[side], old
        parts[side] = parts[side].replace(old, new)
        made.append(attrs.evolve(whole, header=parts[0] + parts[1], body=parts[2]))
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
@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[old for _, old, _ in BREAKS])
def test_a_broken_text_is_seen(number: int) -> None:
    assert not verify("vecinfer", broken()[number], "simulator", Simulated(1)).passed


@pytest.mark.usefixtures("_compiled_together")
def test_the_unbroken_text_passes() -> None:
    kernel = alone()
    case = next(iter(kernel.cases()))
    assert verify("vecinfer", kernel, "simulator", Simulated(1)).passed and grows(kernels()[0]) == ""
    assert error_of(kernel, case) <= BOUND
    inputs = (*case.inputs[:4], case.inputs[4][:-4], *case.inputs[5:])
    with pytest.raises(UnsupportedShapeError, match=r"k_book \(8192,\) must be \(8196,\)"):
        kernel(*inputs, **case.parameters, backend="simulator")


@pytest.mark.skipif(not nvrtc.installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
@pytest.mark.parametrize("kernel", [*kernels(), *PACK.values(), QUERY], ids=lambda kernel: kernel.name)
def test_it_compiles_for_cuda(kernel: Kernel) -> None:
    given = {name: values[0] for name, values in kernel.parameters.items()}
    assert nvrtc.compile_for_cuda(kernel, given)[:4] == b"\x7fELF"
