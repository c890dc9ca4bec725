"""The handle of a prepared model: makes its caches, tells what they hold, gives the model its own back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vq_core.cache.policy import CachePolicy
from vq_core.cache.report import LayerReport
from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm import hook
from vq_core.hosts.mlx_lm.fingerprint import identity
from vq_core.hosts.mlx_lm.layers import OURS, Place, by_layer, places
from vq_core.hosts.mlx_lm.made import Made
from vq_core.hosts.mlx_lm.report import LayerEntry, ModelReport
from vq_core.hosts.mlx_lm.sliding import Windows
from vq_core.hosts.mlx_lm.trial import Dense, try_out

MARK = "vq_handle"
"""Attribute of our ``make_cache`` function that leads to its handle."""


class CompressedModel:
    """Handle of a model prepared by :func:`compress`."""

    def __init__(self, model: Any, policy: CachePolicy, dense: Dense, windows: Windows = "auto"):
        self.model, self.policy = model, policy
        self._original, self._make_native = _native_makers(model)
        self._notes: list[str] = []
        self._warned: set[str] = set()
        self._made: list[Made] = []
        self._active = False
        native = self._native()
        policy.check(len(native))
        self._count = len(native)
        self._places = places(native, policy, windows)
        if policy.needs_calibration:
            known = identity(model)
            for place in self._places:
                place.model = known
        self._refuse_what_has_no_effect()
        hook.install()
        try:
            self._try_out(dense)
            self._refuse_what_has_no_effect()
        finally:
            hook.uninstall()
        self.redo()

    # ---- what the user calls

    def make_cache(self) -> list[Any]:
        """Fresh caches, one a layer: ours where the layer can be packed, else the model's own."""
        caches = self._fresh()
        self._made = [Made(place.at(caches)) for place in self._places]
        return caches

    def fresh(self) -> list[Any]:
        """Caches as :meth:`make_cache` makes them, which the report does not tell of."""
        return self._fresh()

    def adopt(self, caches: Sequence[Any]) -> None:
        """Let :meth:`report` tell of these caches, such as loaded ones, as of those made last."""
        self._made = [Made(place.at(caches)) for place in self._places]

    def plain_cache(self) -> list[Any]:
        """Fresh caches as the model makes them by itself, for comparison."""
        return self._native()

    def report(self, caches: Sequence[Any] | None = None) -> ModelReport:
        """What the caches hold.

        Args:
            caches: The caches to report; by default those that the model made last.
        """
        if caches is not None and len(caches) != self._count:
            raise SettingsError(f"report: {len(caches)} caches given; the model has {self._count} layers")
        found = self._made if caches is None else [Made(place.at(caches), keep=False) for place in self._places]
        made = found or [Made(None)] * len(self._places)
        entries = [self._entry(place, m) for place, m in zip(self._places, made, strict=True)]
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

        setattr(make_cache, MARK, self)
        self.model.make_cache = make_cache
        hook.install()
        self._active = True

    def undo(self) -> None:
        """Give the model its own caches back and, with the last handle, MLX its attention."""
        if not self._active:
            return
        self._active = False
        current = self.model.__dict__.get("make_cache")
        if getattr(current, MARK, None) is self:
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

    def _refuse_what_has_no_effect(self) -> None:
        for layer, found in by_layer(self._places):
            asked = [i for i in (layer, layer - self._count) if self.policy.layers.get(i) is not None]
            if asked and all(place.reason for place in found):
                why = "; ".join(dict.fromkeys(place.reason for place in found))
                raise SettingsError(f"layers: layer {layer} cannot be packed ({why}); leave {asked[0]} out of layers=")
            own = self.policy.layers[asked[0]].sink_tokens if asked else 0  # type: ignore[union-attr]
            if own and own != self.policy.default.sink_tokens and all(place.sliding for place in found):
                raise SettingsError(
                    f"layers: sink_tokens={own} has no effect in layer {layer}, a sliding window of {found[0].sliding} "
                    f"tokens, which the first tokens leave; leave it out of the entry {asked[0]}"
                )

    def _fresh(self, trial: bool = False) -> list[Any]:
        caches = self._native()
        for place in self._places:
            policy = self.policy.of(place.layer, self._count)
            if not place.reason and policy is not None:
                place.put(caches, place.fresh(policy, trial))
        return caches

    def _try_out(self, dense: Dense) -> None:
        self._notes += try_out(self.model, self._places, lambda: self._fresh(trial=True), dense)
        without = [str(place.layer) for place in self._places if place.sliding and not place.reason]
        if self.policy.default.sink_tokens and without:
            self._notes.append(
                f"no sink tokens in layers {', '.join(without)}: the first tokens leave a sliding window"
            )

    def _entry(self, place: Place, made: Made) -> LayerEntry:
        if place.reason:
            return LayerEntry(place.layer, "native", place.reason, place.native, None, made.nbytes(), place.child)
        if made.name and not made.ours:
            why = "this cache was not made by vq"
            return LayerEntry(place.layer, "native", why, made.name, None, made.nbytes(), place.child)
        report = made.report()
        if report is None:
            policy = self.policy.of(place.layer, self._count)
            assert policy is not None
            report = LayerReport(place.layer, policy.keys.text, policy.values.text)
        reason = place.dense
        if report.lost and not reason:
            reason = f"{report.lost} of {report.updates} updates were read densely, not by packed attention"
        if reason and report.bytes.fp16:
            itemsize = place.shape["dtype"].size if place.shape else 2
            reason += f"; a dense reading of all tokens takes {report.bytes.fp16 // 2 * itemsize:,} bytes"
        status = "dense" if reason else "packed"
        return LayerEntry(place.layer, status, reason, made.name or OURS[0].__name__, report, 0, place.child)

    def _warn(self, entries: Sequence[LayerEntry]) -> None:
        """Say once of each cache that it is read densely."""
        lost = [e for e in entries if e.report is not None and e.report.lost and e.place not in self._warned]
        if lost:
            self._warned.update(e.place for e in lost)
            each = "; ".join(f"layer {e.place}: {e.reason}" for e in lost)
            warnings.warn(f"not read by packed attention: {each}", RuntimeWarning, stacklevel=3)


def _native_makers(model: Any) -> tuple[Any, Any]:
    """``make_cache`` as set on the instance by somebody else, and as the model without ours has it, if at all."""
    own = model.__dict__.get("make_cache")
    earlier = getattr(own, MARK, None)
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
