"""turboquant_prod's part of fused attention: W centroids and m signs of a key, by look-up and by bits.

Centroids have the scale s and signs s g: a tile lies in one part, so the scale depends on where it begins.
"""

from __future__ import annotations

import mlx.core as mx

from vq_core.kernels import Snippet
from vq_turboquant.prod import State

SIGNS = """
  VQ_UNROLL
  for (int i = 0; i < N; ++i) {
    const uint word = sketch[(t + i) * S + (c - W) / 32] >> uint((c - W) & 31);
    VQ_UNROLL
    for (int j = 0; j < 8; ++j) u[i * 8 + j] = as_type<float>(0xbf800000u ^ (word >> uint(j) & 1u) << 31);
  }
"""

NUMBERS = f"""
if (c >= W) {{
{SIGNS}
}} else {{
  VQ_UNROLL
  for (int i = 0; i < N; ++i) {{
    const int bit = c * B, at = (t + i) * V + bit / 32;
    uint word = codes[at] >> uint(bit & 31);
    if (B == 3 && (bit & 31) > 8) word |= codes[at + 1] << uint(32 - (bit & 31));
    VQ_UNROLL
    for (int j = 0; j < 8; ++j) u[i * 8 + j] = levels[word >> uint(j * B) & ((1u << uint(B)) - 1u)];
  }}
}}
"""

AFFINE = """
const float s = float(scale[t]);
return vq_float2(c < W ? s : s * float(gap[t]), 0.0f);
"""


def snippet(state: State) -> Snippet:
    """Eight centroids or eight signs of two tokens."""
    codes, integers = state.codes, {"N": 2, "W": state.codes, "S": state.signs // 32}
    if state.bits:
        integers |= {"B": state.bits, "V": codes * state.bits // 32}
    return Snippet(
        name="turboquant_prod" if state.bits else "turboquant_prod_signs",
        tokens=2,
        channels=8,
        numbers=NUMBERS if state.bits else SIGNS,
        affine=AFFINE if state.bits else "return vq_float2(float(scale[t]), 0.0f);",
        per="token",
        constants={"levels": mx.pad(state.levels, (0, 8 - state.levels.size))} if state.bits else {},
        integers=integers,
        width=codes + state.signs,
        prepare=state.prepare_query,
    )
