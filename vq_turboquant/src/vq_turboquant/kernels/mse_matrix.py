"""turboquant_mse's snippets for the matrix skeleton: codes of 2 and 4 bits, see :mod:`tile_matrix`.

A level is twice a centroid, for scales are half of a token's root mean square about.
"""

from __future__ import annotations

import attrs

from vq_core.codec.codebook import gaussian_centroids
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.skeleton.matrix import MatrixSnippet
from vq_turboquant.kernels import tile_matrix
from vq_turboquant.mse import MseState, no_tiles


def lower_levels(bits: int) -> tuple[float, ...]:
    """See :attr:`~vq_turboquant.mse.MseState.levels`; those below zero."""
    return tuple(2 * v for v in gaussian_centroids(bits)[: 2 ** (bits - 1)])


def snippet(state: MseState) -> MatrixSnippet:
    """The snippet of a layer side.

    Raises:
        UnsupportedShapeError: it has none, and why.
    """
    reason = no_tiles(state)
    if reason:
        raise UnsupportedShapeError(f"turboquant_mse has no matrix snippet here: {reason}")
    bits = state.parts[0].bits
    made = tile_matrix.snippet(f"turboquant_mse{bits}", state.side, state.head_dim, lower_levels(bits))
    if state.side == "keys":
        return attrs.evolve(made, prepare=state.prepare_query, signs=state.signs)
    return attrs.evolve(made, finish=state.finish, signs=state.signs)
