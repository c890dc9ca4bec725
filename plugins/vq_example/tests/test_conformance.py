"""The kit: all that a method's package has to write."""

from __future__ import annotations

from vq_core.testing import MethodConformance


class TestExample(MethodConformance):
    method = "example:bits=4"
    variants = ("example:bits=1", "example:bits=2", "example:bits=3")
    ladder = (*variants, method)
