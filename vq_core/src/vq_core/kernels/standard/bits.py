"""Bit packing and unpacking, equal to :mod:`vq_core.codec.bits`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from vq_core.codec.bits import pack_bits, unpack_bits
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.kernel import Call, Case, Kernel, Output

BITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
THREADS = 128
MOST = 2**31

PACK = """
// codes (..., n) -> words (..., n * bits / 32), both flat: a stream, least significant bit first. One thread a word.
const uint i = thread_position_in_grid.x, per = 32u / uint(bits) + 2u;
if (i < total) {
  const uint row = i / width, bit = i % width * 32u, first = bit / uint(bits);
  uint word = 0u;
  for (uint k = 0u; k < per; ++k) {
    const uint code = first + k, at = code * uint(bits);
    if (at >= bit + 32u || code >= count) break;
    const uint q = codes[row * count + code];
    word |= at >= bit ? q << (at - bit) : q >> (bit - at);
  }
  words[i] = word;
}
"""

UNPACK = """
// words (..., w) -> codes (..., w * 32 / bits). One thread a code.
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint row = i / count, bit = i % count * uint(bits), place = row * width + bit / 32u, shift = bit % 32u;
  uint q = words[place] >> shift;
  if (shift + uint(bits) > 32u) q |= words[place + 1u] << (32u - shift);
  codes[i] = q & ((1u << bits) - 1u);
}
"""


def pack(codes: mx.array, bits: int, **where: object) -> mx.array:
    """:func:`vq_core.codec.bits.pack_bits` in one launch: codes (..., n) uint32 to (..., n * bits // 32) uint32."""
    count = _last(codes, bits)
    width = count * bits // 32
    total = codes.size // count * width if count else 0
    return PACK_BITS(codes, bits=bits, count=count, width=width, total=total, **where)[0]  # type: ignore[arg-type]


def unpack(words: mx.array, bits: int, **where: object) -> mx.array:
    """:func:`vq_core.codec.bits.unpack_bits` in one launch."""
    width = _last(words, bits)
    count = width * 32 // bits
    total = words.size // width * count if width else 0
    return UNPACK_BITS(words, bits=bits, count=count, width=width, total=total, **where)[0]  # type: ignore[arg-type]


def _last(x: mx.array, bits: int) -> int:
    """Length of the last axis, where there is one and the number of bits is one that is packed."""
    if bits not in BITS:
        raise UnsupportedShapeError(f"codes of {bits!r} bits: accepted are {', '.join(map(str, BITS))}")
    if not x.ndim:
        raise UnsupportedShapeError("codes and words have at least one dimension, got an array without")
    return int(x.shape[-1])


def _check(call: Call) -> str:
    numbers, bits = call.numbers, call.parameters["bits"]
    (name, shape), *_ = call.shapes.items()
    if numbers["count"] * bits != numbers["width"] * 32 or shape[-1] not in (numbers["count"], numbers["width"]):
        return f"{name} {shape}: {numbers['count']} codes of {bits} bits fill no {numbers['width']} whole words"
    return f"{name} {shape} is too large; fewer than {MOST} elements are accepted" if numbers["total"] >= MOST else ""


def _cases(packed: bool) -> Iterator[Case]:
    rng = np.random.default_rng(3)
    for i in range(300):
        bits = BITS[i % 10]
        step = 32 // math.gcd(32, bits)
        count = step * (1, 2, 3, 5, 16)[i // 10 % 5]
        shape = ((), (3,), (2, 5), (1, 1, 7))[i // 50 % 4] + (count,)
        top = 2**bits
        numbers = rng.integers(0, top, shape) if i % 3 else np.full(shape, top - 1)
        codes = mx.array(numbers.astype(np.uint32))
        width = count * bits // 32
        rows = codes.size // count
        given = {"bits": bits, "count": count, "width": width, "total": rows * (count if packed else width)}
        yield Case((pack_bits(codes, bits) if packed else codes,), given, f"{shape} {bits} bits")


def _grid(call: Call) -> tuple[int, int, int]:
    return (-(-call.numbers["total"] // THREADS), 1, 1)


PACK_BITS = Kernel(
    name="pack_bits",
    stands_for="pack",
    body=PACK,
    inputs={"codes": "uint32"},
    outputs={"words": Output("uint32", lambda call: (*call.shapes["codes"][:-1], call.numbers["width"]))},
    parameters={"bits": BITS},
    numbers=("count", "width", "total"),
    threads=lambda call: (THREADS, 1, 1),
    threadgroups=_grid,
    equals=lambda codes, *, bits, **rest: (pack_bits(codes, bits),),
    cases=lambda: _cases(packed=False),
    check=_check,
)
UNPACK_BITS = Kernel(
    name="unpack_bits",
    stands_for="unpack",
    body=UNPACK,
    inputs={"words": "uint32"},
    outputs={"codes": Output("uint32", lambda call: (*call.shapes["words"][:-1], call.numbers["count"]))},
    parameters={"bits": BITS},
    numbers=("count", "width", "total"),
    threads=lambda call: (THREADS, 1, 1),
    threadgroups=_grid,
    equals=lambda words, *, bits, **rest: (unpack_bits(words, bits),),
    cases=lambda: _cases(packed=True),
    check=_check,
)
KERNELS = (PACK_BITS, UNPACK_BITS)
