"""The sign-Hadamard kernel: bit-identical to the plain functions, and broken texts that are caught."""

from __future__ import annotations

from collections import Counter

import attrs
import mlx.core as mx
import pytest

from vq_core.codec.hadamard import SignHadamard
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Kernel
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.standard.hadamard import SIGN_HADAMARD
from vq_core.kernels.verify import build_ahead, verify

BREAKS = {
    "a stride short": ("stride < run;", "stride < run / 2u;"),
    "a wrong partner": ("2u * p - (p & (stride - 1u))", "p + (p & stride)"),
    "no normalisation": ("v[r] = vq_mul(v[r], norm);", ""),
    "a - b turned round": ("room[at + stride] = a - b;", "room[at + stride] = b - a;"),
    "never transposed": ("(transposed ? 60u : 0u)", "0u"),
    "a run left out": ("j = 1u; j < m;", "j = 1u; j < m - 1u;"),
    "another order of runs": ("room[j * run + place];\n      sum += minus >> j & 1u",
                              "room[(m - j) * run + place];\n      sum += minus >> (m - j) & 1u"),
    "signs after the transform": ("if (!(undo))", "if (undo)"),
    "rounds undone from the first": ("undo ? rounds - 1u : 0u", "0u"),
    "the next round's signs are the first's": ("undo ? rounds - 2u - k : k + 1u", "undo ? rounds - 1u : 0u"),
    "held: another order": ("uint o = 1u; o < 32u; o <<= 1", "uint o = 16u; o > 0u; o >>= 1"),
    "held: a stride short": ("o < 32u", "o < 16u"),
    "held: turned round": ("? other - mine", "? mine - other"),
    "held: wrong partners": ("a = v[r], b = v[r + o]", "a = v[r + o], b = v[r]"),
    "held: too few": ("if (o * 32u < D)", "if (o * 64u < D)"),
    "the last row for all": ("row = min(n, rows - 1u)", "row = rows - 1u"),
}  # fmt: skip


def broken(what: str) -> Kernel:
    old, new = BREAKS[what]
    assert old in SIGN_HADAMARD.header + SIGN_HADAMARD.body, old
    return attrs.evolve(
        SIGN_HADAMARD,
        header=SIGN_HADAMARD.header.replace(old, new),
        body=SIGN_HADAMARD.body.replace(old, new),
        cases=lambda: (case for case in SIGN_HADAMARD.cases() if case.inputs[0].dtype == mx.float32),
    )


@pytest.fixture(scope="module", params=["off", "fast"])
def contract(request: pytest.FixtureRequest) -> str:
    build_ahead([SIGN_HADAMARD, *(map(broken, BREAKS) if request.param == "off" else ())], request.param)
    return str(request.param)


def test_parity(contract: str) -> None:
    for seed in (0, 1):
        verdict = verify("core", SIGN_HADAMARD, "simulator", Simulated(seed, contract))
        assert verdict.passed and verdict.identical and verdict.max_difference == 0, verdict
        assert verdict.configurations >= 72
    if contract == "off":
        for what in BREAKS:
            assert not verify("core", broken(what), "simulator", Simulated(0, contract)).passed, what


def test_what_the_configurations_hold() -> None:
    seen = Counter[object]()
    for case in SIGN_HADAMARD.cases():
        x, signs = case.inputs
        seen.update([x.shape[-1], x.dtype, signs.shape[0], case.parameters["undo"]])
    assert {64, 80, 96, 112, 128, 192, 256, mx.float32, mx.float16, mx.bfloat16, 1, 2} <= set(seen)


def test_use_and_refusals() -> None:
    turned, x = SignHadamard.drawn(112, 3), mx.random.normal((2, 3, 112), key=mx.random.key(1))
    for undo, want in ((False, turned.rotate(x)), (True, turned.undo(x))):
        (found,) = SIGN_HADAMARD(x, turned.signs, undo=undo, rows=6, backend="simulator")
        assert mx.array_equal(found, want).item()
    for shapes, rows, said in (
        (((2, 80), (2, 64)), 2, "accepted are"),
        (((2, 72), (2, 72)), 2, "transform of size 72"),
        (((2, 1024), (2, 1024)), 2, "D at most 512"),
        (((2, 64), (64,)), 2, "accepted are"),
        (((2, 64), (2, 64)), 3, "holds 2 vectors, rows is 3"),
    ):
        with pytest.raises(UnsupportedShapeError, match=said):
            SIGN_HADAMARD(*map(mx.zeros, shapes), undo=False, rows=rows, backend="simulator")
