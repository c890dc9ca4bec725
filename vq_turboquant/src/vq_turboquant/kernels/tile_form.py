"""How the portable skeleton reads codes in the order of :mod:`vq_turboquant.kernels.tile_order`.

Right, not quick; it serves masks that are arrays.
"""

from __future__ import annotations

import mlx.core as mx

from vq_core.api import Side
from vq_core.kernels.skeleton.snippet import Snippet

HEADER = """
VQ_FN int tile_SIDE_code(uint word, int j, int b) { return CODE; }
"""
CODE = {
    2: "int(word >> uint(16 * (j / 4) + 2 * (j / 2 & 1) + 4 * ((j & 1) + 2 * b)) & 3u)",
    4: "(word >> uint(j < 2 ? 16 * j + 8 * b + 7 : 16 * j + 8 * b - 29) & 1u) != 0u"
    " ? 15 - int(word >> uint(8 * j + 4 * b) & 7u) : int(word >> uint(8 * j + 4 * b) & 7u)",
}
PLACE = """
  int at = chunk * 128 + lane * 4 + i * 2 + a, j = place;
  if (c >= WHOLE) {
    at = chunk * 128 + lane * 2 + a;
    j = place + i * (WIDTH / 16);
  }
  const uint word = WORD_AT;
"""
SIZES = "const int WIDTH = 128 / BITS, WORDS = DIM * BITS, WHOLE = DIM / WIDTH * WIDTH;\n"
KEYS = f"""
// Two tokens of 8 channels: of a token's four words one place each.
const int chunk = c / WIDTH, place = (c - chunk * WIDTH) / 8;
for (int n = 0; n < 2; ++n) {{
  const int token = (t + n) & 31, first = (t + n) / 32 * WORDS, i = token / 16, a = token / 8 & 1;
  for (int r = 0; r < 4; ++r) {{
  const int lane = (token & 7) * 4 + r;
{PLACE}
  for (int b = 0; b < 2; ++b) u[n * 8 + r * 2 + b] = levels[tile_keys_code(word, j, b)];
  }}
}}
"""
VALUES = f"""
// Two neighbouring tokens of 8 channels: of each channel's word the codes of both halves.
const int chunk = c / WIDTH, place = (c - chunk * WIDTH) / 8, token = t & 31, first = t / 32 * WORDS;
const int i = token / 16, a = token / 8 & 1, r = token / 2 & 3;
for (int g = 0; g < 8; ++g) {{
  const int lane = g * 4 + r;
{PLACE}
  for (int b = 0; b < 2; ++b) u[b * 8 + g] = levels[tile_values_code(word, j, b)];
}}
"""
KEYS_SCALE = "const int at = t / 32 * 32 + t % 8 * 4 + t / 8 % 4;"
VALUES_SCALE = "const int at = t / 32 * 32 + t / 2 % 4 * 8 + t / 8 % 4 * 2 + t % 2;"
WORD_AT = {False: "codes[first + at]", True: "(a == 0 ? codes[(first + at) / 2] : rest[(first + at) / 2])"}


def snippet(name: str, side: Side, bits: int, dim: int, levels: mx.array, apart: bool = False) -> Snippet:
    """The snippet, without what brings queries into the stored basis and sums out of it.

    Args:
        name: The method's.
        side: Whose.
        bits: Of a code, 2 or 4.
        dim: D.
        levels: Of each code, in float32, eight numbers at least.
        apart: Whether every other word, that of a = 1, stands in ``rest``.
    """
    keys = side == "keys"
    return Snippet(
        name=f"{name}_device_{side}",
        tokens=2,
        channels=8,
        header=HEADER.replace("SIDE", side).replace("CODE", CODE[bits]),
        numbers=SIZES + (KEYS if keys else VALUES).replace("WORD_AT", WORD_AT[apart]),
        affine=(KEYS_SCALE if keys else VALUES_SCALE) + "\nreturn vq_float2(float(scale[at]), 0.0f);",
        per="token",
        constants={"levels": levels},
        integers={"BITS": bits, "DIM": dim},
        width=dim,
    )
