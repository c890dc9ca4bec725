"""turboquant_prod on the conformance kit."""

from __future__ import annotations

from vq_core.testing import MethodConformance


class TestProd(MethodConformance):
    method = "turboquant_prod:bits=3"
    variants = ("turboquant_prod:bits=1,sketch=orthogonal",)
    kernel_cases = 6  # test_rvq_prod_kernels.py runs all
    fused_shapes = ((128, "float16"), (96, "bfloat16"))
    ladder = tuple(f"turboquant_prod:bits={bits}" for bits in (1, 2, 3, 4))
    values = "turboquant_rvq:bits=2+2"
