"""turboquant_rvq's snippets for the matrix skeleton: sums of two centroids, see :mod:`tile_matrix`.

The 16 sums of 2+2 are eight and the same with the other sign, those of 1+1 two: what is looked up is the sum.  As a
half it is off by 2^-11 of itself at most.  3+3 has 64 sums and 4+4 has 256: bytes are looked up
among eight, so these would take a look-up for each code and a sum of halves, and stay with the portable skeleton.
"""

from __future__ import annotations

import attrs

from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.skeleton.matrix import MatrixSnippet
from vq_turboquant.kernels import tile_matrix
from vq_turboquant.kernels.vectors import floats
from vq_turboquant.rvq import State, no_tiles


def lower_levels(state: State) -> tuple[float, ...]:
    """Sums of centroids of the lower half of the codes c1 + 2**b c2."""
    return floats(state.sums[: 2 ** (2 * state.bits - 1)])


def snippet(state: State) -> MatrixSnippet:
    """The snippet of a layer side.

    Raises:
        UnsupportedShapeError: it has none, and why.
    """
    reason = no_tiles(state)
    if reason:
        raise UnsupportedShapeError(f"turboquant_rvq has no matrix snippet here: {reason}")
    name = f"turboquant_rvq{state.bits}{state.bits}_{state.stage2}"
    made = tile_matrix.snippet(name, state.side, state.dim, lower_levels(state), apart=True)
    if state.side == "keys":
        return attrs.evolve(made, prepare=state.prepare_query, signs=state.signs)
    return attrs.evolve(made, finish=state.finish, signs=state.signs)
