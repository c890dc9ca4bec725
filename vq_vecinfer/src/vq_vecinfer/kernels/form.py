"""What VecInfer offers of device forms: one, for tensor cores, and how the portable skeleton reads it."""

from __future__ import annotations

from functools import partial

from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet
from vq_vecinfer.kernels import device, device_pack, matrix, query
from vq_vecinfer.method import VecInfer

NUMBERS = """
const int place = c / 8;
for (int n = 0; n < TOKENS; ++n) {
  const int token = (t + n) & 31, first = (t + n) / 32 * DIM, i = token / 16, a = token / 8 & 1;
  const uint code = (codes[first + AT] >> uint(8 * (BYTE)) & 255u) + (BOOKS == 1 ? 0u : uint(place) * 256u);
  VQ_UNROLL
  for (int j = 0; j < 8; ++j) u[n * 8 + j] = codebook[code * 8u + uint(j)];
}
"""
PLACES = {
    "keys": ("(place / 4 * 8 + (token & 7)) * 4 + 2 * i + a", "place & 3"),
    "values": (
        "((place / 4 * 2 + (place & 1)) * 4 + (token / 2 & 3)) * 4 + (place / 2 & 1) * 2 + i",
        "2 * a + (token & 1)",
    ),
}
"""The word of a code in its block, and the byte."""


def snippet(state: VecInfer) -> Snippet:
    """How the portable skeleton reads this form: right, not quick; it serves masks that are arrays."""
    at, byte = PLACES[state.side]
    tokens = 2 if state.side == "keys" else 1
    return Snippet(
        name=f"vecinfer_device_{state.side}",
        tokens=tokens,
        channels=8,
        numbers=NUMBERS.replace("AT", at).replace("BYTE", byte),
        constants={"codebook": state.codebook},
        integers={"TOKENS": tokens, "DIM": state.head_dim, "BOOKS": int(state.codebook.shape[0])},
        prepare=partial(query.prepare, state) if state.side == "keys" else None,
    )


FORMS = (
    DeviceForm(
        name="vecinfer_m16n8k16",
        backends=("cuda", "simulator"),
        layout=device.layout,
        to_device=device.to_device,
        from_device=device.from_device,
        kernels=tuple(device_pack.PACK.values()),
        run=device_pack.pack,
        matrix=matrix.snippet,
        snippet=snippet,
        declines=device.declines,
    ),
)
