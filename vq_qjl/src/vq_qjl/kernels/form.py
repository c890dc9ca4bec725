"""What QJL offers of device forms: one, for tensor cores, and how the portable skeleton reads it."""

from __future__ import annotations

from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet
from vq_qjl.kernels import device, device_pack, matrix
from vq_qjl.method import Qjl

NUMBERS = """
// Two tokens of 8 signs: of a token's four words a pair each.
const int place = c % 128 / 8;
VQ_UNROLL
for (int n = 0; n < 2; ++n) {
  const int token = (t + n) & 31, first = (t + n) / 32 * WIDTH + c / 128 * 128 + (token & 7) * 16 + token / 8;
  VQ_UNROLL
  for (int r = 0; r < 4; ++r) {
    const uint word = signs[first + r * 4] >> uint(place);
    u[n * 8 + r * 2] = as_type<float>(word << 31 ^ 0xbf800000u);
    u[n * 8 + r * 2 + 1] = as_type<float>((word << 15 & 0x80000000u) ^ 0xbf800000u);
  }
}
"""
AFFINE = "return vq_float2(float(weight[t / 32 * 32 + t % 8 * 4 + t / 8 % 4]), 0.0f);"


def snippet(state: Qjl) -> Snippet:
    """How the portable skeleton reads this form: right, not quick; it serves masks that are arrays."""
    return Snippet(
        name="qjl_device",
        tokens=2,
        channels=8,
        numbers=NUMBERS,
        affine=AFFINE,
        per="token",
        integers={"WIDTH": state.sketch.width},
        width=state.sketch.width,
        prepare=state.sketch.query,
    )


FORMS = (
    DeviceForm(
        name="qjl_m16n8k16",
        backends=("cuda", "simulator"),
        layout=device.layout,
        to_device=device.to_device,
        from_device=device.from_device,
        kernels=(device_pack.PACK,),
        run=device_pack.pack,
        matrix=matrix.snippet,
        snippet=snippet,
        declines=device.declines,
    ),
)
