"""QJL on the conformance kit, alone with vq-core: values are kept as they are; with outlier channels and without."""

from __future__ import annotations

import pytest

from vq_core.testing import MethodConformance
from vq_core.testing.attention import MASKS


class TestQjl(MethodConformance):
    method = "qjl"
    variants = ("qjl:sketch=72,projection=gaussian",)
    ladder = ("qjl:bits=1", "qjl", "qjl:bits=4")
    head_dims = (16, 64, 80, 96, 100, 128, 192, 256)
    fused_shapes = ((64, "float16"),)

    # test_kernels.py compares them, on all their cases.
    test_kernels_equal_their_references = None  # type: ignore[assignment]


class TestOutliers(MethodConformance):
    method = "qjl:outliers=8,outlier_sketch=64"
    head_dims = (64, 80, 96, 128, 256)
    test_kernels_equal_their_references = None  # type: ignore[assignment]

    @pytest.mark.parametrize("mask", MASKS)
    def test_attention(self, mask: str) -> None:  # type: ignore[override]
        """With one grouping of heads only: the scores are the same sums for each."""
        cache = self.attention_cache(3)
        for length in (1, 40):
            self.check(cache, 6, length, mask, sinks=length == 1)
