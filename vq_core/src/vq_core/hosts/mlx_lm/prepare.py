"""``compress``: prepare a loaded mlx-lm model so that the caches it makes are packed."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import attrs
import mlx.core as mx

from vq_core.cache.policy import Attention, CachePolicy, Fallback
from vq_core.cache.report import LayerReport, describe
from vq_core.cache.shell import PackedKVCache
from vq_core.errors import SettingsError, VQError
from vq_core.hosts.mlx_lm import hook
from vq_core.hosts.mlx_lm.report import LayerEntry, ModelReport, held_bytes
from vq_core.hosts.mlx_lm.versions import check_version

Dense = Literal["auto", "lazy", "strict"]
TRIED = (64, 2, 1)
"""Lengths of the trial run's chunks: models branch on one token against several, and on short against long."""
_MARK = "vq_handle"
"""Attribute of our ``make_cache`` function that leads to its handle."""
_STRICT: Any = hook.WhileInstalled()
_NOT_STRICT = "dense='strict': the model does more with keys and values than attend"


@attrs.define
class _Layer:
    """What is known of one layer: its native cache's class, why it stays native, its shape once seen."""

    native: str
    reason: str
    shape: dict[str, Any] | None = None
    strict: bool = False
    dense: str = ""


class CompressedModel:
    """Handle of a model prepared by :func:`compress`."""

    def __init__(self, model: Any, policy: CachePolicy, dense: Dense):
        self.model, self.policy = model, policy
        self._original, self._make_native = _native_makers(model)
        self._notes: list[str] = []
        self._warned: set[int] = set()
        self._made: list[_Made] = []
        self._active = False
        native = self._native()
        policy.check(len(native))
        self._layers = [self._judge(i, cache, len(native)) for i, cache in enumerate(native)]
        self._refuse_what_has_no_effect()
        hook.install()
        try:
            self._try_out(dense)
        finally:
            hook.uninstall()
        self.redo()

    # ---- what the user calls

    def make_cache(self) -> list[Any]:
        """Fresh caches, one a layer: ours where the layer is full attention, else the model's own."""
        caches = self._fresh()
        self._made = [_Made(cache) for cache in caches]
        return caches

    def fresh(self) -> list[Any]:
        """Caches as :meth:`make_cache` makes them, which the report does not tell of."""
        return self._fresh()

    def adopt(self, caches: Sequence[Any]) -> None:
        """Let :meth:`report` tell of these caches, such as loaded ones, as of those made last."""
        self._made = [_Made(cache) for cache in caches]

    def plain_cache(self) -> list[Any]:
        """Fresh caches as the model makes them by itself, for comparison."""
        return self._native()

    def report(self, caches: Sequence[Any] | None = None) -> ModelReport:
        """What the caches hold.

        Args:
            caches: The caches to report; by default those that the model made last.
        """
        if caches is not None and len(caches) != len(self._layers):
            raise SettingsError(f"report: {len(caches)} caches given; the model has {len(self._layers)} layers")
        found = self._made if caches is None else [_Made(cache, keep=False) for cache in caches]
        made = found or [_Made(None)] * len(self._layers)
        entries = [self._entry(i, layer, m) for i, (layer, m) in enumerate(zip(self._layers, made, strict=True))]
        self._warn(entries)
        notes = list(self._notes)
        ours = [e.report for e in entries if e.report is not None]
        if not ours:
            notes.append("no layer is packed: every layer keeps the model's own cache")
        elif any(r.tokens for r in ours) and not any(r.packed for r in ours):
            notes.append("a method was asked for and no token is packed: the context is within the exact window")
        return ModelReport(tuple(entries), tuple(notes))

    def redo(self) -> None:
        """Prepare the model again after :meth:`undo`."""
        if self._active:
            return

        def make_cache() -> list[Any]:
            return self.make_cache()

        setattr(make_cache, _MARK, self)
        self.model.make_cache = make_cache
        hook.install()
        self._active = True

    def undo(self) -> None:
        """Give the model its own caches back and, with the last handle, MLX its attention."""
        if not self._active:
            return
        self._active = False
        current = self.model.__dict__.get("make_cache")
        if getattr(current, _MARK, None) is self:
            del self.model.make_cache
            if self._original is not None:
                self.model.make_cache = self._original
        hook.uninstall()

    # ---- inside

    def _native(self) -> list[Any]:
        """The caches that the model makes by itself; the model is not touched, another thread may be using it."""
        from mlx_lm.models.cache import make_prompt_cache

        if self._make_native is not None:
            return list(self._make_native())
        return list(make_prompt_cache(SimpleNamespace(layers=self.model.layers)))

    def _judge(self, index: int, cache: Any, count: int) -> _Layer:
        from mlx_lm.models.cache import KVCache

        name = type(cache).__name__
        if type(cache) is not KVCache:
            return _Layer(name, _why_native(cache))
        if self.policy.of(index, count) is None:
            return _Layer(name, "skipped by layers=")
        return _Layer(name, "")

    def _refuse_what_has_no_effect(self) -> None:
        count = len(self._layers)
        for index, entry in self.policy.layers.items():
            layer = self._layers[index % count]
            if entry is not None and layer.reason:
                raise SettingsError(
                    f"layers: layer {index % count} cannot be packed ({layer.reason}); leave {index} out of layers="
                )

    def _fresh(self) -> list[Any]:
        caches = self._native()
        for index, layer in enumerate(self._layers):
            policy = self.policy.of(index, len(self._layers))
            if layer.reason or policy is None:
                continue
            cache = PackedKVCache.from_policy(policy, layer=index, strict=layer.strict and _STRICT)
            if layer.shape is not None:
                cache.prepare_for(**layer.shape)
            caches[index] = cache
        return caches

    def _try_out(self, dense: Dense) -> None:
        """Call the model on a few tokens without evaluating anything.

        The graph alone tells each layer's heads, sizes and dtype, so the methods are bound, and refuse what
        they cannot do, before the first token.  It also shows whether what a cache returns goes to attention and
        nowhere else: then no dense side needs to be built at all.
        """
        if dense != "lazy":
            seen = self._dry_run(strict=True)
            if isinstance(seen, list):
                self._learn(seen, strict=True)
                left = [i for i, layer in enumerate(self._layers) if layer.shape and not layer.strict]
                if left and dense == "strict":
                    raise SettingsError(f"{_NOT_STRICT} in layers {left}; leave dense= out, or those layers by layers=")
                return
            if dense == "strict":
                raise SettingsError(f"{_NOT_STRICT}: {seen}")
        seen = self._dry_run(strict=False)
        if isinstance(seen, list):
            self._learn(seen, strict=False)
        else:
            self._notes.append(f"the model could not be tried out ({seen}); shapes are checked as they come")

    def _dry_run(self, strict: bool) -> list[Any] | str:
        for layer in self._layers:
            layer.strict = strict
        caches = self._fresh()
        try:
            for length in TRIED:
                self.model(mx.zeros((1, length), mx.int32), cache=caches)
        except VQError as error:
            index = next(
                (i for i, c in enumerate(caches) if isinstance(c, PackedKVCache) and not c.reads.updates), None
            )
            where = "" if index is None else f"layer {index} (leave it as it is by layers={{{index}: None}}): "
            raise type(error)(f"{where}{error}") from error
        except Exception as error:  # a model that touches keys in its own way; recorded and handled by the caller
            return f"{type(error).__name__}: {error}"
        return caches

    def _learn(self, caches: list[Any], strict: bool) -> None:
        for layer, cache in zip(self._layers, caches, strict=True):
            if not isinstance(cache, PackedKVCache):
                continue
            if cache._history is None:
                layer.reason = "the model never updates this layer's cache"
                continue
            ctx = cache._history.bound["keys"].ctx
            layer.shape = {
                "kv_heads": ctx.kv_heads, "key_dim": ctx.key_dim, "value_dim": ctx.value_dim,
                "dtype": getattr(mx, ctx.dtype),
            }  # fmt: skip
            clean = not cache.reads.lost and not cache.reads.dense
            layer.strict = strict and clean
            if cache.reads.lost:
                layer.dense = "the model computes on the fetched keys and values itself: packed at rest, read densely"

    def _entry(self, index: int, layer: _Layer, made: _Made) -> LayerEntry:
        if layer.reason:
            return LayerEntry(index, "native", layer.reason, layer.native, None, made.nbytes())
        if made.name not in ("", "PackedKVCache"):
            return LayerEntry(index, "native", "this cache was not made by vq", made.name, None, made.nbytes())
        report = made.report()
        if report is None:
            policy = self.policy.of(index, len(self._layers))
            assert policy is not None
            report = LayerReport(index, policy.keys.text, policy.values.text)
        reason = layer.dense
        if report.lost and not reason:
            reason = f"{report.lost} of {report.updates} updates were read densely, not by packed attention"
        if reason and report.bytes.fp16:
            itemsize = layer.shape["dtype"].size if layer.shape else 2
            reason += f"; a dense reading of all tokens takes {report.bytes.fp16 // 2 * itemsize:,} bytes"
        return LayerEntry(index, "dense" if reason else "packed", reason, "PackedKVCache", report)

    def _warn(self, entries: Sequence[LayerEntry]) -> None:
        """Say once of each layer that it is read densely."""
        lost = [e for e in entries if e.report is not None and e.report.lost and e.layer not in self._warned]
        if lost:
            self._warned.update(e.layer for e in lost)
            each = "; ".join(f"layer {e.layer}: {e.reason}" for e in lost)
            warnings.warn(f"not read by packed attention: {each}", RuntimeWarning, stacklevel=3)


