"""VecInfer's kernels: bit-identical to the plain functions, in every configuration, with contraction off and on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core.errors import UnsupportedShapeError
from vq_core.testing import KernelParity
from vq_vecinfer import method
from vq_vecinfer.kernels import DEQUANTIZE, KERNELS, QUANTIZE, QUANTIZE_KEYS, tokens_at_once
from vq_vecinfer.kernels.cases import DIMS, FAMILIES, KEY_DIMS, key_cases, quantizing_cases
from vq_vecinfer.kernels.reference import BITS, DTYPES, SUBS, state_of

GOLDEN = Path(__file__).parent / "golden"


class TestParity(KernelParity):
    """All configurations with one order of lanes and threadgroups for each contraction, 24 with the other."""

    kernels = KERNELS
    configurations = 162
    variants = 9
    golden = (("vecinfer", GOLDEN),)


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


def test_what_the_configurations_of_keys_hold() -> None:
    """Every variant with each family; means and none; heads and rows of their own; spare tokens; what overflows."""
    seen, found, dims = Counter[tuple[Any, ...]](), Counter[str](), set()
    for case in key_cases():
        x, inverse, mean, book, halves = case.inputs
        family, (sub, bits) = case.name.split()[0], (case.parameters["sub"], case.parameters["bits"])
        seen[family, str(x.dtype), sub, bits] += 1
        B, H, n, D = x.shape
        dims.add(D)
        centred = case.parameters["centred"]
        found["centred"] += centred
        found["rows and heads"] += B > 1 and H > 1 and bool(centred)
        found["a codebook each"] += book.shape[0] > 1
        found["spare tokens"] += B * H * n % tokens_at_once(D // sub, bits) != 0
        found["several threadgroups"] += B * H * n > tokens_at_once(D // sub, bits)
        assert n * D // sub * bits % 32 == 0
        y = method.hadamard(x.astype(mx.float32) * inverse[:, None])
        found[f"{family}: no number"] += int((~(mx.abs(y) < mx.inf)).any(axis=-1).sum())
        found[f"{family}: numbers"] += int((mx.abs(y) < mx.inf).all(axis=-1).sum())
        found["beyond the limit"] += int(((mx.abs(y) > method.LIMIT) & ~mx.isinf(y)).sum())
        state = state_of(book, halves, D, bits)
        stored = y - mean[:, :, None] if centred else y
        codes = np.array(method.nearest(state, stored))
        found[f"{family}: code 0"] += int((codes == 0).sum())
        found[f"{family}: others"] += int((codes > 0).sum())
    assert len(seen) == len(FAMILIES) * len(DTYPES) * len(SUBS) * len(BITS) and set(seen.values()) == {1}
    assert dims == set(KEY_DIMS) and dims <= set(method.HEAD_DIMS)
    assert all(found[f"{family}: others"] > 500 for family in FAMILIES), found
    assert min(found["nan: no number"], found["nan: numbers"], found["extreme: no number"]) > 30, found
    assert found["beyond the limit"] > 100 and found["extreme: numbers"] > 30, found
    assert min(found["centred"], found["a codebook each"], found["several threadgroups"]) > 40, found
    assert min(found["rows and heads"], found["spare tokens"]) > 10, found


def test_threadgroups_take_whole_words() -> None:
    """Of every head size, all of whose tokens fit into the memory that the kernel has."""
    for dim in method.HEAD_DIMS:
        for sub in SUBS:
            for bits in BITS:
                tokens = tokens_at_once(dim // sub, bits)
                assert tokens * (dim // sub) * bits % 32 == 0
                assert tokens * dim <= 1024 and tokens * dim // sub <= 256, (dim, sub, bits)


def test_what_the_kernel_of_keys_is_not_for_is_refused() -> None:
    x, inverse, mean = mx.zeros((1, 2, 4, 64)), mx.zeros((2, 64)), mx.zeros((1, 2, 64))
    book, halves = mx.zeros((1, 256, 4)), mx.zeros((1, 256))
    for arrays, changes, said in (
        ((x, inverse[:1], mean, book, halves), {}, r"inverse \(1, 64\) must be \(2, 64\)"),
        ((x, inverse, inverse, book, halves), {}, r"mean \(2, 64\) must be \(1, 2, 64\)"),
        ((mx.zeros((1, 2, 4, 72)), inverse, mean, book, halves), {}, "head size 72: accepted are 16, 32, 48"),
        ((x, inverse, mean, book[:, :9], halves), {}, r"codebook \(1, 9, 4\) must be"),
        ((x[:, :, :1, :4], inverse, mean, book, halves), {"bits": 10}, "fill no whole words"),
    ):
        with pytest.raises(UnsupportedShapeError, match=said):
            QUANTIZE_KEYS(*arrays, **{"sub": 4, "bits": 8, "centred": 1, "backend": "simulator"} | changes)
    for shape in ((0, 2, 4, 64), (1, 2, 0, 64)):
        rows = mx.zeros((shape[0], 2, 64))
        (codes,) = QUANTIZE_KEYS(
            mx.zeros(shape), inverse, rows, book, halves, sub=4, bits=8, centred=1, backend="simulator"
        )  # fmt: skip
        assert codes.shape == (*shape[:2], shape[2] * 4)


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
