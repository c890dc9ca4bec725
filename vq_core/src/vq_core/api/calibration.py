"""What a method learns its constants from, and what it gets back of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import mlx.core as mx


@attrs.frozen(eq=False)
class Calibration:
    """What one layer side was given while a model read the calibration text.

    Attributes:
        samples: (H, n, D) float32, tokens drawn uniformly and without replacement from all that were read, as the
            cache was given them: keys after the rotary embedding.
        tokens: How many were read.
        low, high, mean: (H, D) float32, smallest and largest number and mean of each channel over all tokens read.
        rounds: The most rounds that an iteration should take.
    """

    samples: mx.array
    tokens: int
    low: mx.array
    high: mx.array
    mean: mx.array
    rounds: int = 25


@attrs.frozen(eq=False)
class Artifact:
    """What was learnt for one layer side, read from a file and checked to be of this method, model and side.

    Attributes:
        arrays: What ``vq_calibrate`` returned.
        digest: SHA-256 of the file's content; a saved cache records it.
    """

    arrays: Mapping[str, mx.array]
    digest: str
