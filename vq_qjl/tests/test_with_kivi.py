"""Keys of QJL beside values of KIVI at 2 bits, the published pair: fused attention, and trims. Needs vq-kivi."""

from __future__ import annotations

from vq_core.testing import SnippetConformance, TrimmingConformance


class TestBesideKivi(SnippetConformance, TrimmingConformance):
    method = "qjl:bits=1"  # at a head size of 80 the signs fill no whole words: they are read as bytes
    values = "kivi:bits=2"
    fused_shapes = ((80, "bfloat16"),)
