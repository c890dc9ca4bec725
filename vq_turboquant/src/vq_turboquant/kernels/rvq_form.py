"""What turboquant_rvq offers of device forms: one, for tensor cores, and how the portable skeleton reads it."""

from __future__ import annotations

import attrs
import mlx.core as mx

from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import Snippet
from vq_turboquant.kernels import rvq_device, rvq_matrix, rvq_pack, tile_form
from vq_turboquant.rvq import State, no_tiles


def snippet(state: State) -> Snippet:
    """The portable skeleton's."""
    sums = mx.pad(state.sums, (0, max(0, 8 - state.sums.size)))
    made = tile_form.snippet("turboquant_rvq", state.side, 2 * state.bits, state.dim, sums, apart=True)
    return attrs.evolve(made, prepare=state.prepare_query, finish=state.finish, signs=state.signs)


FORMS = (
    DeviceForm(
        name="turboquant_rvq_m16n8k16",
        backends=("cuda", "simulator"),
        layout=rvq_device.layout,
        to_device=rvq_device.to_device,
        from_device=rvq_device.from_device,
        kernels=rvq_pack.KERNELS,
        run=rvq_pack.pack,
        matrix=rvq_matrix.snippet,
        snippet=snippet,
        declines=no_tiles,
    ),
)
