"""What a method stores: fields, pages and blocks.

The layout is all that the cache shell needs to know of a method's storage.  Growing, appending, cutting,
selecting and joining the rows of a batch, saving and counting bytes are done from it, once for all methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import attrs

from vq_core.errors import PluginError

DTYPE_BYTES = {
    "bool_": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8,
}  # fmt: skip
DEFAULT_PAGE = 128


def _lengths(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen
class Field:
    """One array of a method's storage.

    Attributes:
        name: Key of the array in the dictionaries that ``vq_pack`` returns and ``vq_decode`` receives.
        dtype: MLX dtype by name, such as ``"uint32"``.
        shape: Trailing shape of one **page** of one KV head, such as ``(D, page * bits // 32)``; for a field of
            the sequence, the trailing shape of one KV head of one sequence.
        axis: The axis of ``shape`` that runs along tokens. ``None`` marks a field of the **sequence**: one value
            per row, computed by ``vq_start`` from exactly the first block.
        codes: True for codes, False for metadata (scales, zeros, norms); the byte account keeps them apart.
        wide: A wider dtype into which the whole field is converted, exactly, the first time that ``vq_pack``
            returns rows of it. ``None``: ``vq_pack`` must always return ``dtype``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = attrs.field(converter=_lengths)
    axis: int | None = 0
    codes: bool = False
    wide: str | None = None

    def __attrs_post_init__(self) -> None:
        for dtype in filter(None, (self.dtype, self.wide)):
            if dtype not in DTYPE_BYTES:
                raise PluginError(f"field {self.name!r}: unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if self.axis is not None and not 0 <= self.axis < len(self.shape):
            raise PluginError(f"field {self.name!r}: token axis {self.axis} is not an axis of {self.shape}")
        if any(n < 1 for n in self.shape):
            raise PluginError(f"field {self.name!r}: every length of {self.shape} must be positive")

    @property
    def nbytes(self) -> int:
        """Bytes of one page (or one sequence) of one KV head."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def _fields(values: Iterable[Field]) -> tuple[Field, ...]:
    return tuple(values)


@attrs.frozen
class Layout:
    """Blocks, pages and fields of one side of a layer.

    Attributes:
        block: Tokens that are encoded together. Only whole blocks are ever flushed.
        fields: The arrays stored.
        page: Tokens of one page, a multiple of ``block``. Whole pages are what the attention hooks receive.
    """

    block: int
    fields: tuple[Field, ...] = attrs.field(converter=_fields)
    page: int = DEFAULT_PAGE

    def __attrs_post_init__(self) -> None:
        if self.block < 1 or self.page % self.block:
            raise PluginError(
                f"layout: page ({self.page}) must be a multiple of block ({self.block}), block at least 1"
            )
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names) or not names:
            raise PluginError(f"layout: field names must be unique and at least one: {names}")
        for field in self.paged:
            if field.shape[field.axis or 0] * self.block % self.page:
                raise PluginError(
                    f"field {field.name!r}: a block of {self.block} tokens is no whole number of units along axis "
                    f"{field.axis} of {field.shape} with pages of {self.page} tokens"
                )

    @cached_property
    def paged(self) -> tuple[Field, ...]:
        """Fields that hold one row a page."""
        return tuple(f for f in self.fields if f.axis is not None)

    @cached_property
    def sequence(self) -> tuple[Field, ...]:
        """Fields that hold one row a sequence."""
        return tuple(f for f in self.fields if f.axis is None)

    @cached_property
    def widens(self) -> bool:
        """Whether a field may take a wider dtype."""
        return any(f.wide is not None for f in self.fields)

    @cached_property
    def rows(self) -> tuple[tuple[Field, int, int], ...]:
        """Of each paged field in rows (B, H, ...): itself, its token axis, its length there for a page."""
        return tuple((f, f.axis + 2, f.shape[f.axis]) for f in self.fields if f.axis is not None)

    def units(self, field: Field, tokens: int) -> int:
        """Length along the token axis of ``field`` that ``tokens`` (whole blocks) take."""
        assert field.axis is not None
        return field.shape[field.axis] * tokens // self.page

    def bits_per_element(self, head_dim: int) -> tuple[float, float]:
        """(codes, metadata) in bits per stored number of a long sequence, per-sequence fields left out."""
        per = 8 / (self.page * head_dim)
        codes = sum(f.nbytes for f in self.paged if f.codes) * per
        return codes, sum(f.nbytes for f in self.paged if not f.codes) * per
