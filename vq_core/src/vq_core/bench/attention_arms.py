"""The arms of `vq bench attention`, filled with the same tokens: ours by method and tier, MLX's own, mlx-lm's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx

from vq_core.bench.clock import POOL
from vq_core.bench.filling import CHUNK, chunks
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.hosts.mlx_lm import rivals

MOST_CACHES = 64
"""Caches of a pool, at most."""

stock_attention = mx.fast.scaled_dot_product_attention


@attrs.frozen
class Shape:
    """What is attended: S tokens of a layer, one query token a row."""

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def scale(self) -> float:
        """Of the dot products."""
        return float(self.head_dim**-0.5)

    @property
    def dense_bytes(self) -> int:
        """Keys and values uncompressed."""
        return 2 * self.batch * self.kv_heads * self.tokens * self.head_dim * int(getattr(mx, self.dtype).size)


@attrs.frozen(eq=False)
class Item:
    """One input of the pool: queries (B, H_q, 1, D), and the number of the cache that they attend to."""

    queries: mx.array
    number: int


class Arm(Protocol):
    """One way to attend, with its caches."""

    kind: str

    @property
    def name(self) -> str:
        """For the record."""

    def add(self, number: int, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Append tokens to a cache; returns arrays to evaluate."""

    def finish(self) -> None:
        """All tokens are there."""

    def attend(self, item: Item) -> mx.array:
        """(B, H_q, 1, D)."""

    def decoded(self, item: Item) -> mx.array:
        """What float32 attention gives over what the cache holds, decoded."""

    def facts(self) -> dict[str, Any]:
        """For the record, bytes read among them."""


