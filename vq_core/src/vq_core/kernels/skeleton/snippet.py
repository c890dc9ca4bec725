"""Snippets: a method's few lines inside the core's fused attention.

A lane of the portable skeleton reads **tiles** of T tokens by C channels.  A snippet says how: its ``numbers`` write
T * C numbers, and its ``affine``, where there is one, gives a scale and a zero that all of a tile's tokens (or all of
its channels) share.  What is stored there is then

    x[t][c] = numbers[t * C + c] * units * scale + zero

The skeleton owns everything else: queries, softmax, masks, pages, rows, the exact tokens, splitting and merging.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import mlx.core as mx

from vq_core.codec.hadamard import SignHadamard, hadamard_sizes
from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels.rules import TINY, stripped

SIMD = 32
UNITS = (64, 128, 32)
"""Tokens that a SIMD group scores at once, the best first: fewer keep more of a GPU busy with a short history."""
MOST_NUMBERS = 64
"""Of one tile: they are held in registers."""

Per = Literal["channel", "token", ""]


def _named(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", value, re.ASCII):
        raise PluginError(f"snippet name {value!r}: give it lower-case letters, digits and underscores")


@attrs.frozen(eq=False)
class Snippet:
    """How one side's packed numbers are read.

    The texts are bodies of functions in the kernel dialect (docs/kernels/dialect.md).  They see, by name: each field
    of the layout, as what is stored of one page and one head, in the field's own trailing shape; each of
    ``constants``; each of ``integers``; and ``t``, the tile's first token in its page, and ``c``, its first channel.
    Lanes call them at different times, so they hold no shuffle and no barrier.

    Attributes:
        name: Of the text, unique: with the integers it names what is compiled.
        tokens: T.
        channels: C.
        numbers: Writes ``u[0]`` to ``u[T * C - 1]``, the number of token t + i and channel c + j at i * C + j.
        affine: Returns ``vq_float2(scale, zero)``; empty where a tile's numbers are the stored values.
        per: What scale and zero belong to: ``"channel"``: one pair for each channel, shared by the tile's tokens
            (``t`` is its first, ``c`` the channel); ``"token"``: one for each token, shared by its channels.
        units: What the numbers are to be multiplied by, each a power of two, by token of the tile on the keys' side
            and by channel on the values': codes need not be shifted into place. Empty: by 1.
        constants: Arrays that the texts read, such as a codebook; 8 elements at least, float32 or an integer.
        integers: Whole numbers known to the texts, such as bits and group size; they are compiled in.
        header: Further functions and tables of the dialect.
        width: Numbers of one token in the stored basis; 0: the head size. A multiple of C may lie beyond it: the
            numbers there are read and dropped.
        prepare: Keys: queries (B, H_q, L, D), float32, into the stored basis (B, H_q, L, width). ``None``: as they are.
        finish: Values: sums (B, H_q, L, width), float32, out of the stored basis. ``None``: as they are.
        signs: (rounds, D) float32, where ``prepare`` is, and ``finish`` undoes, the rotation by these signs of
            :class:`~vq_core.codec.hadamard.SignHadamard`, and width and head size are D: each is then part of a launch
            of the core's. ``None``: they are functions.
    """

    name: str = attrs.field(validator=_named)
    tokens: int
    channels: int
    numbers: str
    affine: str = ""
    per: Per = ""
    units: tuple[float, ...] = ()
    constants: Mapping[str, mx.array] = attrs.field(factory=dict)
    integers: Mapping[str, int] = attrs.field(factory=dict)
    header: str = ""
    width: int = 0
    prepare: Callable[[mx.array], mx.array] | None = None
    finish: Callable[[mx.array], mx.array] | None = None
    signs: mx.array | None = None

    def __attrs_post_init__(self) -> None:
        wrong = _wrong(self)
        if wrong:
            raise PluginError(f"snippet {self.name!r}: {wrong}")

    @property
    def label(self) -> str:
        """Name and integers: what the text is."""
        return "_".join([self.name, *(str(v).replace("-", "m") for v in self.integers.values())])

    def unit(self, page: int) -> int:
        """Tokens of a page that a SIMD group scores at once; 0: none that this snippet's tile divides.

        Its T tokens by lanes along tokens by 1 or more lanes along channels are 32 lanes.
        """
        for unit in UNITS:
            lanes, rest = divmod(unit, self.tokens)
            if page % unit or rest or not lanes or SIMD % lanes:
                continue
            if self.tokens % (SIMD // lanes) == 0:
                return unit
        return 0


def _wrong(s: Snippet) -> str:
    if s.tokens < 1 or s.channels < 1 or s.tokens * s.channels > MOST_NUMBERS:
        return f"a tile of {s.tokens} tokens by {s.channels} channels: accepted are 1 to {MOST_NUMBERS} numbers"
    if bool(s.affine) != bool(s.per) or s.per not in ("channel", "token", ""):
        return f"per is {s.per!r}: with an affine text it is 'channel' or 'token', without one empty"
    for name, array in s.constants.items():
        if not isinstance(array, mx.array) or array.size < TINY:
            return f"constant {name} must be an MLX array of {TINY} elements or more; fill it up"
    for name, value in s.integers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
            return f"integer {name} is {value!r}: a whole number of 32 bits is accepted"
    for name in (*s.constants, *s.integers):
        if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or name in ("t", "c", "u"):
            return f"{name!r} cannot be the name of a constant or an integer"
    shared = re.search(r"\b(simd_\w+|\w*_barrier)\s*\(", stripped("\n".join((s.header, s.numbers, s.affine))))
    if shared:
        return f"its text calls {shared[1]}: lanes call a snippet at different times, so they cannot exchange anything"
    for unit in s.units:
        if not (isinstance(unit, float) and 0 < unit < math.inf and math.frexp(unit)[0] == 0.5):
            return f"unit {unit!r}: a power of two, as a float, is accepted"
    return wrong_signs(s.signs, s.prepare is not None or s.finish is not None)


def wrong_signs(signs: mx.array | None, turned: bool) -> str:
    """What is wrong with a snippet's signs, given whether it has a function that they describe; empty if nothing."""
    if signs is None:
        return ""
    if not isinstance(signs, mx.array) or signs.ndim != 2 or signs.dtype != mx.float32:
        return "its signs must be an MLX array (rounds, D) of float32"
    if not turned:
        return "signs say what prepare and finish do: give it one of these too"
    try:
        hadamard_sizes(signs.shape[1])
    except UnsupportedShapeError as wrong:
        return str(wrong)
    return "" if signs.shape[0] else "its signs have no round"


def unlike_signs(snippet: Any) -> str:
    """Which of a snippet's functions is not the rotation that its signs say; empty if each is.

    Args:
        snippet: A :class:`Snippet` or a :class:`~vq_core.kernels.skeleton.matrix.MatrixSnippet`.
    """
    if snippet is None or snippet.signs is None:
        return ""
    rotation, rows = SignHadamard(snippet.signs, snippet.signs), 4
    # No two numbers alike, and no random state touched. A product may be one of ten-bit numbers (TF32).
    x = mx.sin(mx.arange(rows * snippet.signs.shape[1]).astype(mx.float32) ** 1.5).reshape(1, rows, 1, -1)
    for what, function, meant in (
        ("prepare", snippet.prepare, rotation.rotate),
        ("finish", snippet.finish, rotation.undo),
    ):
        if function is not None and not mx.allclose(function(x), meant(x), rtol=0, atol=2e-2).item():
            return f"its {what} is not the sign-Hadamard rotation that its signs say"
    return ""


__all__ = ["SIMD", "Snippet"]
