"""What turboquant_mse offers of device forms: one, for tensor cores, and how the portable skeleton reads it."""

from __future__ import annotations

from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet
from vq_turboquant.kernels import mse_device, mse_matrix, mse_order
from vq_turboquant.kernels.mse import PACK
from vq_turboquant.mse import MseState, no_tiles

HEADER = """
VQ_FN int mse_SIDE_code(uint word, int j, int b) { return CODE; }
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
  const uint word = codes[first + at];
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
  for (int b = 0; b < 2; ++b) u[n * 8 + r * 2 + b] = levels[mse_keys_code(word, j, b)];
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
  for (int b = 0; b < 2; ++b) u[b * 8 + g] = levels[mse_values_code(word, j, b)];
}}
"""
KEYS_SCALE = "const int at = t / 32 * 32 + t % 8 * 4 + t / 8 % 4;"
VALUES_SCALE = "const int at = t / 32 * 32 + t / 2 % 4 * 8 + t / 8 % 4 * 2 + t % 2;"


def snippet(state: MseState) -> Snippet:
    """How the portable skeleton reads this form: right, not quick; it serves masks that are arrays."""
    keys, bits = state.side == "keys", state.parts[0].bits
    return Snippet(
        name=f"turboquant_mse_device_{state.side}",
        tokens=2,
        channels=8,
        header=HEADER.replace("SIDE", state.side).replace("CODE", CODE[bits]),
        numbers=SIZES + (KEYS if keys else VALUES),
        affine=(KEYS_SCALE if keys else VALUES_SCALE) + "\nreturn vq_float2(float(scale[at]), 0.0f);",
        per="token",
        constants={"levels": state.levels},
        integers={"BITS": bits, "DIM": state.head_dim},
        width=state.width,
        prepare=state.prepare_query,
        finish=state.finish,
        signs=state.signs,
    )


FORMS = (
    DeviceForm(
        name="turboquant_mse_m16n8k16",
        backends=("cuda", "simulator"),
        layout=mse_device.layout,
        to_device=mse_device.to_device,
        from_device=mse_device.from_device,
        kernels=(*PACK.values(), *mse_order.ORDER.values()),
        run=mse_order.pack,
        matrix=mse_matrix.snippet,
        snippet=snippet,
        declines=no_tiles,
    ),
)
