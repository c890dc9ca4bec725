"""What KIVI offers of device forms: one, for tensor cores."""

from __future__ import annotations

from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet
from vq_kivi.kernels import device, device_pack, matrix
from vq_kivi.method import KiviState

SIZES = """
const int WIDTH = 128 / BITS, WORDS = DIM * BITS, WHOLE = DIM / WIDTH * WIDTH;
const uint MASK = (1u << uint(BITS)) - 1u;
"""
KEYS = """
// Two tokens of 8 channels: of a token's four words one code in each half.
const int chunk = c / WIDTH, place = (c - chunk * WIDTH) / 8 * BITS;
for (int n = 0; n < 2; ++n) {
  const int token = (t + n) & 31, first = (t + n) / 32 * WORDS, i = token / 16, a = token / 8 & 1;
  for (int r = 0; r < 4; ++r) {
    const int lane = (token & 7) * 4 + r;
    int at = chunk * 128 + lane * 4 + i * 2 + a, by = place;
    if (c >= WHOLE) {
      at = chunk * 128 + lane * 2 + a;
      by = place + i * 8;
    }
    const uint word = codes[first + at];
    u[n * 8 + r * 2] = float(word >> uint(by) & MASK);
    u[n * 8 + r * 2 + 1] = float(word >> uint(by + 16) & MASK);
  }
}
"""
VALUES = """
// Two neighbouring tokens of 8 channels: of each channel's word the codes in both halves.
const int chunk = c / WIDTH, place = (c - chunk * WIDTH) / 8 * BITS, token = t & 31, first = t / 32 * WORDS;
const int i = token / 16, a = token / 8 & 1, r = token / 2 & 3;
for (int g = 0; g < 8; ++g) {
  const int lane = g * 4 + r;
  int at = chunk * 128 + lane * 4 + i * 2 + a, by = place;
  if (c >= WHOLE) {
    at = chunk * 128 + lane * 2 + a;
    by = place + i * 8;
  }
  const uint word = codes[first + at];
  u[g] = float(word >> uint(by) & MASK);
  u[8 + g] = float(word >> uint(by + 16) & MASK);
}
"""
KEYS_AFFINE = "const int at = t / 32 * DIM + c / 32 * 32 + c / 2 % 4 * 8 + c / 8 % 4 * 2 + c % 2;"
VALUES_AFFINE = "const int at = t / 32 * DIM + c / 32 * 32 + t / 2 % 4 * 8 + t / 8 % 4 * 2 + t % 2;"


def snippet(state: KiviState) -> Snippet:
    """How the portable skeleton reads this form: right, not quick; it serves masks and prefill."""
    keys, bits, dim = state.side == "keys", state.bits, state.head_dim
    return Snippet(
        name=f"kivi_device_{state.side}",
        tokens=2,
        channels=8,
        numbers=SIZES + (KEYS if keys else VALUES),
        affine=(KEYS_AFFINE if keys else VALUES_AFFINE) + "\nreturn vq_float2(float(scale[at]), float(zero[at]));",
        per="channel" if keys else "token",
        integers={"BITS": bits, "DIM": dim},
    )


FORMS = (
    DeviceForm(
        name="kivi_m16n8k16",
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
