"""Parts of a head: the channels that are rotated and scaled together, with their rotation and codebook."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import mlx.core as mx

from vq_core.api import UnsupportedShapeError
from vq_core.codec.bits import WORD
from vq_core.codec.codebook import boundaries, gaussian_centroids
from vq_core.codec.hadamard import SignHadamard, hadamard_sizes
from vq_core.codec.projection import DenseRotation


@attrs.frozen(eq=False)
class Part:
    """Channels that are rotated and scaled together; all of them, but for fractional bits.

    Attributes:
        channels: (d,) uint32, which of the head's channels.
        bits: Of a code.
        width: Codes stored: d filled up to whole words.
        rotation: Of d numbers.
        units: (2**bits,) float32, centroids over sqrt(d): a vector of norm about 1.
        edges: Boundaries between them.
        span: 2 sqrt(d) in float32: norm over stored scale. The 2 keeps scales in float16's range where vectors are.
        table: (32,) float32, what kernels read: units, from 16 on the edges, and last the span.
    """

    channels: mx.array
    bits: int
    width: int
    rotation: SignHadamard | DenseRotation
    units: mx.array
    edges: tuple[float, ...]
    span: float
    table: mx.array

    @property
    def dim(self) -> int:
        """d."""
        return int(self.channels.size)

    @property
    def words(self) -> int:
        """Of a token."""
        return self.width * self.bits // WORD


def extra_channels(dim: int) -> int:
    """Channels with one bit more: with two float16 norms they make half a bit a number."""
    return dim // 2 - 32


def groups_of(bits: float, dim: int, seed: Sequence[int]) -> list[tuple[int, mx.array]]:
    """Bits and channels of each part."""
    import numpy as np  # here: listing methods imports their modules and should not pay for numpy

    whole = int(bits)
    if whole == bits:
        return [(whole, mx.arange(dim, dtype=mx.uint32))]
    if dim % 64 or dim < 128:
        raise UnsupportedShapeError(
            f"{bits} bits at head size {dim}: two scales and D / 2 - 32 channels of one bit more come out even for "
            f"head sizes of 128, 192, 256 and further multiples of 64; give {whole} or {whole + 1} bits"
        )
    raw = np.random.default_rng(tuple(seed)).bit_generator.random_raw(dim)
    drawn, more = np.argsort(raw, kind="stable").astype(np.uint32), extra_channels(dim)
    return [(whole + 1, mx.array(np.sort(drawn[:more]))), (whole, mx.array(np.sort(drawn[more:])))]


def rotation_for(kind: str, dim: int, seed: Sequence[int]) -> SignHadamard | DenseRotation:
    """``hadamard``: two sign-Hadamard rounds; ``haar``: a dense matrix; ``auto``: the first where the size has one.

    Raises:
        UnsupportedShapeError: ``hadamard`` for a size without one, or a dense matrix above 512.
    """
    if kind != "haar":
        try:
            hadamard_sizes(dim)
        except UnsupportedShapeError:
            if kind == "hadamard":
                raise
        else:
            return SignHadamard.drawn(dim, seed)
    return DenseRotation.drawn(dim, seed)


def part_of(bits: int, channels: mx.array, kind: str, seed: Sequence[int]) -> Part:
    """A part with its rotation, drawn from the seed, and its codebook.

    Raises:
        UnsupportedShapeError: a number of channels without the rotation asked for.
    """
    import numpy as np

    dim = int(channels.size)
    root, step = np.sqrt(np.float32(dim)), WORD // math.gcd(WORD, bits)
    centroids = gaussian_centroids(bits)
    units = np.array(centroids, np.float32) / root
    edges = np.array(boundaries(centroids), np.float32) / root
    table = np.zeros(32, np.float32)
    table[: units.size], table[16 : 16 + edges.size], table[31] = units, edges, 2 * root
    return Part(
        channels, bits, -(-dim // step) * step, rotation_for(kind, dim, seed),
        mx.array(units), tuple(map(float, edges)), float(2 * root), mx.array(table),
    )  # fmt: skip
