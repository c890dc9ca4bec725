"""What turboquant_mse offers of device forms: one, for tensor cores, and how the portable skeleton reads it."""

from __future__ import annotations

import attrs

from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet
from vq_turboquant.kernels import mse_device, mse_matrix, mse_order, tile_form
from vq_turboquant.kernels.mse import PACK
from vq_turboquant.mse import MseState, no_tiles


def snippet(state: MseState) -> Snippet:
    """The portable skeleton's."""
    made = tile_form.snippet("turboquant_mse", state.side, state.parts[0].bits, state.head_dim, state.levels)
    return attrs.evolve(made, prepare=state.prepare_query, finish=state.finish, signs=state.signs)


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
