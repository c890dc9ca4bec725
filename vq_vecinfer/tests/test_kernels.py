"""VecInfer's kernels: bit-identical to the plain functions, in every configuration, with contraction off and on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Kernel
from vq_core.kernels.golden import differences
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.verify import build_ahead, verify
from vq_core.plugins.offered import offered_kernels
from vq_vecinfer import method
from vq_vecinfer.kernels import DEQUANTIZE, KERNELS, QUANTIZE
from vq_vecinfer.kernels.cases import DIMS, FAMILIES, quantizing_cases
from vq_vecinfer.kernels.reference import BITS, DTYPES, SUBS, state_of

GOLDEN = Path(__file__).parent / "golden"
by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@pytest.fixture(scope="module", params=["off", "fast"])
def contract(request: pytest.FixtureRequest) -> str:
    """Contraction of multiply and add; all variants of both kernels compiled in one unit."""
    build_ahead(KERNELS, request.param)
    return str(request.param)


@by_name
def test_parity(contract: str, kernel: Kernel) -> None:
    """All configurations with one order of lanes and threadgroups for each setting, 24 with the other."""
    for seed, limit in ((0, None), (1, 24)) if contract == "off" else ((1, None), (0, 24)):
        verdict = verify("vecinfer", kernel, "simulator", Simulated(seed, contract), limit)
        assert verdict.passed and verdict.identical and verdict.max_difference == 0, verdict
        assert verdict.configurations >= (limit or 162)


def test_what_the_configurations_hold() -> None:
    """Counted with the plain functions: every variant with each family, ties, numbers that are none, full groups."""
    seen, found = Counter[tuple[Any, ...]](), Counter[str]()
    dims, places = set(), set()
    for case in quantizing_cases():
        x, book, halves = case.inputs
        family, (sub, bits) = case.name.split()[0], (case.parameters["sub"], case.parameters["bits"])
        seen[family, str(x.dtype), sub, bits] += 1
        dims.add(x.shape[3])
        places.add(book.shape[0] > 1)
        count = x.size // sub
        found["threadgroups that are not full"] += count % 128 != 0
        found["several threadgroups"] += count > 128
        state = state_of(book, halves, x.shape[3], bits)
        codes = np.array(method.nearest(state, x.astype(mx.float32)))
        found[f"{family}: code 0"] += int((codes == 0).sum())
        found[f"{family}: others"] += int((codes > 0).sum())
        if family == "ties":
            flat = np.array(x.astype(mx.float32)).reshape(-1, x.shape[3] // sub, sub)[:, 0]
            sums = flat @ np.array(book[0]).T - np.array(halves[0])
            found["ties"] += int(((sums == sums.max(axis=1, keepdims=True)).sum(axis=1) > 1).sum())
            first = codes.reshape(-1, x.shape[3] // sub)[:, 0]
            assert np.array_equal(first, sums.argmax(axis=1)), case.name
        found["NaN"] += int(mx.isnan(x).sum())
        found["infinity"] += int(mx.isinf(x).sum())
        found["beyond the limit"] += int(((mx.abs(x) > method.LIMIT) & ~mx.isinf(x)).sum())
    assert len(seen) == len(FAMILIES) * len(DTYPES) * len(SUBS) * len(BITS) and set(seen.values()) == {1}
    assert dims == set(DIMS) >= {64, 80, 96, 128, 256} and places == {True, False}
    assert all(found[f"{family}: others"] > 500 for family in FAMILIES)
    assert found["ties"] > 500 and found["nan: code 0"] > 500 and found["zeros: code 0"] > 500
    assert min(found["NaN"], found["infinity"], found["beyond the limit"]) > 100
    assert min(found["threadgroups that are not full"], found["several threadgroups"]) > 50


def test_what_a_kernel_is_not_for_is_refused() -> None:
    x, book, halves = mx.zeros((1, 2, 4, 64)), mx.zeros((1, 256, 4)), mx.zeros((1, 256))
    for arrays, changes, said in (
        ((x, book, halves), {"bits": 9}, "codes of 9 bits: accepted are 8, 10, 12"),
        ((x, book, halves), {"sub": 3}, "sub 3 is not accepted"),
        ((x[0], book, halves), {}, r"must be \(B, H, n, D\), D a multiple of 4"),
        ((x[..., :62], book, halves), {}, "D a multiple of 4"),
        ((x[:, :, :1, :4], book, halves), {}, "1 tokens of 1 codes of 8 bits fill no whole words"),
        ((x, book, halves), {"bits": 10}, r"codebook \(1, 256, 4\) must be \(1 or 16, 1024, 4\)"),
        ((x, mx.zeros((2, 256, 4)), mx.zeros((2, 256))), {}, r"codebook \(2, 256, 4\) must be"),
        ((x, book, halves[:, :9]), {}, r"halves \(1, 9\) must be \(1, 256\)"),
        ((x.astype(mx.int32), book, halves), {}, "T 'int32' is not accepted"),
        ((mx.broadcast_to(x[:, :1, :1], (2**10, 2**10, 32, 64)), book, halves), {}, "fewer than 2147483648, and"),
    ):
        with pytest.raises(UnsupportedShapeError, match=said):
            QUANTIZE(*arrays, **{"sub": 4, "bits": 8, "backend": "simulator"} | changes)
    codes = mx.zeros((1, 2, 16), mx.uint32)
    for array, changes, said in (
        (codes, {"bits": 7}, "codes of 7 bits"),
        (codes, {"head_dim": 2}, "head size 2 is no multiple of 4"),
        (codes, {"head_dim": 80}, "are no whole tokens of 20 codes of 8 bits"),
        (codes[0], {}, "are no whole tokens"),
        (mx.broadcast_to(codes[:, :1, :1], (2**10, 2**10, 256)), {}, "are 2147483648 numbers or more"),
        (codes, {"bits": 12, "head_dim": 256}, r"codes \(1, 2, 16\) are no whole tokens of 64 codes of 12 bits"),
        (codes, {"sub": 2}, r"codebook \(1, 256, 4\) must be \(1 or 32, 256, 2\)"),
    ):
        with pytest.raises(UnsupportedShapeError, match=said):
            DEQUANTIZE(array, book, **{"sub": 4, "bits": 8, "head_dim": 64, "backend": "simulator"} | changes)


def test_no_tokens_are_fine() -> None:
    book, halves = mx.zeros((1, 256, 4)), mx.zeros((1, 256))
    for shape in ((0, 2, 4, 64), (1, 2, 0, 64)):
        (codes,) = QUANTIZE(mx.zeros(shape), book, halves, sub=4, bits=8, backend="simulator")
        (y,) = DEQUANTIZE(codes, book, sub=4, bits=8, head_dim=64, backend="simulator")
        assert codes.shape == (*shape[:2], shape[2] * 4) and y.shape == shape


# ---- text


@by_name
def test_the_text_does_not_grow(kernel: Kernel) -> None:
    assert grows(kernel) == "" and len(kernel.variants) <= 9


def test_golden_text() -> None:
    """Its kernels, and fused attention with itself for one shape."""
    kernels = [one.kernel for one in offered_kernels("vecinfer", one_pass=True)[0]]
    assert set(kernels) > set(KERNELS)
    found = differences(kernels, GOLDEN)
    assert not found, "\n".join([*found, f"if this is meant: python -m vq_core.kernels.golden vecinfer {GOLDEN}"])
