"""What KIVI offers of device forms: one, for tensor cores."""

from __future__ import annotations

from vq_core.kernels.device_form import DeviceForm
from vq_kivi.kernels import device, device_pack, matrix

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
        declines=device.declines,
    ),
)
