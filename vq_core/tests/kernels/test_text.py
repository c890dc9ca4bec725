"""Metal text without Metal: golden files, and kernels whose text would grow with a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from vq_core.errors import PluginError
from vq_core.kernels import Case, Kernel
from vq_core.kernels import text as text_module
from vq_core.kernels.golden import differences, golden_text, signature, write
from vq_core.kernels.growth import grows
from vq_core.kernels.skeleton.kernels import KERNELS as MERGES
from vq_core.kernels.standard import bits as bit_kernels
from vq_core.kernels.standard import hadamard
from vq_core.kernels.text import metal_text

from .toys import BODY, DTYPES, times

KERNELS = (*bit_kernels.KERNELS, *hadamard.KERNELS)
GOLDEN = Path(__file__).parent / "golden"


def test_golden_text() -> None:
    found = differences([*KERNELS, *MERGES], GOLDEN)
    again = f"if this is meant: python -m vq_core.kernels.golden core {GOLDEN}"
    assert not found, "\n".join([*found, again])


def test_golden_text_notices_a_change(tmp_path: Path) -> None:
    kernel = times()
    write([kernel], tmp_path)
    assert differences([times()], tmp_path) == []
    (changed,) = differences([times(body=BODY.replace("vq_mul", "vq_add"))], tmp_path)
    assert "-if (i < count) y[i] = T(vq_mul" in changed and "+if (i < count) y[i] = T(vq_add" in changed
    (variant,) = differences([times(parameters={"T": (*DTYPES[:2], "uint8")}, cases=some("uint8"))], tmp_path)
    assert "uint8_t" in variant
    missing, left = differences([times(name="other")], tmp_path)
    assert "+// another variant" in missing and left.endswith("times.metal belongs to no kernel")
    write([times(name="other")], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other.metal"]
    with pytest.raises(PluginError, match="no case whose inputs have 8 elements"):
        golden_text(times(cases=lambda: iter([Case((mx.ones(3),), {"count": 3, "by": 1})])))


def some(dtype: str) -> Any:
    def cases() -> Iterator[Case]:
        for name in ("float32", "float16", dtype):
            yield Case((mx.ones(8, getattr(mx, name)),), {"count": 8, "by": 2})

    return cases


def test_the_text_is_complete() -> None:
    """Prelude, signature with what the body mentions and no more, run-time numbers, body, instance."""
    text = metal_text(times(), Case((mx.ones((2, 4), mx.bfloat16),), {"count": 8, "by": 2}))
    for part in (
        "inline float vq_mul(float a, float b) {\n#pragma METAL fp contract(off)",
        "template <typename T>\n[[kernel]] void custom_kernel_times_",
        "const device bfloat16_t* x [[buffer(0)]]",
        "const device uint32_t* run_numbers [[buffer(1)]]",
        "device bfloat16_t* y [[buffer(2)]]",
        "const uint count = run_numbers[0]; const uint by = run_numbers[1];",
        "[[host_name(",
    ):
        assert part in text
    assert "x_shape" not in text and "thread_index" not in signature(text)
    assert "//" not in text.replace("://", ""), "comments are hashed by MLX at every call"


def test_arrays_without_dimensions_are_arrays_in_the_text() -> None:
    text = metal_text(times(), Case((mx.array(1.0),), {"count": 1, "by": 2}))
    assert "const constant float* x [[buffer(0)]]" in text


def test_standard_output_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    metal_text(times(), Case((mx.ones(8),), {"count": 8, "by": 2}))
    with pytest.raises(ValueError, match="wrong"), text_module._StandardOutput(Path("/dev/null")):
        raise ValueError("wrong")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


# ---- growth


@pytest.mark.parametrize("kernel", [*KERNELS, *MERGES, times()], ids=lambda kernel: kernel.name)
def test_kernels_do_not_grow(kernel: Kernel) -> None:
    assert grows(kernel) == ""


def lengths(*sizes: int, **more: Any) -> Any:
    def cases() -> Iterator[Case]:
        for size in sizes:
            for rows in (2, 3):
                given = {name: value(size) for name, value in more.items()}
                yield Case((mx.ones((rows, size)),), {"count": rows * size, "by": 2} | given)

    return cases


BAKED = BODY.replace("i < count", "i < count && i % S < S")


def test_a_length_as_parameter_grows() -> None:
    baked = times(body=BAKED, parameters={"T": DTYPES, "S": (32, 64, 128)}, cases=lengths(32, 64, 128, S=lambda n: n))
    said = grows(baked)
    assert said.startswith("compile-time parameter S follows axis 1 of x (32 for 32, 64 for 64, 128 for 128)")
    assert "read x_shape[1] instead" in said


def test_a_length_in_blocks_as_parameter_grows() -> None:
    cases = lengths(32, 64, 128, S=lambda n: n // 32)
    assert "S follows axis 1 of x (1 for 32, 2 for 64, 4 for 128)" in grows(
        times(body=BAKED, parameters={"T": DTYPES, "S": (1, 2, 4)}, cases=cases)
    )


def test_a_size_of_the_model_may_be_compiled_in() -> None:
    cases = lengths(64, 128, S=lambda n: n)
    kernel = times(body=BAKED, parameters={"T": DTYPES, "S": (64, 128)}, fixed=("S",), cases=cases)
    assert grows(kernel) == ""


def test_a_parameter_that_has_nothing_to_do_with_lengths() -> None:
    def cases() -> Iterator[Case]:
        for size in (32, 64):
            for bits in (2, 4):
                yield Case((mx.ones((2, size)),), {"count": 2 * size, "by": 2, "S": bits})

    assert grows(times(body=BAKED, parameters={"T": DTYPES, "S": (2, 4)}, cases=cases)) == ""


def test_a_length_in_the_text_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever brings a length into the text: here a declaration that is made anew for each call."""
    import attrs

    def baked(kernel: Kernel, case: Case) -> str:
        size = case.inputs[0].size
        return metal_text(attrs.evolve(kernel, body=kernel.body.replace("count", f"{size}u")), case)

    monkeypatch.setattr("vq_core.kernels.growth.metal_text", baked)
    assert "each length would be compiled" in grows(times())


def test_cases_of_one_length_show_nothing() -> None:
    assert "nothing was compared" in grows(times(cases=lambda: iter([Case((mx.ones(8),), {"count": 8, "by": 2})] * 3)))
    assert "nothing was compared" in grows(times(), [])
