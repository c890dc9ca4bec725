"""How results stand in records: one arm against another, and rates."""

from __future__ import annotations

from typing import Any

from vq_core.bench.clock import Comparison, Timing


def against(found: Comparison, name: str, base: str) -> dict[str, Any]:
    """One arm against another, with the noise floor, or why there is no ratio."""
    ratio = found.ratio(name, base)
    return {
        "base": base,
        "times_as_fast": None if ratio is None else round(1 / ratio, 4),
        "noise_floor": round(found.floor(name, base), 4),
        "inside_noise": found.inside_noise(name, base),
        "refused": list(found.refused(name, base)),
        "said": found.said(name, base),
    }


def per_second(timing: Timing, count: float) -> dict[str, float]:
    """``count`` things in one timing's seconds: the median, the slowest and the fastest."""
    return {
        "median": round(count / timing.median, 3),
        "min": round(count / timing.high, 3),
        "max": round(count / timing.low, 3),
    }
