"""The two halves of attention that a method may supply.

A tile is a dictionary of the method's fields for N pages: paged fields have shape (N, H, *field.shape), fields
of the sequence (N or 1, H, *field.shape).  M stands for the query rows of one KV head: all its query heads
times the query length, so that one read of the codes serves them all.

A tile holds all pages of the cache, which suits a product that reads the codes themselves.  A method that makes
something of the codes' full size on the way (centroids, signs as floats) says how many tokens it takes at once with
an attribute ``tile_tokens`` on the object, so that its transient memory is bounded by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mlx.core as mx

Tile = Mapping[str, mx.array]


class KeyAttention(Protocol):
    """The keys' half."""

    def prepare_query(self, queries: mx.array) -> Any:
        """Rotate, sketch or fold the queries, once per step.

        Args:
            queries: (B, H, M, D), already multiplied by the attention scale.

        Returns:
            An array, or a list, tuple or dict of arrays, each with leading axis B.
        """

    def scores(self, queries: Any, tile: Tile) -> mx.array:
        """Dot products of the prepared queries with the keys of a tile.

        Args:
            queries: What ``prepare_query`` returned, its leading axis N or 1.
            tile: N pages.

        Returns:
            (N, H, M, page), floating point.
        """


class ValueAttention(Protocol):
    """The values' half."""

    def accumulate(self, weights: mx.array, tile: Tile) -> mx.array:
        """Sums of a tile's values weighted by the probabilities; linear in ``weights``.

        Args:
            weights: (N, H, M, page); zero wherever the page holds no token.
            tile: N pages.

        Returns:
            (N, H, M, any), in whatever basis the method stores.
        """

    def finish(self, sums: mx.array) -> mx.array:
        """Undo the stored basis, once per step: sums over all pages (B, H, M, any) to (B, H, M, D)."""
