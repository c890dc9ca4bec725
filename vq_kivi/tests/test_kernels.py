"""KIVI's kernels: bit-identical to the plain functions, in every configuration, with contraction off and on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import SIDES, Side
from vq_core.errors import UnsupportedShapeError
from vq_core.testing import KernelParity
from vq_kivi import method
from vq_kivi.kernels import KERNELS, PACK, ROUND, UNPACK
from vq_kivi.kernels.cases import DIMS, FAMILIES, packing_cases
from vq_kivi.kernels.reference import BITS, DTYPES, GROUPS, name_of, state_of

GOLDEN = Path(__file__).parent / "golden"


class TestParity(KernelParity):
    """All configurations with one order of lanes and threadgroups for each contraction, 60 with the other."""

    kernels = KERNELS
    configurations = 300
    runs = (("off", 0, None), ("off", 1, 60), ("fast", 1, None), ("fast", 0, 60))
    golden = (("kivi", GOLDEN),)


# ---- what the configurations hold


@pytest.mark.parametrize("side", SIDES)
def test_every_width_of_every_dtype_meets_every_family(side: Side) -> None:
    seen, dims, rows = Counter[tuple[object, ...]](), Counter[tuple[int, int]](), set()
    ragged = 0
    for case in packing_cases(side)():
        (x,), bits, size = case.inputs, case.parameters["bits"], case.parameters["size"]
        seen[case.name.split()[0], name_of(x), bits, size] += 1
        dims[x.shape[3], size] += 1
        rows.add((*x.shape[:2], x.shape[2] // size if side == "keys" else x.shape[2]))
        ragged += x.shape[3] % size != 0
    for family in FAMILIES:
        for dtype in DTYPES:
            assert all(seen[family, dtype, bits, size] for bits in BITS for size in GROUPS), (family, dtype)
    for D in DIMS:
        assert all(dims[D, size] >= 3 for size in GROUPS), D
    assert set(DIMS) >= {64, 80, 96, 128, 192, 256}
    assert {row[0] for row in rows} == {1, 2} and {row[1] for row in rows} == {1, 2, 3}
    # Values of one token; keys of one group and of several.
    assert {1, 2, 3, 4} <= {row[2] for row in rows} if side == "keys" else {1, 2, 33} <= {row[2] for row in rows}
    assert ragged > 60


@pytest.mark.parametrize("side", SIDES)
def test_what_families_are_for_is_in_them(side: Side) -> None:
    """Counted with the plain functions: exact halves, groups of one number, ranges that are no number, ..."""
    found: dict[str, Counter[str]] = {family: Counter() for family in (*FAMILIES, "tiny")}
    for case in packing_cases(side)():
        (x,), bits, size = case.inputs, case.parameters["bits"], case.parameters["size"]
        has = found[case.name.split()[0]]
        state = state_of(side, bits, size, x.shape[3], name_of(x))
        codes = method.quantize(state, x)
        wide = x.astype(mx.float32)
        wide = wide.swapaxes(-1, -2) if side == "keys" else wide
        if side == "values" and state.padded != state.head_dim:
            wide = mx.pad(wide, [(0, 0)] * 3 + [(0, state.padded - state.head_dim)], mode="edge")
        groups = np.array(wide).reshape(codes.codes.shape)
        scale, zero = np.array(codes.scale)[..., None], np.array(codes.zero)[..., None]
        with np.errstate(all="ignore"):
            steps = (groups - zero) / scale
            has["halves"] += int(((steps % 1 == 0.5) & (steps > 0) & (steps < 2**bits - 1)).sum())
            has["rounded away from even"] += int(((np.floor(steps + 0.5) - np.rint(steps)) == 1).sum())
        has["numbers"] += groups.size
        has["constant"] += int((groups.min(-1) == groups.max(-1)).sum())
        has["negative zero lowest"] += int((np.signbit(groups) & (groups == 0) & (zero == 0)).any(-1).sum())
        has["lowest above 2"] += int((zero > 2).sum())
        has["scale is inf"] += int(np.isinf(scale).sum())
        has["scale is 0"] += int(((scale == 0)[..., 0] & (groups.min(-1) != groups.max(-1))).sum())
        has["beyond float16"] += int(((np.abs(zero) > method.FLOAT16_MAX) & np.isfinite(zero)).sum())
        has["NaN"] += int(np.isnan(groups).sum())
        has["inf"] += int(np.isposinf(groups).sum())
        has["-inf"] += int(np.isneginf(groups).sum())
        has["NaN in a group"] += int(np.isnan(scale).sum())
    ties = found["ties"]
    assert ties["halves"] > 0.8 * ties["numbers"] and ties["rounded away from even"] > 0.3 * ties["numbers"]
    assert found["constant"]["constant"] > 1000 and found["zeros"]["negative zero lowest"] > 1000
    assert found["shifted"]["lowest above 2"] > 1000
    extreme = found["extreme"]
    assert extreme["scale is inf"] > 100 and extreme["beyond float16"] > 100
    assert found["small"]["scale is 0"] > 100
    assert min(found["nan"][what] for what in ("NaN", "inf", "-inf", "NaN in a group")) > 1000
    assert found["normal"]["NaN"] == found["ties"]["NaN"] == 0


# ---- limits


@pytest.mark.parametrize("side", SIDES)
def test_what_a_kernel_is_not_for_is_refused(side: Side) -> None:
    x, given = mx.zeros((1, 2, 64, 64)), {"bits": 4, "size": 32, "M": "float32", "backend": "simulator"}
    refused = [
        (x, {"bits": 5}, "bits 5 is not accepted; accepted are 2, 3, 4, 8"),
        (x, {"size": 48}, "groups of 48: accepted are 32, 64, 128"),
        (x, {"size": 0}, "groups of 0: accepted are"),
        (x, {"M": "float16"}, "scale and zero of float32 numbers are float32, not float16"),
        (x.astype(mx.float16), {}, "scale and zero of float16 numbers are float16, not float32"),
        (x.astype(mx.int32), {}, "T 'int32' is not accepted"),
        (x[0], {}, r"x \(2, 64, 64\) must be \(B, H, n, D\)"),
        (x[0, 0, 0], {}, r"x \(64,\) must be \(B, H, n, D\)"),
        (mx.broadcast_to(mx.zeros((1, 1, 1, 1)), (2**10, 2**10, 32, 64)), {}, "fewer than 2147483648 are accepted"),
    ]
    if side == "keys":
        refused.append((x[:, :, :33], {}, "33 tokens are no whole groups of 32"))
    for array, changes, said in refused:
        for kernel in (PACK[side], ROUND[side]):
            with pytest.raises(UnsupportedShapeError, match=said):
                kernel(array, **given | changes)
    codes, scale = mx.zeros((1, 2, 64, 8), mx.uint32), mx.zeros((1, 2, 64, 2))
    given = {"bits": 4, "size": 32, "head_dim": 64, "backend": "simulator"}
    bad = [
        ((codes, scale, scale[..., :1]), {}, "do not fit"),
        ((codes, scale[:, :1], scale[:, :1]), {}, "do not fit"),
        ((codes[0], scale[0], scale[0]), {}, "do not fit"),
        ((codes, scale, scale), {"bits": 8}, "8 words are not 2 groups of 32 codes of 8 bits"),
        ((codes, scale, scale), {"size": 64}, "8 words are not 2 groups of 64 codes of 4 bits"),
        ((codes, scale, scale.astype(mx.float16)), {}, "zero is float16, M is float32"),
    ]
    if side == "keys":
        bad.append(((codes, scale, scale), {"head_dim": 65}, "are not of head size 65"))
    else:
        bad += [
            ((codes, scale, scale), {"head_dim": 65}, "head size 65 needs 3 groups of 32, there are 2"),
            ((codes, scale, scale), {"head_dim": 32}, "head size 32 needs 1 groups of 32, there are 2"),
        ]
    for arrays, changes, said in bad:
        with pytest.raises(UnsupportedShapeError, match=said):
            UNPACK[side](*arrays, **given | changes)


@pytest.mark.parametrize("side", SIDES)
def test_no_tokens_are_fine(side: Side) -> None:
    for rows, n in ((1, 0), (0, 32)):
        x = mx.zeros((rows, 2, n, 64))
        found = PACK[side](x, bits=2, size=32, M="float32", backend="simulator")
        outer = (rows, 2, 64) if side == "keys" else (rows, 2, n)
        words, groups = (n * 2 // 32, n // 32) if side == "keys" else (4, 2)
        assert [a.shape for a in found] == [(*outer, words), (*outer, groups), (*outer, groups)]
        (y,) = ROUND[side](x, bits=2, size=32, M="float32", backend="simulator")
        (z,) = UNPACK[side](*found, bits=2, size=32, head_dim=64, backend="simulator")
        assert y.shape == z.shape == x.shape and y.dtype == z.dtype == mx.float32


def test_few_variants() -> None:
    assert all(len(kernel.variants) <= 24 for kernel in KERNELS)
