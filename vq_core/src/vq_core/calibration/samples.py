"""A bounded sample of all tokens that a model reads, and statistics of every one of them.

Memory does not depend on the text's length: K tokens of each layer side, and four numbers a channel.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.api.calibration import Calibration
from vq_core.errors import SettingsError

Numbers = np.ndarray[Any, Any]


class Draw:
    """Which tokens stay: the same in every layer, each with the same chance (Vitter's algorithm R).

    Args:
        most: K.
        seed: Of numpy's generator.
    """

    def __init__(self, most: int, seed: int):
        self.most, self.seen, self._rng = most, 0, np.random.default_rng((seed, most))

    def next(self, count: int) -> tuple[Numbers, Numbers]:
        """For the next ``count`` tokens: places among them, and where in the sample each goes."""
        kept: dict[int, int] = {}
        for i in range(count):
            at = self.seen + i
            slot = at if at < self.most else int(self._rng.integers(0, at + 1))
            if slot < self.most:
                kept[slot] = i  # a later token takes an earlier one's place
        self.seen += count
        return np.fromiter(kept.values(), np.int64, len(kept)), np.fromiter(kept.keys(), np.int64, len(kept))


class Sample:
    """One layer side's.

    Args:
        most: K.
        heads: H.
        dim: D.
        dtype: Of the model's numbers; float16 is kept as it is, others in float32.
    """

    def __init__(self, most: int, heads: int, dim: int, dtype: str):
        self.kept: Numbers = np.zeros((most, heads, dim), np.float16 if dtype == "float16" else np.float32)
        self.low: Numbers = np.full((heads, dim), np.inf, np.float32)
        self.high: Numbers = np.full((heads, dim), -np.inf, np.float32)
        self.total: Numbers = np.zeros((heads, dim), np.float64)
        self.tokens = 0

    def add(self, x: mx.array, places: Numbers, slots: Numbers) -> None:
        """Tokens x (1, H, n, D): all count, those at ``places`` go to ``slots``."""
        wide: Numbers = np.array(x[0].astype(mx.float32)).swapaxes(0, 1)  # (n, H, D)
        self.low, self.high = np.minimum(self.low, wide.min(axis=0)), np.maximum(self.high, wide.max(axis=0))
        self.total += wide.sum(axis=0, dtype=np.float64)
        self.kept[slots] = wide[places]
        self.tokens += len(wide)

    def calibration(self, rounds: int, where: str) -> Calibration:
        """What a method learns from.

        Raises:
            SettingsError: numbers that are not finite.
        """
        if not (np.isfinite(self.low).all() and np.isfinite(self.high).all() and np.isfinite(self.total).all()):
            raise SettingsError(f"{where}: the model gives NaN or infinity on this text; nothing can be learnt from it")
        kept = self.kept[: min(self.tokens, len(self.kept))].astype(np.float32)
        mean = (self.total / self.tokens).astype(np.float32)
        return Calibration(
            mx.array(kept.swapaxes(0, 1)), self.tokens, mx.array(self.low), mx.array(self.high), mx.array(mean), rounds
        )
