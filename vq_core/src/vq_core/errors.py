"""Every error that vq raises on purpose.

A message says what was given, what is accepted, and the way out.  What can be known from shapes, dtypes
and settings is raised before any state changes.
"""

from __future__ import annotations


class VQError(Exception):
    """Base of all errors raised by vq and its methods."""


class SettingsError(VQError, ValueError):
    """A method name, a setting or an argument that is not accepted."""


class UnsupportedShapeError(VQError, ValueError):
    """A shape or dtype that the method, the cache or the attention path cannot take."""


class PluginError(VQError, RuntimeError):
    """An installed method that cannot be loaded, or that breaks the contract of :mod:`vq_core.hookspecs`."""


class FormatError(VQError, ValueError):
    """Stored data that is not what it claims to be."""


class CacheStateError(VQError, RuntimeError):
    """A call that the cache's present state does not allow, such as attention on an empty cache."""


class HostError(VQError, RuntimeError):
    """The host library (mlx-lm) is missing, or of a version whose cache protocol vq does not speak."""


class KernelError(VQError, RuntimeError):
    """A kernel that does not compile, breaks a rule of the dialect, or is launched with what it does not take."""
