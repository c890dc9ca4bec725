"""What a whole model's caches hold, layer by layer."""

from __future__ import annotations

from typing import Any

import attrs

from vq_core.cache.report import Bytes, LayerReport
from vq_core.cache.shell import PackedKVCache
from vq_core.plugins.binding import state_arrays


@attrs.frozen
class LayerEntry:
    """One layer of the model, or one of the several caches that a layer has.

    Attributes:
        layer: Index.
        status: ``"packed"``: our cache, read packed; ``"dense"``: our cache, packed at rest, but the model computes
            on dense arrays; ``"native"``: the model's own cache.
        reason: Why it is not packed, or why it is read densely.
        cache: Class of the cache.
        report: Our cache's report; ``None`` for a native one.
        native_bytes: Bytes of a native cache, where it can tell.
        child: Index of the cache within the layer, where the layer has several; else ``None``.
    """

    layer: int
    status: str
    reason: str
    cache: str
    report: LayerReport | None = None
    native_bytes: int = 0
    child: int | None = None

    @property
    def place(self) -> str:
        """``"3"``, or ``"3.1"`` for the second cache of layer 3."""
        return str(self.layer) if self.child is None else f"{self.layer}.{self.child}"


def held_bytes(cache: Any) -> int:
    """Bytes of all arrays of a cache, or of a cache's dictionary.

    mlx-lm's own ``nbytes`` raises while some classes of caches are empty; ours leaves out what layers share.
    """
    if isinstance(cache, PackedKVCache):
        return cache.nbytes
    if isinstance(inner := getattr(cache, "caches", None), list | tuple):
        return sum(map(held_bytes, inner))
    held = cache if isinstance(cache, dict) else getattr(cache, "__dict__", {})
    return sum(array.nbytes for array in state_arrays(held))


@attrs.frozen
class ModelReport:
    """All layers of a model's caches.

    Attributes:
        layers: One entry a layer, or one for each cache of a layer that has several.
        notes: What the user should know, in words.
    """

    layers: tuple[LayerEntry, ...]
    notes: tuple[str, ...] = ()

    @property
    def packed_layers(self) -> list[LayerReport]:
        """Reports of the layers that our caches hold."""
        return [entry.report for entry in self.layers if entry.report is not None]

    @property
    def bytes(self) -> Bytes:
        """Sums over our layers; constants that several layers share count once."""
        kinds = [f.name for f in attrs.fields(Bytes)]
        sums = {kind: sum(getattr(r.bytes, kind) for r in self.packed_layers) for kind in kinds}
        shared = {id(a): a.nbytes for r in self.packed_layers for a in r.constants}
        return Bytes(**sums | {"constants": sum(shared.values())})

    @property
    def native_bytes(self) -> int:
        """Bytes of the layers that keep the model's own cache."""
        return sum(entry.native_bytes for entry in self.layers)

    @property
    def packed(self) -> int:
        """Tokens held as codes, summed over our layers."""
        return sum(r.packed for r in self.packed_layers)

    def tokens(self) -> tuple[int, int, int]:
        """(packed, exact, approximate) tokens of the layer that holds most."""
        most = max(self.packed_layers, key=lambda r: r.tokens, default=None)
        return (0, 0, 0) if most is None else (most.packed, most.exact, most.approximate)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        layers = [
            attrs.asdict(e, filter=lambda a, _: a.name != "report")
            | {"report": None if e.report is None else e.report.as_dict()}
            for e in self.layers
        ]
        total = attrs.asdict(self.bytes) | {"held": self.bytes.held, "ratio": round(self.bytes.ratio, 4)}
        return {"layers": layers, "bytes": total, "native_bytes": self.native_bytes, "notes": list(self.notes)}
