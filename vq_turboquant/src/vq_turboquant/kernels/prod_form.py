"""What turboquant_prod offers of device forms: one, for tensor cores, and how the portable skeleton reads it."""

from __future__ import annotations

import mlx.core as mx

from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet
from vq_turboquant.kernels import prod_device, prod_matrix, prod_pack
from vq_turboquant.prod import State, no_tiles

NUMBERS = """
// Two tokens of 8 channels, or of 8 signs: of a token's four words a pair each.
for (int n = 0; n < 2; ++n) {
  const int token = (t + n) & 31, block = (t + n) / 32, lane = (token & 7) * 16 + token / 8;
  for (int r = 0; r < 4; ++r) {
    if (c >= 128) {
      const uint word = sketch[block * 128 + lane + r * 4] >> uint((c - 128) / 8);
      u[n * 8 + r * 2] = as_type<float>(word << 31 ^ 0xbf800000u);
      u[n * 8 + r * 2 + 1] = as_type<float>((word << 15 & 0x80000000u) ^ 0xbf800000u);
    } else if (B == 1) {
      const uint word = codes[block * 128 + lane + r * 4] >> uint(c / 8);
      u[n * 8 + r * 2] = levels[word & 1u];
      u[n * 8 + r * 2 + 1] = levels[word >> 16 & 1u];
    } else {
      const uint word = codes[block * 256 + c / 64 * 128 + lane + r * 4];
      const int j = c % 64 / 8, at = 16 * (j / 4) + 2 * (j / 2 & 1) + 4 * (j & 1);
      u[n * 8 + r * 2] = levels[word >> uint(at) & 3u];
      u[n * 8 + r * 2 + 1] = levels[word >> uint(at + 8) & 3u];
    }
  }
}
"""
AFFINE = """
const int at = t / 32 * 32 + t % 8 * 4 + t / 8 % 4;
const float s = float(scale[at]);
return vq_float2(c < 128 ? s : s * float(gap[at]), 0.0f);
"""


def snippet(state: State) -> Snippet:
    """How the portable skeleton reads this form: right, not quick; it serves masks that are arrays."""
    return Snippet(
        name="turboquant_prod_device",
        tokens=2,
        channels=8,
        numbers=NUMBERS,
        affine=AFFINE,
        per="token",
        constants={"levels": mx.pad(state.levels, (0, 8 - state.levels.size))},
        integers={"B": state.bits},
        width=state.codes + state.signs,
        prepare=state.prepare_query,
    )


FORMS = (
    DeviceForm(
        name="turboquant_prod_m16n8k16",
        backends=("cuda", "simulator"),
        layout=prod_device.layout,
        to_device=prod_device.to_device,
        from_device=prod_device.from_device,
        kernels=prod_pack.KERNELS,
        run=prod_pack.pack,
        matrix=prod_matrix.snippet,
        snippet=snippet,
        declines=no_tiles,
    ),
)
