"""Comparing a kernel with its reference: what counts as the same, and what is wrong with a kernel's own declaration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from vq_core.kernels import Case
from vq_core.kernels.simulated import Simulated, to_mlx, to_numpy
from vq_core.kernels.standard import bits
from vq_core.kernels.verify import Verdict, build_ahead, relative, same_bits, spread, verify

from .toys import BODY, cases, reference, times

NAN, INF = float("nan"), float("inf")


def judged(limit: int | None = None, **changes: Any) -> Verdict:
    return verify("toy", times(**changes), "simulator", Simulated(), limit)


def test_a_right_kernel() -> None:
    verdict = judged()
    assert verdict.passed and verdict.identical and (verdict.configurations, verdict.differing) == (18, 0)
    assert verdict == Verdict("toy", "times", "", "simulator", 18)


def test_a_wrong_kernel_is_counted() -> None:
    verdict = judged(
        body=BODY.replace("vq_mul(float(x[i]), float(by))", "by == 4u ? 7.0f : vq_mul(float(x[i]), float(by))")
    )
    assert not verdict.passed and not verdict.identical and verdict.configurations == 18 and verdict.differing == 1
    assert verdict.first.startswith("(1,) float32: y differs by ") and verdict.max_difference > 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"cases": lambda: iter([])}, "it has no cases: nothing was compared"),
        ({"cases": lambda: 1 / 0}, "ZeroDivisionError"),
        ({"equals": lambda x, **rest: 1 / 0}, "(8,) float32: ZeroDivisionError: division by zero"),
        ({"equals": lambda x, **rest: (x, x)}, "its reference gives 2 arrays; it has 1 outputs"),
        ({"equals": lambda x, **rest: ()}, "its reference gives 0 arrays; it has 1 outputs"),
        ({"check": lambda call: "never"}, "(8,) float32: kernel times: never"),
        ({"body": BODY.replace("if (i < count) ", "")}, "Missing bound check"),
        ({"cases": lambda: iter([Case((mx.ones(3),), {"count": 3})])}, "needs by="),
    ],
)
def test_what_stops_a_kernel_is_told(changes: dict[str, Any], error: str) -> None:
    verdict = judged(**changes)
    assert not verdict.passed and not verdict.identical and error in verdict.error


def test_another_shape_or_dtype_differs() -> None:
    shaped = judged(equals=lambda x, **rest: (reference(x, **rest)[0].reshape(-1),))
    assert (
        not shaped.passed and shaped.max_difference == INF and "y is (3, 5) mlx.core.float32, not (15,)" in shaped.first
    )
    typed = judged(equals=lambda x, **rest: (reference(x, **rest)[0].astype(mx.float32),))
    assert "y is (8,) mlx.core.float16, not (8,) mlx.core.float32" in typed.first


def test_tolerance_is_for_kernels_that_state_one() -> None:
    near = {"equals": lambda x, **rest: (reference(x, **rest)[0] * 1.01,)}
    assert not judged(**near).passed and not judged(**near, tolerance=1).passed
    within = judged(**near, exact=False, tolerance=0.05)
    assert within.passed and not within.identical and 0 < within.max_difference < 0.05
    assert not judged(**near, exact=False, tolerance=1e-4).passed


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_bits_and_differences(dtype: mx.Dtype) -> None:
    a = mx.array([1.0, -2.0, NAN, INF], dtype)
    other_nan = mx.array([1.0, -2.0, -NAN, INF], dtype)
    assert same_bits(a, other_nan) and relative(a, other_nan) == 0
    for b in ([1.0, -2.0, 0.0, INF], [1.0, -2.0, NAN, -INF], [1.0, NAN, NAN, INF], [1.0, -2.0, NAN, 3.0]):
        assert not same_bits(a, mx.array(b, dtype)) and relative(a, mx.array(b, dtype)) == INF
    b = mx.array([1.0, -1.0, NAN, INF], dtype)
    assert not same_bits(a, b) and relative(a, b) == 1 and relative(b, a) == 0.5
    zeros = mx.array([0.0], dtype), mx.array([-0.0], dtype)
    assert not same_bits(*zeros) and relative(*zeros) == 0
    assert same_bits(mx.array(1.0, dtype), mx.array(1.0, dtype)) and not same_bits(
        mx.array(1.0, dtype), mx.array(2.0, dtype)
    )
    assert (
        same_bits(mx.zeros((0, 3), dtype), mx.zeros((0, 3), dtype))
        and relative(mx.zeros((0,), dtype), mx.zeros((0,), dtype)) == 0
    )
    only_nan = mx.array([NAN], dtype)
    assert relative(only_nan, only_nan) == 0


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.bool_])
def test_whole_numbers(dtype: mx.Dtype) -> None:
    a, b = mx.array([1, 0, 1], dtype), mx.array([1, 1, 1], dtype)
    assert same_bits(a, a) and not same_bits(a, b) and relative(a, b) == 1


def test_bfloat16_keeps_its_bits_through_the_simulator() -> None:
    x = mx.arange(0, 65536, dtype=mx.uint32).astype(mx.uint16).view(mx.bfloat16)
    assert mx.array_equal(to_mlx(to_numpy(x), "bfloat16").view(mx.uint16), x.view(mx.uint16))


def test_a_limit_draws_from_all_cases() -> None:
    """A step through them would meet one dtype only, as cases go through their settings in rounds."""
    found = spread(cases(), 9)
    assert len(found) == 9 and len({case.inputs[0].dtype for case in found}) == 3
    assert [case.name for case in spread(cases(), 9)] == [case.name for case in found]
    for limit in (None, 18, 1000):
        assert [case.name for case in spread(cases(), limit)] == [case.name for case in cases()]
    assert judged(5).configurations == 5


def test_building_ahead_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not compile takes nothing along: each kernel says its own fault when it runs."""
    good, bad = times(), times(name="bad", body=BODY.replace("x[i]", "z[i]"))
    lost = times(name="lost", cases=lambda: 1 / 0)
    build_ahead([good, bad, lost])
    verdicts = [verify("toy", kernel, "simulator", Simulated()) for kernel in (good, bad, lost)]
    assert [verdict.passed for verdict in verdicts] == [True, False, False]
    assert "'bad'" in verdicts[1].error and "ZeroDivisionError" in verdicts[2].error


