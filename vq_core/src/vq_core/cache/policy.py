"""Which method holds which side of which layer, and how much stays exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from vq_core.api.facts import SIDES
from vq_core.calibration.artifact import plain_settings
from vq_core.errors import SettingsError
from vq_core.plugins.choice import SideChoice, choose
from vq_core.plugins.registry import resolve

Attention = Literal["auto", "matrix", "kernel", "mlx", "reference"]
Fallback = Literal["error", "warn"]
Kernels = Literal["auto", "off", "simulator"]
ATTENTION: tuple[Attention, ...] = ("auto", "matrix", "kernel", "mlx", "reference")
ON_DEVICES: tuple[Attention, ...] = ("matrix", "kernel")
KERNELS: tuple[Kernels, ...] = ("auto", "off", "simulator")
FALLBACK: tuple[Fallback, ...] = ("error", "warn")


def _count(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SettingsError(f"{attribute.name} must be a whole number of tokens, 0 or more; got {value!r}")


def _among(accepted: tuple[str, ...]) -> Any:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in accepted:
            raise SettingsError(f"{attribute.name} must be one of {', '.join(accepted)}; got {value!r}")

    return check


@attrs.frozen
class LayerPolicy:
    """What one layer's cache does.

    Attributes:
        keys: Method of the keys.
        values: Method of the values.
        residual: The newest tokens that stay exact, R; up to R + block - 1 do.
        sink_tokens: The first tokens of the sequence that stay exact.
        attention: ``"matrix"``: the fused kernel on tensor cores, for up to 16 queries, with pages held in the order
            that it reads; ``"kernel"``: the fused kernel of every device; ``"mlx"``: plain MLX
            operations on packed codes; ``"reference"``: dense float32 attention over the decoded cache; ``"auto"``:
            the fastest that fits.
        fallback: What a failing probe of a method's attention or kernels does: ``"error"``, or ``"warn"``: go on
            without.
        kernels: ``"auto"``: a method's kernels where the device has a backend for them; ``"off"``: plain MLX
            operations; ``"simulator"``: its kernels on the CPU, checked and slow.
    """

    keys: SideChoice
    values: SideChoice
    residual: int = attrs.field(default=128, validator=_count)
    sink_tokens: int = attrs.field(default=0, validator=_count)
    attention: Attention = attrs.field(default="auto", validator=_among(ATTENTION))
    fallback: Fallback = attrs.field(default="error", validator=_among(FALLBACK))
    kernels: Kernels = attrs.field(default="auto", validator=_among(KERNELS))

    @classmethod
    def make(
        cls, *, method: str | None = None, keys: str | None = None, values: str | None = None, **rest: Any
    ) -> LayerPolicy:
        """From the text forms; ``method`` means both sides and excludes ``keys`` and ``values``.

        Raises:
            SettingsError: contradicting or missing methods, or a value that is not accepted.
        """
        if method is not None and (keys is not None or values is not None):
            raise SettingsError("give either method (both sides) or keys and values, not both")
        names = {"keys": keys or method, "values": values or method}
        missing = [side for side in SIDES if not names[side]]
        if missing:
            raise SettingsError(
                f"no method for the {' and '.join(missing)}: give method (such as kivi:bits=4), or both keys and values"
            )
        chosen = {side: choose(names[side] or "", side) for side in SIDES}
        return cls(chosen["keys"], chosen["values"], **rest)

    @property
    def but_for_files(self) -> LayerPolicy:
        """The policy without the names of files of learnt constants, which are compared by what is in them."""
        return attrs.evolve(self, keys=_but_for_file(self.keys), values=_but_for_file(self.values))

    @property
    def text(self) -> dict[str, Any]:
        """Keyword arguments that make this policy again on any machine; plain text and numbers.

        A tier that needs a device is not among them: another machine takes its own fastest.
        """
        named = {name: getattr(self, name) for name in ("residual", "sink_tokens", "attention", "fallback")}
        if self.attention in ON_DEVICES:
            named["attention"] = "auto"
        return {"keys": self.keys.text, "values": self.values.text} | named


def _but_for_file(choice: SideChoice) -> SideChoice:
    facts = resolve(choice.label).facts
    if facts is None or not facts.capabilities.needs_calibration:
        return choice
    return attrs.evolve(choice, settings=plain_settings(choice.settings))


@attrs.frozen
class CachePolicy:
    """A layer policy for a whole model, with exceptions.

    Attributes:
        default: Policy of every layer that ``layers`` does not name.
        layers: By layer index: another policy, or ``None`` to leave that layer's cache as the model makes it.
    """

    default: LayerPolicy
    layers: Mapping[int, LayerPolicy | None] = attrs.field(factory=dict)

    @classmethod
    def make(cls, *, layers: Mapping[int, Mapping[str, Any] | str | None] | None = None, **default: Any) -> CachePolicy:
        """From keyword arguments; ``layers`` maps an index to changes of the default.

        A layer's entry is ``None`` (skip it), a method's text form (both sides), or keyword arguments of
        :meth:`LayerPolicy.make` that replace the default's.

        Raises:
            SettingsError: as :meth:`LayerPolicy.make`, naming the layer.
        """
        base = LayerPolicy.make(**default)
        if layers is not None and not isinstance(layers, Mapping):
            raise SettingsError(f"layers: give a dictionary such as {{0: None, -1: 'kivi:bits=8'}}, got {layers!r}")
        made: dict[int, LayerPolicy | None] = {}
        for index, entry in (layers or {}).items():
            if isinstance(index, bool) or not isinstance(index, int):
                raise SettingsError(f"layers: keys are layer indices, got {index!r}")
            if entry is None:
                made[index] = None
                continue
            if not isinstance(entry, str | Mapping):
                raise SettingsError(
                    f"layer {index}: give None, a method such as 'kivi:bits=8' or keyword arguments, got {entry!r}"
                )
            changes = {"method": entry} if isinstance(entry, str) else dict(entry)
            kept = base.text | {"kernels": base.kernels, "attention": base.attention}
            if "method" in changes:
                kept.pop("keys"), kept.pop("values")
            try:
                made[index] = LayerPolicy.make(**(kept | changes))
            except TypeError as error:
                raise SettingsError(f"layer {index}: {error}") from None
            except SettingsError as error:
                raise SettingsError(f"layer {index}: {error}") from None
        return cls(base, made)

    @property
    def needs_calibration(self) -> bool:
        """Whether a method's constants are learnt from the model, so that its identity must be known."""
        named = [policy for policy in (self.default, *self.layers.values()) if policy is not None]
        facts = [resolve(choice.label).facts for policy in named for choice in (policy.keys, policy.values)]
        return any(f is not None and f.capabilities.needs_calibration for f in facts)

    def of(self, layer: int, count: int) -> LayerPolicy | None:
        """Policy of a layer; negative indices in ``layers`` count from the end of ``count`` layers."""
        for index in (layer, layer - count):
            if index in self.layers:
                return self.layers[index]
        return self.default

    def check(self, count: int) -> None:
        """Raise :class:`SettingsError` if ``layers`` names a layer that a model of ``count`` layers lacks."""
        wrong = [index for index in self.layers if not -count <= index < count]
        if wrong:
            raise SettingsError(f"layers: the model has layers 0 to {count - 1}, not {wrong}")
        twice = [index for index in self.layers if index < 0 and index + count in self.layers]
        if twice:
            raise SettingsError(f"layers: {twice} name layers that are named by {[i + count for i in twice]} as well")
