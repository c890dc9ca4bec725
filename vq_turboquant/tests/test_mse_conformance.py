"""turboquant_mse satisfies what every method has to."""

from vq_core.testing import MethodConformance


class TestMse(MethodConformance):
    method = "turboquant_mse:bits=2"
    variants = ("turboquant_mse:bits=3,rotation=haar,mean=first",)
    ladder = tuple(f"turboquant_mse:bits={bits}" for bits in (1, 2, 3, 4))
    fused_shapes = ((64, "float16"), (128, "float32"))
