"""vq: KV-cache compression for MLX and mlx-lm, one plugin a method.

Importing this package is cheap and works where MLX is missing or broken: whatever needs MLX is imported when
its name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vq_core.errors import (
    CacheStateError,
    FormatError,
    HostError,
    PluginError,
    SettingsError,
    UnsupportedShapeError,
    VQError,
)
from vq_core.hosts.loading import announce

if TYPE_CHECKING:
    from vq_core.cache.policy import CachePolicy
    from vq_core.cache.shell import PackedKVCache
    from vq_core.hosts.mlx_lm import compress
    from vq_core.hosts.mlx_lm.saved import load_cache, read_metadata, save_cache
    from vq_core.plugins.registry import list_methods

    __version__: str

_LAZY = {
    "CachePolicy": "vq_core.cache.policy",
    "PackedKVCache": "vq_core.cache.shell",
    "compress": "vq_core.hosts.mlx_lm",
    "list_methods": "vq_core.plugins.registry",
    "load_cache": "vq_core.hosts.mlx_lm.saved",
    "read_metadata": "vq_core.hosts.mlx_lm.saved",
    "save_cache": "vq_core.hosts.mlx_lm.saved",
}

__all__ = [
    "CachePolicy",
    "CacheStateError",
    "FormatError",
    "HostError",
    "PackedKVCache",
    "PluginError",
    "SettingsError",
    "UnsupportedShapeError",
    "VQError",
    "__version__",
    "compress",
    "list_methods",
    "load_cache",
    "read_metadata",
    "save_cache",
]

announce()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vq-core")
    except PackageNotFoundError:
        # A source tree on PYTHONPATH, not installed: there is no metadata to read, and none to trust.
        return "0+unknown"
