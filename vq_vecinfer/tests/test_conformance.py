"""The kit: everything for one setting, codec, numbers and fused attention for the other kinds of settings."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vq_core.api import Side
from vq_core.testing import CodecConformance, MethodConformance, NumbersConformance, SnippetConformance
from vq_core.testing.kit import decode, pack, whole

FEW = {(1, 64), (2, 64), (3, 64), (8, 64), (2, 80), (2, 192), (2, 128)}


class TestVecInfer(MethodConformance):
    method = "vecinfer:sub=8,centroids=256"
    ladder = (method, "vecinfer:sub=4,centroids=256")
    fused_shapes = ((64, "float16"), (80, "bfloat16"), (128, "float32"))
    kernel_cases = 8


class TestWithMeans(CodecConformance, NumbersConformance, SnippetConformance):
    """A mean of each channel, and codes of 10 bits, which fill words only together with others."""

    method = "vecinfer:sub=4,centroids=1024,mean=true"
    head_dims = (64, 80)
    fused_shapes = ((80, "float16"),)

    def shapes(self) -> set[tuple[int, int]]:
        """Fewer."""
        return FEW

    def test_zero_vectors(self, text: str, side: Side) -> None:
        """What is coded of zeros is minus the mean: they come back as near to zero as a centroid is to that."""
        bound = self.bind(text, side)
        x = mx.zeros((1, self.kv_heads, whole(bound, 64), self.dim()), mx.float16)
        packed = pack(bound, x)
        got = np.array(decode(bound, packed, x.shape[2]))
        assert np.square(got).sum(axis=-1).max() > 0
        stored, mean = np.array(bound.state.unit(packed)), np.array(bound.state.mean)
        assert (np.square(stored).sum(axis=-1) <= np.square(mean).sum(axis=-1)[:, None]).all()


class TestCodebooksOfPlaces(NumbersConformance, SnippetConformance):
    method = "vecinfer:sub=8,centroids=256,codebooks=subspace"
    fused_shapes = ((64, "bfloat16"),)

    def shapes(self) -> set[tuple[int, int]]:
        """One."""
        return {(2, 64)}


class TestDefaults(NumbersConformance):
    """Keys of 4,096 centroids, values of 256; and four bits a number."""

    method = "vecinfer"
    variants = ("vecinfer:sub=2,centroids=256",)
    ladder = (method, *variants)

    def shapes(self) -> set[tuple[int, int]]:
        """One."""
        return {(2, 64)}
