"""Every kernel and every name of the dialect compile for CUDA, where NVIDIA's compiler is installed; no GPU is needed.

pip install 'vq-core[cuda-check]'
"""

from __future__ import annotations

from typing import Any

import pytest

from vq_core.api.facts import SIDES, PrepareContext
from vq_core.attention.verifying import pass_kernel
from vq_core.errors import PluginError
from vq_core.kernels import Kernel, Output, nvrtc
from vq_core.kernels.golden import one_a_variant
from vq_core.kernels.nvrtc import PACKAGES, compile_for_cuda, cuda_text, installed
from vq_core.plugins.binding import bind
from vq_core.plugins.offered import offered_kernels

from .test_dialect_documented import BODY, HEADER

KERNELS = [one.kernel for one in offered_kernels(one_pass=True)[0]]
needs_compiler = pytest.mark.skipif(not installed(), reason="NVIDIA's compiler: pip install 'vq-core[cuda-check]'")


def names(body: str = BODY, **changes: Any) -> Kernel:
    """A kernel that uses every documented name."""
    given: dict[str, Any] = {
        "name": "names", "body": body, "header": HEADER, "inputs": {"x": "float32"},
        "parameters": {"T": ("float32", "float16", "bfloat16")},
        "outputs": {"y": Output("float32", lambda call: (64,))}, "threads": lambda call: (64, 1, 1),
        "threadgroups": lambda call: (1, 1, 1), "equals": lambda x, **rest: (x,), "cases": lambda: [],
    }  # fmt: skip
    return Kernel(**given | changes)


@needs_compiler
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_variant_compiles(kernel: Kernel) -> None:
    compiled, few = 0, {"attend_merge": 3, "attend_merge_turned": 3, "attend_merge_apart": 1}
    for case in one_a_variant(kernel):
        code = compile_for_cuda(kernel, kernel.resolve(case.inputs, case.parameters).parameters)
        assert code[:4] == b"\x7fELF"
        compiled += 1
    least = 1 if kernel.name.startswith("matrix_") else 5 if kernel.stands_for == "attend" else 8
    assert compiled >= few.get(kernel.name, min(least, len(kernel.variants) // 2))


@needs_compiler
@pytest.mark.parametrize(
    ("text", "dim", "dtype"),
    [("kivi:bits=3", 80, "bfloat16"), ("kivi:bits=4", 64, "float32"), ("kivi:bits=8", 128, "float16"),
     ("example:bits=3", 80, "float16")],
)  # fmt: skip
def test_other_fused_attention_compiles(text: str, dim: int, dtype: str) -> None:
    """Another width of codes, another head size, another dtype at once; four query rows."""
    kernel = pass_kernel(*(bind(text, PrepareContext(side, 2, dim, dim, dtype), kernels="off") for side in SIDES))
    assert compile_for_cuda(kernel, {"Q": dtype, "M": 4})[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_documented_name_compiles(dtype: str) -> None:
    assert compile_for_cuda(names(), {"T": dtype})[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [("fabs(v)", "fabz(v)"), ("s[t] = float(x[t]);", "x[t] = s[t];"), ("half2 h2 =", "device half2 h2 =")],
)
def test_what_does_not_compile_is_told(old: str, new: str) -> None:
    assert old in BODY
    with pytest.raises(PluginError, match=r"kernel names .* does not compile for CUDA") as caught:
        compile_for_cuda(names(BODY.replace(old, new, 1)), {"T": "float32"})
    assert "error" in str(caught.value)


def test_the_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_folder", lambda: None)
    assert not installed()
    with pytest.raises(PluginError, match=f"not installed: pip install {PACKAGES}"):
        compile_for_cuda(names(), {"T": "float32"})


def test_the_text_holds_what_mlx_s_has() -> None:
    """Template arguments inside the function, arrays before the numbers, outputs last."""
    text = cuda_text(names(numbers=("n0",), body=BODY.replace("uint n =", "uint n = n0 +")), {"T": "bfloat16"})
    parts = [
        "#define VQ_SHARED", "__global__ void names(", "const float* x", "run_numbers", "float* y",
        "using T = __nv_bfloat16;", "const uint n0 = run_numbers[0];",
    ]  # fmt: skip
    at = [text.index(part) for part in parts]
    assert at == sorted(at)