@attrs.define(eq=False)
class Dense:
    """MLX's own attention over keys and values as they are."""

    shape: Shape
    kind: str = "dense"
    _parts: dict[int, list[tuple[mx.array, mx.array]]] = attrs.field(factory=dict)
    _caches: list[tuple[mx.array, mx.array]] = attrs.field(factory=list)

    @property
    def name(self) -> str:
        """With the dtype."""
        return f"mlx {self.shape.dtype}"

    def add(self, number: int, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Keep the chunk."""
        self._parts.setdefault(number, []).append((keys, values))
        return []

    def finish(self) -> None:
        """Join each cache's chunks, without spare capacity."""
        for number in sorted(self._parts):
            parts = self._parts.pop(number)
            joined = [mx.concatenate([part[side] for part in parts], axis=2) for side in (0, 1)]
            mx.eval(joined)
            self._caches.append((joined[0], joined[1]))

    def attend(self, item: Item) -> mx.array:
        """By MLX."""
        keys, values = self._caches[item.number]
        return stock_attention(item.queries, keys, values, scale=self.shape.scale)

    def decoded(self, item: Item) -> mx.array:
        """In float32."""
        return float32_attention(item.queries, *self._caches[item.number], self.shape.scale)

    def facts(self) -> dict[str, Any]:
        """Bytes."""
        return {"kind": self.kind, "bytes_read": self.shape.dense_bytes, "packed_bytes": None}


@attrs.define(eq=False)
class Quantized:
    """mlx-lm's quantized attention, over buffers that are exactly full: the best case for it."""

    shape: Shape
    bits: int
    kind: str = "mlx-lm quantized"
    _parts: dict[int, list[tuple[Any, Any]]] = attrs.field(factory=dict)
    _caches: list[tuple[Any, Any]] = attrs.field(factory=list)

    @property
    def name(self) -> str:
        """With the bits."""
        return f"mlx-lm quantized {self.bits} bits"

    def add(self, number: int, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Quantize the chunk; mlx-lm's groups run along the channels, so chunks do not show."""
        made = tuple(mx.quantize(x, group_size=rivals.GROUP, bits=self.bits) for x in (keys, values))
        self._parts.setdefault(number, []).append(made)  # type: ignore[arg-type]
        return [array for triple in made for array in triple]

    def finish(self) -> None:
        """Join each cache's chunks, without spare capacity."""
        for number in sorted(self._parts):
            parts = self._parts.pop(number)
            sides = [
                tuple(mx.concatenate([part[side][i] for part in parts], axis=2) for i in range(3)) for side in (0, 1)
            ]
            mx.eval(sides)
            self._caches.append((sides[0], sides[1]))

    def attend(self, item: Item) -> mx.array:
        """By mlx-lm."""
        keys, values = self._caches[item.number]
        return rivals.quantized_attention(item.queries, keys, values, scale=self.shape.scale, bits=self.bits)

    def decoded(self, item: Item) -> mx.array:
        """Dequantized, in float32."""
        sides = []
        for codes, scales, biases in self._caches[item.number]:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            sides.append(mx.dequantize(codes, scales, biases, group_size=rivals.GROUP, bits=self.bits))
        return float32_attention(item.queries, sides[0], sides[1], self.shape.scale)

    def facts(self) -> dict[str, Any]:
        """Bytes."""
        held = sum(array.nbytes for side in self._caches[0] for array in side)
        return {"kind": self.kind, "bits": self.bits, "group_size": rivals.GROUP, "bytes_read": held,
                "packed_bytes": held}  # fmt: skip


@attrs.define(eq=False)
class Packed:
    """Ours, by method and tier, through the public cache."""

    shape: Shape
    policy: LayerPolicy
    method: str
    stand_in: str = ""
    kind: str = "vq"
    _caches: dict[int, PackedKVCache] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """Method and tier."""
        return f"{self.method} [{self.policy.attention}]"

    def add(self, number: int, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Append the chunk."""
        if number not in self._caches:
            # Strict: nobody will ask for the dense value of what the update returns.
            self._caches[number] = PackedKVCache.from_policy(self.policy, strict=True)
        self._caches[number].update_and_fetch(keys, values)
        return list(self._caches[number].state)

    def finish(self) -> None:
        """Nothing is left to do."""

    def attend(self, item: Item) -> mx.array:
        """By the tier."""
        return self._caches[item.number].attend(item.queries, scale=self.shape.scale)

    def decoded(self, item: Item) -> mx.array:
        """By the tier that decodes the whole cache in float32."""
        reference = copy.deepcopy(self._caches[item.number])
        reference.policy = attrs.evolve(reference.policy, attention="reference")
        return reference.attend(item.queries, scale=self.shape.scale)

    def facts(self) -> dict[str, Any]:
        """The cache's own report."""
        report = self._caches[0].report()
        packed = report.bytes.codes + report.bytes.metadata
        told = {"stand_in": self.stand_in} if self.stand_in else {}
        return told | {
            "kind": self.kind,
            "method": self.policy.keys.text,
            "values": self.policy.values.text,
            "tier": self.policy.attention,
            "attention": report.attention,
            "operations": list(report.operations),
            "tokens_packed": report.packed,
            "tokens_exact": report.exact,
            "bytes_read": packed + report.bytes.window,
            "packed_bytes": packed,
            "window_bytes": report.bytes.window,
            "spare_bytes": report.bytes.spare,
        }


def float32_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of one query token in float32, without MLX's own function: (B, H_q, 1, D) float32."""
    batch, heads, length, dim = queries.shape
    folded = queries.astype(mx.float32).reshape(batch, keys.shape[1], -1, dim) * scale
    weights = mx.softmax(folded @ keys.astype(mx.float32).swapaxes(-1, -2), axis=-1)
    return (weights @ values.astype(mx.float32)).reshape(batch, heads, length, -1)


def relative_error(arm: Arm, item: Item) -> float:
    """L2 norm of an arm's difference to float32 attention over its decoded cache, over that one's norm."""
    want = arm.decoded(item).astype(mx.float32)
    difference = arm.attend(item).astype(mx.float32) - want
    norms: Any = mx.sqrt(mx.square(difference).sum() / mx.square(want).sum())
    return float(norms.item())


def build_pool(
    shape: Shape, arms: Sequence[Arm], beyond: int, *, chunk: int = CHUNK, tell: Callable[[str], None]
) -> list[Item]:
    """Fill every arm's caches with the same tokens, and make the queries.

    Args:
        shape: Sizes.
        arms: Empty.
        beyond: Bytes that the packed codes of all caches together exceed, if 64 caches do.
        chunk: Tokens of an update.
        tell: Gets a line before the first cache and one before the others.
    """
    count, made, smallest = 1, 0, shape.dense_bytes
    while made < count:
        if made < 2:
            tell(f"{shape.tokens} tokens: filling {'the first cache' if not made else f'{count - 1} more'} of each arm")
        parts = chunks(
            shape.tokens, batch=shape.batch, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype,
            seed=made, chunk=chunk,
        )  # fmt: skip
        for keys, values in parts:
            for arm in arms:
                mx.eval(arm.add(made, keys, values))
        made += 1
        for arm in arms:
            arm.finish()
        if made == 1:
            read = [arm.facts()["packed_bytes"] or shape.dense_bytes for arm in arms if arm.kind == "vq"]
            smallest = max(1, min(read, default=shape.dense_bytes))
            count = max(2, min(MOST_CACHES, math.ceil(beyond / smallest)))
    size = (shape.batch, shape.heads, 1, shape.head_dim)
    kind = getattr(mx, shape.dtype)
    queries = [mx.random.normal(size, key=mx.random.key(i)).astype(kind) for i in range(max(POOL, count))]
    mx.eval(queries)
    mx.clear_cache()
    return [Item(q, i % count) for i, q in enumerate(queries)]
