"""What a cache tells of itself: bytes that an allocator would confirm, and what ran."""

from __future__ import annotations

from typing import Any

import attrs

from vq_core.api.facts import Side
from vq_core.attention.choice import LATENT, told_of
from vq_core.cache.history import History
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.tagged import ReadCount
from vq_core.plugins.binding import BoundSide


@attrs.frozen
class Bytes:
    """Bytes of one layer's arrays by what they are for; the sum of all but ``constants`` is ``held``.

    Attributes:
        codes: Packed codes of stored tokens.
        metadata: Scales, zeros, norms and fields of the sequence of stored tokens.
        window: Exact tokens: the window and the sink tokens.
        spare: Capacity that no token uses.
        constants: The methods' shared constants; other layers and caches share the same arrays.
        fp16: What the same tokens take in a plain float16 cache without spare capacity; of a sliding window those
            in the window.
    """

    codes: int = 0
    metadata: int = 0
    window: int = 0
    spare: int = 0
    constants: int = 0
    fp16: int = 0

    @property
    def held(self) -> int:
        """Bytes of every array the cache holds."""
        return self.codes + self.metadata + self.window + self.spare

    @property
    def ratio(self) -> float:
        """fp16 bytes over bytes held; 0 for an empty cache."""
        return self.fp16 / self.held if self.held else 0.0


@attrs.frozen
class LayerReport:
    """One layer's cache.

    Attributes:
        layer: Index, ``None`` outside a model.
        keys, values: The methods with all their settings.
        tokens: Tokens held, of all rows; the sum of the next three.
        packed: Tokens held as codes.
        exact: Tokens held exactly.
        approximate: Tokens in the window that a trim brought back from codes.
        bytes: See :class:`Bytes`.
        updates: Calls of ``update_and_fetch``.
        attentions: Attentions that read the packed reading.
        lost: Updates whose result no packed attention has read; the model computed on dense arrays, or not at all.
        attention: The tier that runs.
        operations: For each side and hook the implementation that runs, and why earlier ones do not.
        sliding: The window of a layer that attends to its newest tokens only.
        notes: What the user should know, in words.
        constants: The methods' shared arrays themselves, by which a whole model's report counts each once.
    """

    layer: int | None
    keys: str
    values: str
    tokens: int = 0
    packed: int = 0
    exact: int = 0
    approximate: int = 0
    bytes: Bytes = Bytes()
    updates: int = 0
    attentions: int = 0
    lost: int = 0
    attention: str = ""
    operations: tuple[str, ...] = ()
    sliding: int | None = None
    notes: tuple[str, ...] = ()
    constants: tuple[Any, ...] = attrs.field(default=(), eq=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = attrs.asdict(self, filter=lambda a, _: a.name != "constants")
        made["bytes"] |= {"held": self.bytes.held, "ratio": round(self.bytes.ratio, 4)}
        return made


def describe(
    policy: LayerPolicy, history: History | None, reads: ReadCount, layer: int | None, sliding: int | None = None
) -> LayerReport:
    """The report of one cache."""
    if history is None:
        return LayerReport(layer, policy.keys.text, policy.values.text, attention=policy.attention, sliding=sliding)
    window = history.window
    packed, approximate = sum(history.packed), sum(window.approximate)
    exact = sum(window.counts) + sum(window.sinks) - approximate
    tokens = packed + exact + approximate
    notes = []
    if tokens and not packed:
        notes.append(
            f"no token is packed yet: the newest {policy.residual} to {policy.residual + history.block - 1} stay exact"
        )
    if sliding is not None:
        gone = f", {sum(history.dropped):,} older ones are gone" if any(history.dropped) else ""
        notes.append(f"sliding window of {sliding:,} tokens{gone}")
    if reads.lost:
        notes.append(f"{reads.lost} of {reads.updates} updates were not read by packed attention")
    if reads.dense:
        notes.append(f"a dense side was made {reads.dense} times")
    return LayerReport(
        layer, policy.keys.text, policy.values.text, tokens, packed, exact, approximate, _bytes(history),
        reads.updates, reads.packed, reads.lost, _tier(policy, history, reads), _operations(history), sliding,
        tuple(notes), tuple(a for bound in history.bound.values() for a in bound.constants),
    )  # fmt: skip


def _tier(policy: LayerPolicy, history: History, reads: ReadCount) -> str:
    """The tier of a decode step, and why it is not a faster one."""
    if policy.attention in ("mlx", "reference"):
        return policy.attention
    if reads.latent and history.bound["keys"].backend is not None:
        return f"mlx (kernel: {LATENT})"
    fields = []
    for side, bound in history.bound.items():
        held = history.stores[side].paged | history.stores[side].sequence
        fields.append(tuple(held[f.name].dtype for f in bound.layout.fields) if held and bound.layout.widens else ())
    said, why = told_of(history.bound["keys"], history.bound["values"], *fields)
    return said or f"mlx (kernel: {why})"


@attrs.frozen
class SideBytes:
    """Bytes of one side's packed tokens in the arrays held, without spare capacity.

    Attributes:
        codes: Packed codes.
        metadata: Scales, zeros and norms of tokens or groups of tokens.
        sequence: Fields of the sequence, and a batch's page tables: they do not grow with the tokens.
        spare: Capacity of the store that no token uses.
        constants: The method's shared constants.
    """

    codes: int
    metadata: int
    sequence: int
    spare: int
    constants: int


def side_bytes(history: History, side: Side) -> SideBytes:
    """The account of one side."""
    store = history.stores[side]
    used = {True: 0, False: 0}
    for field in store.layout.paged:
        used[field.codes] += store.paged[field.name].nbytes if store.paged else 0
    for codes in used:
        used[codes] -= store.spare_bytes(codes)
    sequence = store.nbytes() - sum(a.nbytes for a in store.paged.values())
    constants = sum(a.nbytes for a in history.bound[side].constants)
    return SideBytes(used[True], used[False], sequence, store.spare_bytes(), constants)


def _bytes(history: History) -> Bytes:
    stores = history.stores
    kinds = {True: 0, False: 0}
    spare = history.window.spare_bytes()
    for store in stores.values():
        spare += store.spare_bytes()
        for codes in kinds:
            kinds[codes] += store.nbytes(codes) - store.spare_bytes(codes)
    window = history.window.nbytes - history.window.spare_bytes()
    ctx = history.bound["keys"].ctx
    constants = {id(a): a.nbytes for bound in history.bound.values() for a in bound.constants}
    tokens = sum(n if history.sliding is None else min(n, history.sliding) for n in history.lengths)
    fp16 = tokens * ctx.kv_heads * (ctx.key_dim + ctx.value_dim) * 2
    return Bytes(kinds[True], kinds[False], window, spare, sum(constants.values()), fp16)


def _operations(history: History) -> tuple[str, ...]:
    lines = []
    for side, bound in history.bound.items():
        lines += [_line(side, bound, i) for i in range(len(bound.operations))]
    return tuple(lines)


def _line(side: str, bound: BoundSide, index: int) -> str:
    operation = bound.operations[index]
    why = f" ({'; '.join(operation.declined)})" if operation.declined else ""
    return f"{side}.{operation.name.removeprefix('vq_')}: {operation.implementation}{why}"
