"""KIVI on the conformance kit: what a package of a method writes."""

from __future__ import annotations

from vq_core.testing import MethodConformance


class TestKivi(MethodConformance):
    method = "kivi:bits=2"
    variants = ("kivi:bits=3", "kivi:bits=4", "kivi:bits=8", "kivi:bits=2,group_size=64", "kivi:bits=4,group_size=128")
    ladder = ("kivi:bits=2", "kivi:bits=3", "kivi:bits=4", "kivi:bits=8")