def _native_makers(model: Any) -> tuple[Any, Any]:
    """``make_cache`` as set on the instance by somebody else, and as the model without ours has it, if at all."""
    own = model.__dict__.get("make_cache")
    earlier = getattr(own, _MARK, None)
    if earlier is None:
        return own, getattr(model, "make_cache", None)
    # Ours, of another model: this one is a copy of that.
    if earlier._original is not None:
        return earlier._original, earlier._original
    del model.make_cache
    try:
        return None, getattr(model, "make_cache", None)
    finally:
        model.make_cache = own


class _Made:
    """A cache as long as somebody holds it, and what it held when nobody does any more."""

    def __init__(self, cache: Any, keep: bool = True):
        self.name = "" if cache is None else type(cache).__name__
        self._report: LayerReport | None = None
        self._nbytes = 0
        self._cache = cache if not keep or cache is None else _reference(cache)
        if isinstance(self._cache, weakref.ref):
            # What was held is told from the instance's dictionary: the cache itself is gone by then.
            weakref.finalize(cache, self._close, cache.__dict__).atexit = False

    def _alive(self) -> Any:
        return self._cache() if isinstance(self._cache, weakref.ref) else self._cache

    def report(self) -> LayerReport | None:
        """Of one of our caches, ``None`` if there never was one."""
        cache = self._alive()
        return cache.report() if isinstance(cache, PackedKVCache) else self._report

    def nbytes(self) -> int:
        """Bytes of a native cache's arrays; mlx-lm's own ``nbytes`` raises while some of them are empty."""
        cache = self._alive()
        return self._nbytes if cache is None else held_bytes(cache)

    def _close(self, held: dict[str, Any]) -> None:
        if self.name == "PackedKVCache":
            self._report = describe(held["policy"], held["_history"], held["reads"], held["layer"])
        else:
            self._nbytes = held_bytes(held)


