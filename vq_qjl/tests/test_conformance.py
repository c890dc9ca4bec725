"""QJL on the conformance kit: one and two bits with each kind of partner, and outlier channels."""

from __future__ import annotations

from vq_core.testing import MethodConformance


class TestQjl(MethodConformance):
    method = "qjl"
    variants = ("qjl:sketch=72,projection=gaussian",)
    ladder = ("qjl:bits=1", "qjl", "qjl:bits=4")
    values = "kivi:bits=2"
    head_dims = (16, 64, 80, 96, 100, 128, 192, 256)
    fused_shapes = ((64, "float16"), (80, "bfloat16"))


class TestOutliers(MethodConformance):
    method = "qjl:outliers=8"
    head_dim = 128
    head_dims = (64, 80, 96, 128, 256)
