"""turboquant_mse on the conformance kit: everything at one head size, and what a head size and a setting change."""

from __future__ import annotations

from vq_core.testing import CodecConformance, MethodConformance, NumbersConformance, TrimmingConformance


class TestMse(MethodConformance):
    method = "turboquant_mse:bits=2"
    variants = ("turboquant_mse:bits=3,rotation=haar,mean=first",)
    ladder = tuple(f"turboquant_mse:bits={bits}" for bits in (1, 2, 3, 4))
    fused_shapes = ((64, "float16"), (128, "float32"))
    kernel_cases = 12


class Sized(CodecConformance, NumbersConformance):
    head_dims = (64,)


class TestMse80(Sized):
    """Codes that fill no whole words, and a dense rotation."""

    method = "turboquant_mse:bits=3,rotation=haar"
    head_dim = 80


class TestMse96(Sized, TrimmingConformance):
    """Twelve runs of eight; the published scale; blocks of 32 tokens."""

    method = "turboquant_mse:bits=1,scale=raw,mean=first"
    head_dim = 96


class TestMse128(Sized):
    """Two groups of channels."""

    method = "turboquant_mse:bits=2.5"
    variants = ("turboquant_mse:bits=3.5,rotation=haar,scale=unbiased,mean=first",)
    ladder = tuple(f"turboquant_mse:bits={bits}" for bits in (1, 2, 2.5, 3, 3.5, 4))
    head_dim = 128


class TestMse256(Sized):
    method = "turboquant_mse:bits=4,scale=unbiased"
    head_dim = 256