# ---- the core's own


@pytest.mark.parametrize("contract", ["off", "fast"])
@pytest.mark.parametrize("kernel", bits.KERNELS, ids=lambda kernel: kernel.name)
def test_parity_of_the_core_s_kernels(contract: Any, kernel: Any) -> None:
    build_ahead(bits.KERNELS, contract)
    for seed in (0, 1):
        verdict = verify("core", kernel, "simulator", Simulated(seed, contract))
        assert verdict.passed and verdict.identical and verdict.configurations >= 300, verdict
    widths = Counter(case.parameters["bits"] for case in kernel.cases())
    assert set(widths) == {1, 2, 3, 4, 5, 6, 7, 8, 10, 12} and min(widths.values()) >= 30


BROKEN_BITS = [
    (bits.PACK_BITS, "q << (at - bit)", "q << (at - bit + 1u)"),
    (bits.PACK_BITS, "q >> (bit - at)", "q"),
    (bits.PACK_BITS, "word |=", "word ="),
    (bits.PACK_BITS, "codes[row * count + code]", "codes[row * width + code]"),
    (bits.PACK_BITS, "32u / uint(bits) + 2u", "32u / uint(bits)"),
    (bits.PACK_BITS, "at >= bit + 32u || ", ""),
    (bits.UNPACK_BITS, "<< (32u - shift)", "<< (31u - shift)"),
    (bits.UNPACK_BITS, "if (shift + uint(bits) > 32u) q |=", "if (false) q |="),
    (bits.UNPACK_BITS, ">> shift", ">> (shift + 1u)"),
    (bits.UNPACK_BITS, "& ((1u << bits) - 1u)", ""),
    (bits.UNPACK_BITS, "row * width", "row"),
    (bits.UNPACK_BITS, "if (i < total)", "if (i + 1u < total)"),
]


@pytest.fixture(scope="module")
def broken_bits() -> list[Any]:
    import attrs

    found = []
    for kernel, old, new in BROKEN_BITS:
        assert old in kernel.body
        found.append(attrs.evolve(kernel, body=kernel.body.replace(old, new), cases=_some(kernel)))
    build_ahead(found)
    return found


def _some(kernel: Any) -> Any:
    return lambda: (case for case in kernel.cases() if case.parameters["bits"] in (3, 10))


@pytest.mark.parametrize(
    "index", range(len(BROKEN_BITS)), ids=lambda i: f"{BROKEN_BITS[i][0].name}: {BROKEN_BITS[i][1]}"
)
def test_broken_bit_packing_is_caught(broken_bits: list[Any], index: int) -> None:
    verdict = verify("core", broken_bits[index], "simulator", Simulated())
    assert not verdict.passed, verdict


def test_bit_packing_as_the_core_calls_it() -> None:
    codes = mx.array([[1, 2, 3, 4, 5, 6, 7, 0] * 4] * 3, mx.uint32)
    words = bits.pack(codes, 3, backend="simulator")
    assert words.shape == (3, 3) and mx.array_equal(bits.unpack(words, 3, backend="simulator"), codes)
    for shape in ((0,), (0, 32), (2, 0)):
        empty = bits.pack(mx.zeros(shape, mx.uint32), 3, backend="simulator")
        assert empty.size == 0 and bits.unpack(empty, 3, backend="simulator").size == 0
    from vq_core.errors import UnsupportedShapeError

    for wrong, width, said in (
        (codes[:, :31], 3, "31 codes of 3 bits fill no"),
        (codes, 9, "codes of 9 bits: accepted are 1, 2"),
        (codes, 0, "codes of 0 bits"),
        (mx.array(7, mx.uint32), 8, "at least one dimension"),
        (codes.astype(mx.int32), 3, "accepted is uint32"),
    ):
        with pytest.raises(UnsupportedShapeError, match=said):
            bits.pack(wrong, width, backend="simulator")
    with pytest.raises(UnsupportedShapeError, match="fill no"):
        bits.unpack(words[:, :1], 3, backend="simulator")
