"""Which mlx-lm is installed, and whether we speak its cache protocol."""

from __future__ import annotations

import re
from importlib import metadata

from vq_core.errors import FormatError, HostError

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


def other_protocol() -> HostError:
    """The error for a caller that speaks the protocol of mlx-lm before 0.32."""
    try:
        installed = f"mlx-lm {metadata.version('mlx-lm')} is installed"
    except metadata.PackageNotFoundError:
        installed = "mlx-lm is not installed"
    return HostError(
        f"from_state was given a meta_state, as mlx-lm before 0.32 does; vq speaks the protocol of 0.32, where all of "
        f"a cache is in its state ({installed}). A cache file of one generation does not load in the other"
    )


def check_saved(version: str) -> None:
    """Refuse a cache saved under an mlx-lm of another protocol.

    Raises:
        FormatError: it is one; both versions are named.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < BELOW:
        raise FormatError(
            f"the caches were saved with mlx-lm {version}, whose cache protocol differs from that of the installed "
            f"{check_version()}: load them with mlx-lm {version}, or make them again"
        )
