"""What a method says of itself, and what the core tells a method about the layer it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import attrs

from vq_core.errors import PluginError

API_VERSION = 1
"""Version of the contract in :mod:`vq_core.hookspecs`; a method states the one it was written for."""

Side = Literal["keys", "values"]
SIDES: tuple[Side, Side] = ("keys", "values")


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _sides(values: Iterable[Side]) -> tuple[Side, ...]:
    return tuple(values)


@attrs.frozen
class Capabilities:
    """What the conformance kit may demand of a method.

    Attributes:
        head_dims: Head sizes accepted, ``None`` for every size from 1 on.
        exact: Decoding returns the input bit for bit.
        trimmable: Codes may be cut at any block boundary. False: a trim behind the frontier is refused, and caches
            say from the start that they are not trimmable, so that a host refuses to speculate on them.
        constant_exact: A group of equal values decodes to that value.
        scale_equivariant: Encoding 8 x decodes to 8 times what x decodes to, to rounding.
        needs_calibration: The constants are learnt from a model by ``vq calibrate`` (the hook ``vq_calibrate``). The
            settings class then has a text setting ``artifact``, the path of what was learnt; without one a method is
            refused before ``vq_prepare``.  What lies far out of what was learnt comes back as the nearest number that
            the constants can hold.
        gaussian_error: ``(settings, head_dim) -> bound`` on the relative squared error of N(0, 1) data,
            ``None`` where the method bounds no reconstruction (a sketch, say).
    """

    head_dims: tuple[int, ...] | None = None
    exact: bool = False
    trimmable: bool = True
    constant_exact: bool = False
    scale_equivariant: bool = False
    needs_calibration: bool = False
    gaussian_error: Callable[[Any, int], float] | None = None

    @property
    def sizes(self) -> str:
        """The head sizes as text, three and more neighbours as one: 1 to 512, 640."""
        if self.head_dims is None:
            return "every size"
        runs: list[list[int]] = []
        for size in sorted(self.head_dims):
            if runs and size == runs[-1][-1] + 1:
                runs[-1].append(size)
            else:
                runs.append([size])
        return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


@attrs.frozen
class MethodFacts:
    """Static facts of a method, returned by ``vq_method``.

    Attributes:
        name: Canonical name: lower case letters, digits and ``_``; equal to the entry point's name.
        summary: One line.
        settings: A frozen attrs class made of :func:`vq_core.api.setting` fields.
        sides: The sides the method can hold.
        paper: Reference with its arXiv number or address; ``""`` if there is none.
        api_version: The :data:`API_VERSION` that the method was written for.
        per_layer: Whether the constants differ by layer. False: ``ctx.layer`` is ``None`` and all layers of one
            shape share what ``vq_prepare`` returns.
        capabilities: See :class:`Capabilities`.
        verified: Settings, such as ``"bits=2"``, with each of which ``vq verify`` runs the fused attention of a method
            that has snippets; by default with none given.
    """

    name: str
    summary: str
    settings: type
    sides: tuple[Side, ...] = attrs.field(default=SIDES, converter=_sides)
    paper: str = ""
    api_version: int = API_VERSION
    per_layer: bool = False
    capabilities: Capabilities = Capabilities()
    verified: tuple[str, ...] = attrs.field(default=(), converter=_texts)

    def __attrs_post_init__(self) -> None:
        if not attrs.has(self.settings):
            raise PluginError(f"method {self.name!r}: settings must be an attrs class, got {self.settings!r}")
        if self.capabilities.needs_calibration and not (
            self.per_layer and "artifact" in attrs.fields_dict(self.settings)
        ):
            raise PluginError(
                f"method {self.name!r} needs calibration: it must say per_layer=True, and its settings class must have "
                f"artifact: str = setting('')"
            )
        if not self.sides or not set(self.sides) <= set(SIDES):
            raise PluginError(f"method {self.name!r}: sides must be some of {SIDES}, got {self.sides}")


@attrs.frozen
class Rope:
    """Rotary embedding applied to the keys before the cache sees them.

    Attributes:
        kind: ``"half"`` (pairs i and i + D/2) or ``"interleaved"`` (pairs 2i and 2i + 1).
        base: Base of the frequencies.
        dims: Leading channels that are rotated.
    """

    kind: Literal["half", "interleaved"]
    base: float
    dims: int


@attrs.frozen
class PrepareContext:
    """The layer side that a method is prepared for.

    Attributes:
        side: ``"keys"`` or ``"values"``.
        kv_heads: Number of KV heads, H.
        key_dim: Head size of the keys.
        value_dim: Head size of the values; may differ from ``key_dim``.
        dtype: The model's dtype by name: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
        layer: Index of the layer, ``None`` outside a model and for methods that are not ``per_layer``.
        seed: Seed of every random constant.
        rope: Rotary embedding, ``None`` where it is not known.
        model: Identity of the model, ``None`` where it is not known and for methods that need no calibration.
    """

    side: Side
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    layer: int | None = None
    seed: int = 0
    rope: Rope | None = None
    model: str | None = None

    @property
    def head_dim(self) -> int:
        """Head size of this side, D."""
        return self.key_dim if self.side == "keys" else self.value_dim
