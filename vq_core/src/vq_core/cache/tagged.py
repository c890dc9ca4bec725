"""Tags: what ``update_and_fetch`` returns.

mlx-lm's models pass what a cache returns to ``mx.fast.scaled_dot_product_attention`` and mostly do nothing else
with it.  A tag is a real array whose value is an unevaluated expression of the dense tokens, and which carries
the packed reading; a host's hook recognises it and the dense expression is dropped unevaluated.  Any other
operation on it computes densely: slower, correct, and counted.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import mlx.core as mx

from vq_core.attention import view as views
from vq_core.attention.packed import attend
from vq_core.attention.view import CacheView
from vq_core.errors import CacheStateError


@attrs.define(eq=False)
class ReadCount:
    """How what a cache returned was read.

    Attributes:
        updates: Calls of ``update_and_fetch``.
        packed: Attentions that read the packed reading.
        dense: Strict tags that were asked for their dense value.
        last: The updates up to which an attention has read packed.
        fetches: Calls of ``keys_and_values``.
        latent: Attentions that took the key side as keys and values both.
    """

    updates: int = 0
    packed: int = 0
    dense: int = 0
    last: int = 0
    read: int = 0
    fetches: int = 0
    latent: int = 0

    def attended(self) -> None:
        """Count one attention on the packed reading."""
        self.packed += 1
        if self.last != self.updates:
            self.last = self.updates
            self.read += 1

    @property
    def lost(self) -> int:
        """Updates whose tags no attention has read: the model computed densely, or not at all."""
        return self.updates - self.read


class Coming(Protocol):
    """A decode step's reading, of which most steps need a part."""

    @property
    def view(self) -> CacheView:
        """All of it, made now."""

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: Any, tier: str) -> mx.array | None:
        """Attention where the step is like the last one; ``None`` where it has to be looked at."""


@attrs.define(eq=False)
class Reading:
    """What a pair of tags stands for; not to be changed.

    Attributes:
        tier: Of attention.
        reads: The cache's count.
        fallback: The policy's.
    """

    _view: CacheView | Coming
    tier: str
    reads: ReadCount
    fallback: str = "error"

    @property
    def view(self) -> CacheView:
        """The cache's tokens."""
        if not isinstance(self._view, CacheView):
            self._view = self._view.view
        return self._view

    def attend(self, queries: mx.array, *, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
        """Attention on the packed reading."""
        self.reads.attended()
        if not isinstance(self._view, CacheView):
            out = self._view.attend(queries, scale, mask, sinks, self.tier)
            if out is not None:
                return out
        return attend(self.view, queries, scale=scale, mask=mask, sinks=sinks, tier=self.tier, fallback=self.fallback)


class TaggedArray(mx.array):
    """An array that carries the packed reading it is the dense value of; lost by every operation."""

    vq_reading: Reading
    vq_side: str


class Strictness(Protocol):
    """A host's word on whether tags may be strict now."""

    def lease(self) -> object | None:
        """What strict tags hold as long as they live, ``None`` where they must not be strict."""


class StrictTag:
    """A tag without a dense side; made where a host knows that only attention reads it.

    Asking it for anything but its shape makes the dense side after all, plainly, and counts it.
    """

    __slots__ = ("_dense", "_lease", "vq_reading", "vq_side")

    def __init__(self, reading: Reading, side: str, lease: object = None):
        self.vq_reading, self.vq_side, self._lease = reading, side, lease
        self._dense: mx.array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, T, D)."""
        view = self.vq_reading.view
        return (view.rows, view.heads, view.length, getattr(view, self.vq_side).dim)

    @property
    def dtype(self) -> mx.Dtype:
        """The model's dtype."""
        dtype: mx.Dtype = getattr(self.vq_reading.view, self.vq_side).dtype
        return dtype

    @property
    def ndim(self) -> int:
        """4."""
        return 4

    def dense(self) -> mx.array:
        """The dense value, made on demand."""
        if self._dense is None:
            view = self.vq_reading.view
            self._dense = views.dense(view, getattr(view, self.vq_side))
            self.vq_reading.reads.dense += 1
        return self._dense

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> mx.array:
        return self.dense()[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise CacheStateError("what update_and_fetch returned is for one step and cannot be copied")


def _operator(name: str) -> Any:
    def call(self: StrictTag, *args: Any) -> Any:
        return getattr(self.dense(), name)(*args)

    return call


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "rmatmul", "neg"):
    setattr(StrictTag, f"__{_name}__", _operator(f"__{_name}__"))


_TAGS: tuple[type, ...] = (StrictTag, TaggedArray)


def tag(
    view: CacheView | Coming, attention: str, reads: ReadCount, strict: bool | Strictness, fallback: str = "error"
) -> tuple[Any, Any]:
    """The pair of tags for a reading."""
    reading = Reading(view, attention, reads, fallback)
    lease = strict if isinstance(strict, bool) else strict.lease()
    if lease:
        return StrictTag(reading, "keys", lease), StrictTag(reading, "values", lease)
    pair, whole = [], reading.view
    for side, stored in (("keys", whole.keys), ("values", whole.values)):
        made = TaggedArray(views.dense(whole, stored))
        made.vq_reading, made.vq_side = reading, side
        pair.append(made)
    return pair[0], pair[1]


def reading_of(keys: Any, values: Any) -> Reading | None:
    """The reading that both tags share, ``None`` if these are not a pair of tags.

    One key tag as both is latent attention: the reading then has the key side as its values.
    """
    if type(keys) not in _TAGS or type(values) not in _TAGS:
        return None
    reading: Reading = keys.vq_reading
    if values.vq_reading is not reading or keys.vq_side != "keys":
        return None
    if keys is values:
        reading.reads.latent += 1
        latent: Reading = attrs.evolve(reading, view=views.latent(reading.view))
        return latent
    return reading if values.vq_side == "values" else None
