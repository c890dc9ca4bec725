"""``compress``: prepare a loaded mlx-lm model so that the caches it makes are packed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from vq_core.cache.policy import Attention, CachePolicy, Fallback, Kernels
from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm import hook
from vq_core.hosts.mlx_lm.handle import MARK, CompressedModel
from vq_core.hosts.mlx_lm.layers import OURS
from vq_core.hosts.mlx_lm.sliding import Windows
from vq_core.hosts.mlx_lm.trial import TRIED, Dense
from vq_core.hosts.mlx_lm.versions import check_version

__all__ = ["TRIED", "CompressedModel", "Dense", "compress", "compressed", "register"]


def compress(
    model: Any,
    *,
    method: str | None = None,
    keys: str | None = None,
    values: str | None = None,
    residual: int = 128,
    sink_tokens: int = 0,
    attention: Attention = "auto",
    fallback: Fallback = "error",
    kernels: Kernels = "auto",
    layers: Mapping[int, Any] | None = None,
    dense: Dense = "auto",
    windows: Windows = "auto",
) -> CompressedModel:
    """Prepare a loaded mlx-lm model: from now on the caches it makes hold packed codes.

    ``make_cache`` is set on the instance and MLX's attention function is replaced, once, by one that recognises
    our caches' arrays; no model file is touched.  Calling it again replaces the earlier preparation.

    Args:
        model: From ``mlx_lm.load``.
        method, keys, values, residual, sink_tokens, attention, fallback, kernels: As for :class:`PackedKVCache`.
        layers: Exceptions by layer index (negative ones count from the end): ``None`` leaves the layer's cache
            as the model makes it; a method's text form or a dict of keyword arguments replaces the default's.
            Indices count the caches that the model makes, which some layers lack; all caches that one layer has
            in a ``CacheList`` follow its entry.
        dense: Whether arrays that a cache returns have a lazy dense side: ``"lazy"`` always, ``"strict"`` never,
            ``"auto"`` where a trial run of the model's graph, on chunks of 64, 2 and 1 tokens, shows that something
            other than attention reads them, and always at other chunk lengths.
            A model that does so only after many tokens needs ``"lazy"``.
        windows: Layers that attend to a sliding window: ``"auto"`` packs those whose packed window would hold at
            most three quarters of the native one's bytes, ``"packed"`` all, ``"native"`` none. A layer that
            ``layers`` gives a method is packed. ``sink_tokens`` does not apply to them.

    Returns:
        A handle with ``make_cache()``, ``report()`` and ``undo()``.

    Raises:
        SettingsError, UnsupportedShapeError, PluginError: what is wrong, before the first token.
        HostError: an mlx-lm that vq does not know.
    """
    check_version()
    register()
    if not hasattr(model, "layers"):
        inside = ", or its language_model, which has layers" if hasattr(model, "language_model") else ""
        raise SettingsError(
            f"compress takes a model, the first of what mlx_lm.load returns{inside}; got {type(model).__name__}, "
            "which has no layers"
        )
    check_ways(dense, windows)
    policy = CachePolicy.make(
        method=method, keys=keys, values=values, residual=residual, sink_tokens=sink_tokens,
        attention=attention, fallback=fallback, kernels=kernels, layers=layers,
    )  # fmt: skip
    earlier = getattr(getattr(model, "make_cache", None), MARK, None)
    if earlier is None or earlier.model is not model:
        return CompressedModel(model, policy, dense, windows)
    hook.install()  # stays across: a generation with the earlier caches may be under way
    try:
        earlier.undo()
        try:
            return CompressedModel(model, policy, dense, windows)
        except (
            BaseException
        ):  # whatever it was, an interrupt too, it goes on; the earlier preparation is put back first
            earlier.redo()
            raise
    finally:
        hook.uninstall()


def check_ways(dense: str = "auto", windows: str = "auto") -> None:
    """Raise :class:`SettingsError` where ``dense`` or ``windows`` of :func:`compress` is not one that is accepted."""
    for name, value, accepted in (("dense", dense, get_args(Dense)), ("windows", windows, get_args(Windows))):
        if value not in accepted:
            raise SettingsError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")


def handle_of(model: Any) -> CompressedModel | None:
    """The handle that makes a model's caches now (for a copy, that of what it was copied from), ``None`` without."""
    handle = getattr(getattr(model, "make_cache", None), MARK, None)
    return handle if isinstance(handle, CompressedModel) else None


def register() -> None:
    """Let mlx-lm's ``load_prompt_cache`` find our classes: it looks them up by bare name in its own module."""
    from mlx_lm.models import cache

    for kind in OURS:
        setattr(cache, kind.__name__, kind)


@contextlib.contextmanager
def compressed(model: Any, **options: Any) -> Iterator[CompressedModel]:
    """:func:`compress` for the length of a ``with`` block."""
    handle = compress(model, **options)
    try:
        yield handle
    finally:
        handle.undo()
