"""What the author of a method imports, and nothing else.

See :mod:`vq_core.hookspecs` for the contract.
"""

from pluggy import HookimplMarker

from vq_core.api.calibration import Artifact, Calibration
from vq_core.api.facts import API_VERSION, SIDES, Capabilities, MethodFacts, PrepareContext, Rope, Side
from vq_core.api.layout import DEFAULT_PAGE, Field, Layout
from vq_core.api.settings import setting
from vq_core.errors import (
    CacheStateError,
    FormatError,
    PluginError,
    SettingsError,
    UnsupportedShapeError,
    VQError,
)

hookimpl = HookimplMarker("vq")
"""Marks a function of a plugin as the implementation of a hook."""

__all__ = [
    "API_VERSION",
    "DEFAULT_PAGE",
    "SIDES",
    "Artifact",
    "CacheStateError",
    "Calibration",
    "Capabilities",
    "Field",
    "FormatError",
    "Layout",
    "MethodFacts",
    "PluginError",
    "PrepareContext",
    "Rope",
    "SettingsError",
    "Side",
    "UnsupportedShapeError",
    "VQError",
    "hookimpl",
    "setting",
]
