"""KIVI's part of the fused attention: eight neighbouring codes of a stream as numbers, a scale and a zero.

Keys are stored along tokens, so a tile is 8 tokens of one channel; values along channels, so it is 8 channels of one
token.  Either way it is 8 codes of one group.  A code is not shifted into place: its bits in the middle of a float's
mantissa are the code times a power of two, which is made good once, on the sums.
"""

from __future__ import annotations

from vq_core.kernels.skeleton.snippet import Snippet
from vq_kivi.method import KiviState

TILE = 8
MANTISSA = 23


def _places(bits: int) -> list[tuple[int, int, int]]:
    """Of each of the tile's codes: its word, how far that is shifted right, and the code's place then."""
    found = []
    for at in range(0, TILE * bits, bits):
        word, place = divmod(at, 32)
        shift = 0 if place + bits <= MANTISSA else 12
        found.append((word, shift, place - shift))
    return found


def _numbers(bits: int, row: str, along: str, words: int) -> str:
    """Text that reads the tile's codes, those from ``along`` on of a row of so many words."""
    lines = [f"const int bit = {along} * {bits}, at = {row} * {words} + (bit >> 5);"]  # what grows is apart
    if bits == 2:
        lines.append("const uint w0 = codes[at] >> uint(bit & 31);")
    elif bits == 3:  # 24 bits that may lie in two words
        lines += [
            "const uint by = uint(bit & 31), low = codes[at], high = codes[at + (by > 8u ? 1 : 0)];",
            "const uint w0 = by > 8u ? low >> by | high << (32u - by) : low >> by;",
        ]
    else:
        lines += [f"const uint w{k} = codes[at + {k}];" for k in range(TILE * bits // 32)]
    for i, (word, shift, place) in enumerate(_places(bits)):
        shifted = f"w{word} >> {shift}u" if shift else f"w{word}"
        lines.append(f"u[{i}] = vq_fraction(({shifted}) & {((1 << bits) - 1) << place}u);")
    return "\n".join(lines)


def snippet(state: KiviState) -> Snippet:
    """One side's."""
    keys, bits, size = state.side == "keys", state.bits, state.group_size
    row, along = ("c", "t") if keys else ("t", "c")
    length = 128 if keys else state.padded  # of a row
    return Snippet(
        name=f"kivi_{state.side}",
        tokens=TILE if keys else 1,
        channels=1 if keys else TILE,
        numbers=_numbers(bits, row, along, length * bits // 32),
        affine=f"const int group = {row} * {length // size} + int(uint({along}) / {size}u);\n"
        "return vq_float2(float(scale[group]), float(zero[group]));",
        per="channel" if keys else "token",
        units=tuple(2.0 ** (MANTISSA - place) for _, _, place in _places(bits)),
        integers={"bits": bits, "size": size},
    )