def _reference(cache: Any) -> Any:
    try:
        return weakref.ref(cache)
    except TypeError:  # a class with slots, of somebody else
        return None


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
    layers: Mapping[int, Any] | None = None,
    dense: Dense = "auto",
) -> CompressedModel:
    """Prepare a loaded mlx-lm model: from now on the caches it makes hold packed codes.

    ``make_cache`` is set on the instance and MLX's attention function is replaced, once, by one that recognises
    our caches' arrays; no model file is touched.  Calling it again replaces the earlier preparation.

    Args:
        model: From ``mlx_lm.load``.
        method, keys, values, residual, sink_tokens, attention, fallback: As for :class:`PackedKVCache`.
        layers: Exceptions by layer index (negative ones count from the end): ``None`` leaves the layer's cache
            as the model makes it; a method's text form or a dict of keyword arguments replaces the default's.
        dense: Whether arrays that a cache returns have a lazy dense side: ``"lazy"`` always, ``"strict"`` never,
            ``"auto"`` only where a trial run of the model's graph shows that something other than attention reads them.
            A model that does so at other chunk lengths than the trial's (64, 2 and 1 tokens) needs ``"lazy"``.

    Returns:
        A handle with ``make_cache()``, ``report()`` and ``undo()``.

    Raises:
        SettingsError, UnsupportedShapeError, PluginError: what is wrong, before the first token.
        HostError: an mlx-lm that vq does not know.
    """
    check_version()
    register()
    if not hasattr(model, "layers"):
        raise SettingsError(
            f"compress takes a model, the first of what mlx_lm.load returns; got {type(model).__name__}"
        )
    if dense not in ("auto", "lazy", "strict"):
        raise SettingsError(f"dense must be auto, lazy or strict; got {dense!r}")
    policy = CachePolicy.make(
        method=method, keys=keys, values=values, residual=residual, sink_tokens=sink_tokens,
        attention=attention, fallback=fallback, layers=layers,
    )  # fmt: skip
    earlier = getattr(getattr(model, "make_cache", None), _MARK, None)
    if earlier is None or earlier.model is not model:
        return CompressedModel(model, policy, dense)
    hook.install()  # stays across: a generation with the earlier caches may be under way
    try:
        earlier.undo()
        try:
            return CompressedModel(model, policy, dense)
        except (
            BaseException
        ):  # whatever it was, an interrupt too, it goes on; the earlier preparation is put back first
            earlier.redo()
            raise
    finally:
        hook.uninstall()


