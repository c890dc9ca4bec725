"""Where and how something was measured."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib import metadata
from typing import Any

import mlx.core as mx

from vq_core.plugins.loader import GROUP


def environment() -> dict[str, Any]:
    """Device, versions, load and command, for the record of a measurement."""
    methods = {entry.dist.name for entry in metadata.entry_points(group=GROUP) if entry.dist is not None}
    names = (
        "vq-core",
        *sorted(methods),
        "mlx",
        "mlx-metal",
        "mlx-cpu",
        "mlx-cuda-12",
        "mlx-cuda-13",
        "mlx-lm",
        "numpy",
    )
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": str(mx.default_device()),
        "device_info": {name: value for name, value in sorted(mx.device_info().items())},
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": versions,
        "mlx_settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MLX_")},
        "command": shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]]),
    }
