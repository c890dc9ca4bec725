"""turboquant_rvq on the conformance kit."""

from __future__ import annotations

from vq_core.testing import MethodConformance


class TestRvq(MethodConformance):
    method = "turboquant_rvq:bits=2+2"
    variants = ("turboquant_rvq:bits=3+3,stage2=fitted,rotation=haar",)
    kernel_cases = 6  # test_rvq_prod_kernels.py runs all
    fused_shapes = ((64, "float16"), (80, "bfloat16"), (256, "float32"))
    ladder = tuple(f"turboquant_rvq:bits={bits}" for bits in ("1+1", "2+2", "3+3", "4+4"))