def handle_of(model: Any) -> CompressedModel | None:
    """The handle that makes a model's caches now (for a copy, that of what it was copied from), ``None`` without."""
    handle = getattr(getattr(model, "make_cache", None), _MARK, None)
    return handle if isinstance(handle, CompressedModel) else None


def register() -> None:
    """Let mlx-lm's ``load_prompt_cache`` find our class: it looks classes up by bare name in its own module."""
    from mlx_lm.models import cache

    cache.PackedKVCache = PackedKVCache  # type: ignore[attr-defined]


def _why_native(cache: Any) -> str:
    name = type(cache).__name__
    if "Rotating" in name:
        return f"{name}: a sliding window of {getattr(cache, 'max_size', '?')} tokens, bounded already"
    if "Chunked" in name:
        return f"{name}: attention within chunks, bounded already"
    if "Arrays" in name:
        return f"{name}: recurrent state, not keys and values"
    if name == "CacheList":
        inner = ", ".join(type(c).__name__ for c in getattr(cache, "caches", ()))
        return f"{name} of {inner}: several caches in one layer"
    return f"{name}: not a plain full-attention cache"


@contextlib.contextmanager
def compressed(model: Any, **options: Any) -> Iterator[CompressedModel]:
    """:func:`compress` for the length of a ``with`` block."""
    handle = compress(model, **options)
    try:
        yield handle
    finally:
        handle.undo()
