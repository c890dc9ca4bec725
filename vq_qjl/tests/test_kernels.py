"""QJL's kernels: bit-identical to the plain functions, in every configuration, with contraction off and on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from vq_core.errors import UnsupportedShapeError
from vq_core.testing import KernelParity
from vq_qjl.kernels import DECODE, DECODE_OUTLIERS, ENCODE, ENCODE_OUTLIERS, KERNELS
from vq_qjl.kernels.cases import DIMS, FAMILIES, encoding_cases, encoding_outlier_cases
from vq_qjl.kernels.reference import DTYPES, name_of
from vq_qjl.method import SMALLEST

GOLDEN = Path(__file__).parent / "golden"


class TestParity(KernelParity):
    """All configurations, and 60 with contraction; lanes and threadgroups in another order for each."""

    kernels = KERNELS
    configurations = 96
    runs = (("off", 0, None), ("fast", 1, 60))
    golden = (("qjl", GOLDEN),)


def test_what_the_configurations_hold() -> None:
    """Every family in every dtype and both widths of storage; rows that fill no threadgroup; ties; NaN; overflow."""
    for made, sizes in ((encoding_cases, {*DIMS, 512, 1}), (encoding_outlier_cases, {*DIMS})):
        seen, dims, found = Counter[tuple[str, ...]](), Counter[int](), Counter[str]()
        for case in made():
            x, columns = case.inputs[:2]
            family, numbers = case.name.split()[0], np.array(x.astype(mx.float32), np.float64)
            seen[family, name_of(x)] += 1
            seen[family, case.parameters["U"]] += 1
            dims[x.shape[3]] += 1
            square = np.square(numbers).sum(axis=-1)
            found["ragged rows"] += x.shape[0] * x.shape[1] * x.shape[2] % 8 != 0
            found["ragged words"] += columns.shape[1] % 32 != 0
            found["NaN"] += int(np.isnan(square).sum())
            found["inf"] += int(np.isinf(square).sum())
            found["squares overflow"] += int((np.isfinite(square) & (square > 3.4e38)).sum())
            found["zero"] += int((square == 0).sum())
            found["counts as zero"] += int(((square > 0) & (square <= SMALLEST)).sum())
            found["beyond float16"] += int((np.isfinite(square) & (square > 65504.0**2)).sum())
        assert all(seen[family, dtype] >= 2 for family in FAMILIES for dtype in (*DTYPES, "uint8", "uint32")), seen
        assert sizes <= set(dims) and all(dims[D] >= 9 for D in DIMS)
        assert min(found[what] for what in ("NaN", "inf", "squares overflow", "zero")) > 20, found
        assert min(found[what] for what in ("counts as zero", "beyond float16", "ragged words")) > 20, found
        assert found["ragged rows"] > 20 or made is encoding_outlier_cases


def test_channels_of_equal_norm_are_in_the_configurations() -> None:
    """More channels with the least norm that is chosen than places for them."""
    tied = 0
    for case in encoding_outlier_cases():
        x, count = np.array(case.inputs[0].astype(mx.float32), np.float64), case.inputs[2].shape[0]
        if count == x.shape[3] or not case.name.startswith("equal"):
            continue
        energy = np.sort(np.square(x.reshape(*x.shape[:2], -1, 32, x.shape[3])).sum(axis=3))[..., ::-1]
        tied += int((energy[..., count - 1] == energy[..., count]).sum())
    assert tied > 10


# ---- limits


def test_what_a_kernel_is_not_for_is_refused() -> None:
    x, columns, own = mx.zeros((1, 2, 64, 64)), mx.zeros((64, 128)), mx.zeros((8, 64))
    given = {"M": "float32", "U": "uint32", "backend": "simulator"}
    refused = [
        ((x[0], columns), {}, r"accepted are \(B, H, n, D\) and \(D, m\)"),
        ((x, columns[:63]), {}, "accepted are"),
        ((mx.zeros((1, 1, 1, 600)), mx.zeros((600, 64))), {}, "D at most 512"),
        ((x, columns[:, :100]), {"U": "uint8"}, "100 signs do not fill uint8"),
        ((x, columns[:, :72]), {}, "72 signs do not fill uint32: they are stored as uint8"),
        ((x, columns), {"U": "uint8"}, "they are stored as uint32"),
        ((x, columns), {"M": "float16"}, "norms of float32 numbers are float32, not float16"),
        ((x.astype(mx.float16), columns), {}, "norms of float16 numbers are float16, not float32"),
        ((x.astype(mx.int32), columns), {}, "T 'int32' is not accepted"),
        ((mx.broadcast_to(mx.zeros((1, 1, 1, 1)), (2**10, 2**10, 32, 64)), columns), {}, "numbers or more"),
    ]
    for arrays, changes, said in refused:
        with pytest.raises(UnsupportedShapeError, match=said):
            ENCODE(*arrays, **given | changes)
        with pytest.raises(UnsupportedShapeError, match=said.replace("512", "256")):
            ENCODE_OUTLIERS(*arrays, own, **given | changes)
    for bad, said in ((mx.zeros((65, 64)), "1 to 64 channels"), (mx.zeros((8, 40)), "whole words of 32")):
        with pytest.raises(UnsupportedShapeError, match=said):
            ENCODE_OUTLIERS(x, columns, bad, **given)
    with pytest.raises(UnsupportedShapeError, match="33 tokens are no whole groups of 32"):
        ENCODE_OUTLIERS(x[:, :, :33], columns, own, **given)
    signs, weight, sketch = mx.zeros((1, 2, 64, 4), mx.uint32), mx.zeros((1, 2, 64, 1)), mx.zeros((128, 64))
    for arrays in ((signs, weight[..., :0], sketch), (signs[0], weight, sketch), (signs, weight, sketch[:64])):
        with pytest.raises(UnsupportedShapeError, match="do not fit"):
            DECODE(*arrays, unit=0, backend="simulator")
    own_signs, ids = mx.zeros((1, 2, 64, 2), mx.uint32), mx.zeros((1, 2, 2, 8), mx.uint8)
    good = [signs, weight, own_signs, weight, ids, sketch, own.T]
    assert DECODE_OUTLIERS(*good, unit=0, own_unit=0, backend="simulator")[0].shape == x.shape
    for at, bad in ((2, own_signs[..., :1]), (3, weight[:, :1]), (4, ids[:, :, :1]), (4, ids[..., :7]), (6, own)):
        with pytest.raises(UnsupportedShapeError, match="do not fit"):
            DECODE_OUTLIERS(*good[:at], bad, *good[at + 1 :], unit=0, own_unit=0, backend="simulator")


def test_no_tokens_are_fine() -> None:
    columns, own = mx.zeros((64, 72)), mx.zeros((8, 64))
    given = {"M": "float32", "U": "uint8", "backend": "simulator"}
    for rows, n in ((1, 0), (0, 32)):
        found = ENCODE_OUTLIERS(mx.zeros((rows, 2, n, 64)), columns, own, **given)
        assert [a.shape[3] for a in found] == [9, 1, 2, 1, 8] and all(a.shape[:2] == (rows, 2) for a in found)
        sketches = (columns.T, own.T)
        got = DECODE_OUTLIERS(*found, *sketches, unit=0, own_unit=0, backend="simulator")[0]
        assert got.shape == (rows, 2, n, 64) and got.dtype == mx.float32
