"""Kernels of turboquant_rvq and turboquant_prod: bit-identical to the plain functions, and what they refuse."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Kernel
from vq_core.testing import KernelParity
from vq_turboquant.kernels import prod, rvq
from vq_turboquant.kernels.cases import DIMS, DTYPES, FAMILIES
from vq_turboquant.kernels.vectors import name_of
from vq_turboquant.scale import unit_vectors

KERNELS = (*rvq.KERNELS, *prod.KERNELS)
GOLDEN = tuple((f"turboquant_{name}", Path(__file__).parent / f"golden_{name}") for name in ("rvq", "prod"))
PACKERS = (*rvq.PACK.values(), *prod.PACK.values())
packers = pytest.mark.parametrize("kernel", PACKERS, ids=lambda kernel: kernel.name)


class TestParity(KernelParity):
    """All configurations, with one order of lanes and threadgroups for each contraction."""

    kernels = KERNELS
    configurations = 84
    runs = (("off", 0, None), ("fast", 1, None))
    golden = GOLDEN


@packers
def test_what_the_configurations_hold(kernel: Kernel) -> None:
    """Every family in every dtype and width; rotated numbers that are 0, a boundary of every table; zero tokens,
    squares beyond float32, NaN."""
    seen, dims, found = Counter[tuple[object, ...]](), set(), Counter[str]()
    for case in kernel.cases():
        x, bits = case.inputs[0], case.parameters.get("bits", 0)
        family = case.name.split()[0]
        seen[family, name_of(x), bits] += 1
        dims.add(x.shape[3])
        if "signs" in kernel.inputs and family == "pairs":
            signs = np.array(case.inputs[1])
            assert signs.shape[0] == 2
        unit, scale = unit_vectors(x, case.parameters["M"])
        if kernel.name in ("turboquant_rvq_pack_hadamard", "turboquant_prod_pack_hadamard") and family == "pairs":
            module = rvq if "rvq" in kernel.name else prod
            state = module.state_of(bits, x.shape[3], case.parameters["M"], "hadamard")
            found["on a boundary"] += int((np.array(state.rotation.rotate(unit)) == 0).sum())
        scales = np.array(scale)
        found["zero tokens"] += int((scales == 0).sum())
        found["infinite scales"] += int(np.isinf(scales).sum())
        found["NaN"] += int(np.isnan(scales).sum())
    widths = {bits for _, _, bits in seen}
    assert widths in ({1, 2, 3, 4}, {1, 2, 3}, {0})
    assert all(seen[family, dtype, bits] for family in FAMILIES for dtype in DTYPES for bits in widths)
    assert dims == set(DIMS["hadamard" if "hadamard" in kernel.name else "haar"])
    assert min(found["zero tokens"], found["infinite scales"], found["NaN"]) >= 5, found
    assert "hadamard" not in kernel.name or found["on a boundary"] > 100


@packers
def test_what_a_kernel_is_not_for_is_refused(kernel: Kernel) -> None:
    case = next(case for case in kernel.cases() if case.inputs[0].dtype == mx.float32)
    x, *rest = case.inputs
    given = {**case.parameters, "backend": "simulator"}
    dim, tokens = x.shape[3], x.size // x.shape[3]
    refused = [
        (x, {"M": "float16"}, "scales of float32 numbers are float32, not float16"),
        (x.astype(mx.float16), {}, "scales of float16 numbers are float16, not float32"),
        (x.astype(mx.int32), {}, "T 'int32' is not accepted"),
        (x[0], {}, "must have four axes"),
        (x, {"rows": tokens + 1}, f"with rows={tokens + 1}: rows is B H n"),
        (mx.zeros((1, 1, tokens, 513)), {}, "head size 513: accepted are 1 to 512"),
        (mx.zeros((1, 1, tokens, dim + 1)), {}, f"{dim + 1}"),
    ]
    if "bits" in case.parameters:
        refused += [(x, {"bits": 5}, "bits 5 is not accepted"), (x, {"W": dim + 31}, f"W={dim + 31}: {dim} codes")]
    for array, changes, said in refused:
        with pytest.raises(UnsupportedShapeError, match=said):
            kernel(array, *rest, **given | changes)
    with pytest.raises(UnsupportedShapeError, match=r"tables \(48,\) must be \(64,\)"):
        kernel(x, *rest[:-1], rest[-1][:48], **given)


@pytest.mark.parametrize("kernel", (*rvq.UNPACK.values(), *prod.UNPACK.values()), ids=lambda kernel: kernel.name)
def test_fields_that_do_not_fit_are_refused(kernel: Kernel) -> None:
    case = next(iter(kernel.cases()))
    given = {**case.parameters, "backend": "simulator"}
    names = list(kernel.inputs)
    for name in names:
        changed = list(case.inputs)
        changed[names.index(name)] = mx.concatenate([changed[names.index(name)]] * 2, axis=-1)
        with pytest.raises(UnsupportedShapeError):
            kernel(*changed, **given)
    with pytest.raises(UnsupportedShapeError, match=str(given["head_dim"] + 32)):
        kernel(*case.inputs, **given | {"head_dim": given["head_dim"] + 32})


@packers
def test_no_tokens_are_fine(kernel: Kernel) -> None:
    case = next(iter(kernel.cases()))
    x = case.inputs[0][:, :, :0]
    found = kernel(x, *case.inputs[1:], **{**case.parameters, "rows": 0, "backend": "simulator"})
    assert all(a.shape[2] == 0 for a in found)


def test_no_array_of_codes_is_written() -> None:
    """Two streams of words and a scale are all that one launch writes."""
    for kernel in rvq.PACK.values():
        for case in kernel.cases():
            x, given = case.inputs[0], case.parameters
            launch = kernel.launch(kernel.resolve(case.inputs, given))
            words = given["rows"] * given["W"] * given["bits"] // 32
            assert [int(np.prod(shape)) for shape in launch.shapes] == [words, words, x.size // x.shape[3]]
