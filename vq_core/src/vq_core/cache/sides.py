"""Binding both methods of a layer to its shape, in the order of pages that its attention reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vq_core.api.facts import SIDES, PrepareContext
from vq_core.attention.choice import require
from vq_core.cache.policy import LayerPolicy
from vq_core.plugins.binding import BoundSide, bind
from vq_core.plugins.device import together
from vq_core.plugins.fused import backend_for
from vq_core.plugins.registry import resolve


def bind_sides(
    policy: LayerPolicy, shape: Mapping[str, Any], layer: int | None, device_form: bool
) -> tuple[BoundSide, BoundSide]:
    """Keys' and values' methods, bound.

    Args:
        policy: The layer's.
        shape: Of :class:`PrepareContext`, but for side and layer; the model's identity is for methods whose constants
            are learnt from it.
        layer: The layer's index, for methods whose constants differ by layer.
        device_form: Hold pages in a device form where both methods have one, whatever the tier.

    Raises:
        SettingsError, UnsupportedShapeError: a method refuses the shape, or the tier asked for cannot serve it.
        PluginError: a method breaks the contract.
    """
    given = []
    for side, choice in zip(SIDES, (policy.keys, policy.values), strict=True):
        facts = resolve(choice.label).facts
        own = layer if facts and facts.per_layer else None
        model = shape.get("model") if facts and facts.capabilities.needs_calibration else None
        ctx = PrepareContext(side=side, layer=own, **{**shape, "model": model})
        given.append((choice, ctx, policy.fallback, policy.kernels))
    sides = [bind(*one) for one in given]
    if device_form or _reads_device_form(policy):
        sides = together([bind(*one, device=True) for one in given], sides)
    require(policy.attention, *sides)
    return sides[0], sides[1]


def _reads_device_form(policy: LayerPolicy) -> bool:
    """Whether the tier is, or may be, the one on tensor cores."""
    return policy.attention == "matrix" or (policy.attention == "auto" and backend_for(policy.kernels)[0] == "cuda")
