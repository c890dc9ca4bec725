"""Which mlx-lm is installed, and whether we speak its cache protocol."""

from __future__ import annotations

import re
from importlib import metadata

from vq_core.errors import HostError

OLDEST, BELOW = (0, 32), (0, 33)
TESTED = ("0.32.0", "0.32.2")
"""Oldest and newest mlx-lm that the tests were run on."""


def check_version() -> str:
    """The installed mlx-lm's version.

    Raises:
        HostError: mlx-lm is missing, or outside the range whose cache protocol is known.
    """
    try:
        version = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        raise HostError("mlx-lm is not installed: pip install 'mlx-lm>=0.32,<0.33'") from None
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < BELOW:
        raise HostError(
            f"mlx-lm {version} is installed; vq speaks the cache protocol of 0.32 (tested on {TESTED[0]} to "
            f"{TESTED[1]}), which changed between 0.31 and 0.32: pip install 'mlx-lm>=0.32,<0.33'"
        )
    return version
