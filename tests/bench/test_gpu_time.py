"""The GPU's clock on profiles that are written here, and the kernel that chains calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from vq_core.bench.gpu_time import MARKER, Event, kernel_times, marker, reads_codes, summed
from vq_core.kernels import nvrtc
from vq_core.kernels.backends import choose
from vq_core.kernels.golden import one_a_variant
from vq_core.kernels.verify import verify

CHAINED = f"custom_kernel_{MARKER}_half_1a2b"


def test_the_marker_gives_the_fresh_queries() -> None:
    found = verify("core", marker, "simulator", choose("simulator"))
    assert (found.passed, found.configurations, found.error) == (True, 3, "")


@pytest.mark.skipif(not nvrtc.installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")
def test_the_marker_compiles_for_cuda() -> None:
    codes = [
        nvrtc.compile_for_cuda(marker, marker.resolve(case.inputs, case.parameters).parameters)
        for case in one_a_variant(marker)
    ]
    assert len(codes) == 3 and all(code[:4] == b"\x7fELF" for code in codes)


def test_sums_are_per_call_and_leave_the_marker_out() -> None:
    profile: list[Event] = [("vq_attend_x", 4e-6), (CHAINED, 9e-6), ("vq_attend_x", 4e-6), ("vq_attend_merge", 2e-6)]
    found = summed([profile, profile], calls=2)
    assert found.totals == [pytest.approx(5e-6)] * 2 and found.codes == [pytest.approx(4e-6)] * 2
    assert found.kernels == {"vq_attend_x": pytest.approx(4e-6), "vq_attend_merge": pytest.approx(1e-6)}
    assert found.lost == "" and found.noise == 0
    row = found.as_dict()
    assert row["median"] == pytest.approx(5e-6) and row["codes_pass"] == pytest.approx(4e-6) and row["passes"] == 2


def test_lost_records_are_told() -> None:
    found = summed([[("vq_attend_x", 4e-6), ("vq_attend_x", 4e-6)]], calls=2)
    assert "0 of the 1 kernels" in found.lost


def test_noise_is_that_of_profiles_in_turn() -> None:
    profiles = [[("k", seconds)] for seconds in (1e-6, 2e-6, 1e-6, 2e-6)]
    found = summed(profiles, calls=1)
    assert found.noise == pytest.approx(1.0) and (found.as_dict()["min"], found.as_dict()["max"]) == (1e-6, 2e-6)


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("custom_kernel_attend_kivi_kivi_float16", True), ("custom_kernel_matrix_kivi_kivi_2_2", True),
        ("attend_merge", False), ("custom_kernel_attend_merge_apart", False), ("gemm_matrix_tn", False),
        ("sdpa_vector", False),
    ],
)  # fmt: skip
def test_the_pass_that_reads_codes(name: str, reads: bool) -> None:
    assert reads_codes(name) is reads


def test_calls_are_chained_and_inputs_rotate() -> None:
    """Each call waits for the one before, by an item that the array before goes into; arms take turns."""
    log: list[tuple[str, Any]] = []

    def arm(name: str) -> Callable[[Any], mx.array]:
        def run(item: Any) -> mx.array:
            log.append((name, item))
            return mx.array([len(log)])

        return run

    def chained(item: Any, out: mx.array) -> Any:
        return item, int(out.item())

    def record(work: Callable[[], Any]) -> list[Event]:
        work()
        return [("k", 1e-6)] * 3 + [(CHAINED, 1e-6)] * 2

    found = kernel_times(
        {"a": arm("a"), "b": arm("b")}, chained, ["x", "y"], passes=2, calls=3, record=record
    )  # fmt: skip
    assert [name for name, _ in log] == ["a"] * 2 + ["b"] * 2 + ["a"] * 3 + ["b"] * 6 + ["a"] * 3
    assert [item for _, item in log[4:7]] == ["x", ("y", 5), ("x", 6)]
    assert log[10][1] == "y"  # the second profile goes on in the pool where the first one ended
    assert found["a"].lost == "" and found["a"].total == pytest.approx(1e-6)
