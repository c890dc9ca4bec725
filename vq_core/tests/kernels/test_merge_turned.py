"""Merging with the way back from another basis in one launch: close to the plain functions; broken texts are caught."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels import Kernel, Snippet
from vq_core.kernels.growth import grows
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.skeleton.kernels import MERGE_TURNED, pair
from vq_core.kernels.skeleton.matrix import MatrixField, MatrixSnippet
from vq_core.kernels.skeleton.portable import Pointer, Side
from vq_core.kernels.verify import build_ahead, verify

BREAKS = {
    "the rotation and not its inverse": ("room, D, lane, true)", "room, D, lane, false)"),
    "rounds from the first": ("true ? rounds - 1u : 0u", "0u"),
    "exact sums rotated too": ("T(plain[i] + v[r])", "T(v[r])"),
    "exact sums among the packed": ("packed += s0 + k < exact_splits ? 0.0f : one", "packed += one"),
    "a split too few": ("exact += s0 + k < exact_splits", "exact += s0 + k + 1u < exact_splits"),
    "one run of splits left out": ("others[column] + others[128u + column]", "others[column]"),
    "not divided": ("room[c] = packed / whole", "room[c] = packed"),
    "the first channels for all": ("uint c = c0 + column", "uint c = column"),
    "sinks left out": ("extra = exp2(logit - highest)", "extra = 0.0f"),
    "what was read early, read again": ("c0 == 0u && s0 == begin", "s0 == begin"),
}  # fmt: skip


def few() -> list[Any]:
    """Of each head size the float32 ones: the others' last places hide little."""
    return [case for case in MERGE_TURNED.cases() if case.parameters["T"] == "float32"]


def broken(what: str) -> Kernel:
    old, new = BREAKS[what]
    assert old in MERGE_TURNED.body, old
    return attrs.evolve(MERGE_TURNED, body=MERGE_TURNED.body.replace(old, new), cases=few)


@pytest.fixture(scope="module", params=["off", "fast"])
def contract(request: pytest.FixtureRequest) -> str:
    build_ahead([MERGE_TURNED, *(map(broken, BREAKS) if request.param == "off" else ())], request.param)
    return str(request.param)


def test_parity(contract: str) -> None:
    verdict = verify("core", MERGE_TURNED, "simulator", Simulated(1, contract))
    assert verdict.passed and verdict.configurations >= 72, verdict
    close = verify("core", attrs.evolve(MERGE_TURNED, cases=few, tolerance=2e-6), "simulator", Simulated(0, contract))
    assert close.passed, close
    if contract == "off":
        for what in BREAKS:
            assert not verify("core", broken(what), "simulator", Simulated(0, contract)).passed, what


def test_what_the_configurations_hold() -> None:
    seen = Counter[object]()
    for case in MERGE_TURNED.cases():
        signs = case.inputs[3]
        seen.update([signs.shape[1], case.parameters["T"], f"rounds {signs.shape[0]}", case.parameters["with_logits"]])
    assert {64, 80, 96, 112, 128, 192, 256, 160, "float32", "float16", "bfloat16", "rounds 1", "rounds 2"} <= set(seen)
    assert grows(MERGE_TURNED) == ""


def test_refusals() -> None:
    numbers = {"query_length": 1, "with_logits": 0, "exact_splits": 1, "D": 64, "T": "float16"}
    tops, logits = mx.zeros((1, 2, 3, 4, 2)), mx.zeros(8)
    for width, signs, changes, said in (
        (64, (2, 80), {}, "signs are"), (80, (2, 64), {}, "sums have D numbers"), (64, (2, 64), {"D": 80}, "D=80"),
        (64, (0, 64), {}, "signs are"), (72, (2, 72), {"D": 72}, "transform of size 72"),
        (64, (2, 64), {"query_length": 3}, "do not fit"),
    ):  # fmt: skip
        inputs = (mx.zeros((1, 2, 3, 4, width)), tops, logits, mx.zeros(signs))
        with pytest.raises(UnsupportedShapeError, match=said):
            MERGE_TURNED(*inputs, backend="simulator", **numbers | changes)


def turned(x: mx.array) -> mx.array:
    return x


SIGNS = mx.array(np.where(np.arange(128).reshape(2, 64) % 3, 1, -1).astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"signs": SIGNS.astype(mx.float16)}, "an MLX array .rounds, D. of float32"), ({"signs": SIGNS[0]}, "rounds, D"),
     ({"signs": mx.ones((2, 72))}, "transform of size 72"),
     ({"signs": SIGNS[:0]}, "no round"), ({"prepare": None}, "signs say what prepare and finish do")],
)  # fmt: skip
def test_signs_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    given = {"prepare": turned, "signs": SIGNS} | changes
    field = MatrixField("x", "uint32", 64)
    for make in (
        lambda: Snippet("turned", 1, 8, "", **given),
        lambda: MatrixSnippet("keys", "turned", 64, (field,), "", **given),
    ):
        with pytest.raises(PluginError, match=said):
            make()


def test_signs_of_another_size_than_the_head_s() -> None:
    with pytest.raises(PluginError, match="signs of 64 numbers for a head size of 128"):
        MatrixSnippet("keys", "turned", 128, (MatrixField("x", "uint32", 64),), "", prepare=turned, signs=SIGNS)
    for width, dim in ((96, 64), (64, 80)):
        keys, values = (
            Side(
                Snippet("turned", 1, 8, "", prepare=turned, signs=SIGNS, width=width), [Pointer("x", "float16", 8192)],
                128, width, prefix,
            )
            for prefix in "kv"
        )  # fmt: skip
        with pytest.raises(PluginError, match=f"signs of 64 numbers for a head size of {dim} and a stored width of"):
            pair(keys, values, dim, dim, "float16")
