"""Three kernels equal numpy bit for bit: with contraction off and on, in any order of lanes and threadgroups."""

from __future__ import annotations

import pytest

from vq_core.kernels.simulator import build

from .demonstration import (
    KEY,
    RAW_MULTIPLY_ADD,
    data,
    differences,
    hadamard_program,
    key_program,
    value_program,
)

DTYPES = ("float32", "float16", "bfloat16")
FAMILIES = ("normal", "ties", "outliers", "extreme")
KEY_SHAPES = ((1, 32, 64), (2, 33, 80), (3, 1, 128), (1, 100, 96), (2, 31, 1), (1, 256, 64))
VALUE_SHAPES = ((1, 5, 64), (2, 1, 80), (4, 32, 128), (1, 17, 112), (2, 64, 20), (1, 3, 1))
HADAMARD_SIZES = (64, 128, 256, 2048)


@pytest.fixture(scope="module", params=["off", "fast"])
def contract(request: pytest.FixtureRequest) -> str:
    """All instances of this module, compiled as one unit for each way of contracting."""
    one = [(dtype,) for dtype in DTYPES]
    build(
        {
            key_program(): one,
            value_program(): one,
            hadamard_program(): [(dtype, n) for dtype in DTYPES for n in HADAMARD_SIZES],
        },
        contract=request.param,
    )
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kivi_keys(contract: str, family: str, dtype: str) -> None:
    for i, shape in enumerate(KEY_SHAPES):
        for seed in (0, i + 1):
            assert not differences(key_program(), data(i, shape, dtype, family), dtype, seed=seed, contract=contract)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kivi_values(contract: str, family: str, dtype: str) -> None:
    for i, shape in enumerate(VALUE_SHAPES):
        for seed in (0, i + 1):
            assert not differences(value_program(), data(i, shape, dtype, family), dtype, seed=seed, contract=contract)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ("normal", "ties", "outliers"))
def test_hadamard(contract: str, family: str, dtype: str) -> None:
    for i, n in enumerate(HADAMARD_SIZES):
        for seed in (0, i + 1):
            x = data(i, (3, n), dtype, family)
            assert not differences(hadamard_program(), x, dtype, seed=seed, contract=contract)


def test_contraction_really_fuses() -> None:
    """Written plainly, q * scale + zero depends on the switch, and the other outputs do not."""
    raw = key_program(KEY, RAW_MULTIPLY_ADD)
    x = data(1, (2, 64, 80), "float32", "normal")
    assert not differences(raw, x, "float32", contract="off")
    for seed in range(3):
        found = differences(raw, x, "float32", contract="fast", seed=seed)
        assert found.startswith("kivi_key: err differs from the reference in ")
        assert "\n" not in found
