"""VecInfer's part of the fused attention: eight channels of a token are 1, 2 or 4 codes, looked up in the codebook.

The table in threadgroup memory that the paper scores keys by (a product for each place and centroid) does not fit where
C is 4,096, and pays only for more tokens than centroids: a lane reads the centroid itself.
"""

from __future__ import annotations

from functools import partial

from vq_core.api import Side
from vq_core.kernels.skeleton.snippet import Snippet
from vq_vecinfer.kernels import query
from vq_vecinfer.method import VecInfer

CHANNELS = 8
NUMBERS = """
for (int i = 0; i < TOKENS; ++i) {
  VQ_UNROLL
  for (int m = 0; m < 8; m += SUB) {
    const int place = (c + m) / SUB, bit = ((t + i) * (DIM / SUB) + place) * BITS, at = bit >> 5, shift = bit & 31;
    uint code = codes[at] >> uint(shift);
    if (shift + BITS > 32) code |= codes[at + 1] << uint(32 - shift);
    code = (code & ((1u << uint(BITS)) - 1u)) + (BOOKS == 1 ? 0u : uint(place) << uint(BITS));
    VQ_UNROLL
    for (int j = 0; j < SUB; ++j) u[i * 8 + m + j] = codebook[code * uint(SUB) + uint(j)];
  }
}
"""


def snippet(state: VecInfer, side: Side) -> Snippet:
    """One side's."""
    tokens = 2 if side == "keys" else 1
    centred = state.mean is not None
    return Snippet(
        name="vecinfer_mean" if centred else "vecinfer",
        tokens=tokens,
        channels=CHANNELS,
        numbers=NUMBERS,
        affine="return vq_float2(1.0f, mean[c]);" if centred else "",
        per="channel" if centred else "",
        constants={"codebook": state.codebook},
        integers={
            "TOKENS": tokens, "SUB": state.sub, "BITS": state.bits, "DIM": state.head_dim,
            "BOOKS": int(state.codebook.shape[0]),
        },
        prepare=partial(query.prepare, state) if side == "keys" else None,
    )  # fmt: skip
