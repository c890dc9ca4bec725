"""QJL's part of the fused attention: signs as +1.0 and -1.0 against the sketch of the query, a norm a token."""

from __future__ import annotations

from vq_core.codec.bits import WORD
from vq_core.kernels import Snippet
from vq_qjl.method import Qjl

TOKENS = 2
OUTLIERS = (
    "with outliers each group of 32 tokens has a sketched query of its own, S q - S[:, out] q_out, and fused attention "
    "prepares one for all tokens"
)


def snippet(state: Qjl) -> Snippet | str:
    """A word of signs, or a byte, of each of two tokens; with outliers why there is none."""
    if state.outliers:
        return OUTLIERS
    width = state.sketch.width
    size = WORD if width % WORD == 0 else 8
    # A sign is put where a float has it, and turned round: 0xbf800000 is -1.0.
    numbers = f"""
for (int i = 0; i < {TOKENS}; ++i) {{
  const uint word = signs[(t + i) * W + c / {size}];
  VQ_UNROLL
  for (int j = 0; j < {size}; ++j) {{
    u[i * {size} + j] = as_type<float>((word << uint(31 - j) & 0x80000000u) ^ 0xbf800000u);
  }}
}}
"""
    return Snippet(
        name="qjl" if size == WORD else "qjl_bytes",
        tokens=TOKENS,
        channels=size,
        numbers=numbers,
        affine="return vq_float2(float(weight[t]), 0.0f);",
        per="token",
        integers={"W": width // size},
        width=width,
        prepare=state.sketch.query,
    )
