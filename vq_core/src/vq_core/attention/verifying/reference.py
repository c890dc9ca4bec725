"""What each split of the pass kernel must give, in double precision from what the methods' own hooks read."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.kernels.skeleton.kernels import Pair
from vq_core.kernels.skeleton.portable import EXACT_UNIT, Side
from vq_core.kernels.skeleton.summing import GROUPS
from vq_core.plugins.binding import BoundSide

LOWEST = -3.0e38
"""The running maximum before the first token, and the score of a token that is masked out."""
LOG2E = math.log2(math.e)

Array = np.ndarray[Any, Any]
Runs = list[tuple[int, int, int]]
"""(split, first token, tokens) of each unit."""


def reference(pair: Pair, keys: BoundSide, values: BoundSide) -> Callable[..., Sequence[mx.array]]:
    """The pass kernel's ``equals`` for two bound sides: its inputs and numbers to ``sums`` and ``tops``."""
    names = list(pair.run.inputs)

    def equals(*inputs: mx.array, **numbers: Any) -> Sequence[mx.array]:
        a = dict(zip(names, inputs, strict=True))
        B, heads, L, _ = a["q"].shape
        H = a["exact_k"].shape[1]
        width = max(a["exact_v"].shape[3], pair.values.width)
        sums = np.zeros((B, H, numbers["splits"], heads // H * L, width))
        tops = np.zeros((*sums.shape[:4], 2))
        for b in range(B):
            for split, top, whole, part in _splits(pair, keys, values, a, b, numbers):
                sums[b, :, split, :, : part.shape[2]] = part
                tops[b, :, split, :, 0], tops[b, :, split, :, 1] = top, whole
        return [mx.array(x.astype(np.float32)) for x in (sums, tops)]

    return equals


def _splits(
    pair: Pair, keys: BoundSide, values: BoundSide, a: Mapping[str, mx.array], b: int, numbers: Mapping[str, int]
) -> Iterator[tuple[int, Array, Array, Array]]:
    """(split, running maximum, sum of weights (H, M), weighted sums (H, M, width)) of the splits with tokens."""
    packed, first, recent, pad, hidden = (int(n) for n in np.array(a["rows"])[b][:5])
    H, L, exact = a["exact_k"].shape[1], a["q"].shape[2], numbers["exact_splits"]
    q = _floats(a["q"][b]).reshape(H, -1, a["q"].shape[3]) * _float(numbers["scale_bits"])
    see = _Masking(a["mask"], b, (H, a["q"].shape[1] // H, L), pad, numbers)
    # The window's tokens, then the first ones, each in units of its own.
    width = a["exact_k"].shape[2]
    k, v = (_floats(a[f"exact_{s}"][b][:, width - recent :]) for s in "kv")
    first_k, first_v = (_floats(a[f"sink_{s}"][b][:, :first]) for s in "kv")
    columns = np.concatenate(
        [np.arange(numbers["length"] - recent, numbers["length"]), pad - hidden + np.arange(first)]
    )
    scores = see(q @ np.concatenate([k, first_k], axis=1).swapaxes(-1, -2), columns)
    stored = np.concatenate([v, first_v], axis=1)
    runs = [*_units(recent, EXACT_UNIT, exact), *_units(first, EXACT_UNIT, exact, recent)]
    yield from _sums(runs, scores, lambda weights: weights @ stored)

    if not packed:
        return
    tiles = [_tile(side, a, b, packed, numbers["regular"]) for side in (pair.keys, pair.values)]
    scores = see(_dots(keys, pair.keys, q, tiles[0], packed), pad - hidden + first + np.arange(packed))
    runs = [(exact + s, at, n) for s, at, n in _units(packed, pair.unit, numbers["splits"] - exact)]
    yield from _sums(runs, scores, _summed(values, pair.values, tiles[1], packed))


class _Masking:
    """Which columns a query sees, and what an additive mask adds, for one row of the batch."""

    def __init__(self, mask: mx.array, b: int, shape: tuple[int, int, int], pad: int, numbers: Mapping[str, int]):
        self.shape, self.pad, self.numbers = shape, pad, numbers
        self.mask = _floats(mask)[min(b, mask.shape[0] - 1)] if numbers["masked"] else None

    def __call__(self, scores: Array, columns: Array) -> Array:
        """Scores (H, R * L, n) of tokens in these columns; ``LOWEST`` where a query does not see one."""
        (H, R, L), length = self.shape, self.numbers["length"]
        last = length - (L - np.arange(L) if self.numbers["causal"] else np.zeros(L))
        seen = np.tile((columns >= self.pad) & (columns <= last[:, None]), (R, 1))[None]
        if self.mask is not None:
            added = np.broadcast_to(self.mask[..., columns.clip(0, length - 1)], (H * R, L, len(columns)))
            added = added.reshape(H, R * L, -1)
            seen = seen & (added > LOWEST)
            scores = scores + np.where(added > LOWEST, added, 0) * LOG2E
        return np.where(seen, scores, LOWEST)


def _units(tokens: int, unit: int, splits: int, begin: int = 0) -> Runs:
    """Units of tokens ``begin`` on; those of the exact tokens are counted over both of their parts."""
    before = -(-begin // unit)
    return [
        ((before + n) // GROUPS % splits, begin + n * unit, min(unit, tokens - n * unit))
        for n in range(-(-tokens // unit))
    ]


def _sums(
    runs: Runs, scores: Array, summed: Callable[[Array], Array]
) -> Iterator[tuple[int, Array, Array, Array]]:  # fmt: skip
    for split in sorted({split for split, _, _ in runs}):
        inside = np.zeros(scores.shape[2], bool)
        for _, at, n in (run for run in runs if run[0] == split):
            inside[at : at + n] = True
        top = scores[..., inside].max(axis=-1)
        weights = np.where(inside, np.exp2(np.minimum(scores - top[..., None], 0)), 0)
        yield split, top, weights.sum(axis=-1), summed(weights)


def _tile(side: Side, a: Mapping[str, mx.array], b: int, tokens: int, regular: int) -> dict[str, mx.array]:
    """The pages of a row in their order, as the hooks take them."""
    depth, rows = -(-tokens // side.page), a["q"].shape[0]
    table = np.array(a[f"{side.prefix}_table"])
    places = np.arange(depth) * rows + b if regular else table[b, :depth]
    tile = {}
    for pointer in side.pointers:
        if pointer.size:
            x = a[f"{side.prefix}_{pointer.name}"]
            x = x[b : b + 1] if pointer.sequence else x[mx.array(places.astype(np.int32))]
            # No case holds a NaN but beyond a row's tokens, where it must not matter.
            tile[pointer.name] = mx.where(mx.isnan(x), 0, x) if mx.issubdtype(x.dtype, mx.floating) else x
    return tile


def _positions(tile: Mapping[str, mx.array], side: Side, tokens: int) -> mx.array:
    return mx.arange(-(-tokens // side.page) * side.page, dtype=mx.int32).reshape(-1, side.page)


def _dots(bound: BoundSide, side: Side, q: Array, tile: Mapping[str, mx.array], tokens: int) -> Array:
    """Dot products (H, M, tokens): the method's own where it keeps keys in another basis, else from decoded keys."""
    if bound.attend is None or side.snippet.prepare is None:
        keys = _floats(bound.decode(tile, _positions(tile, side, tokens)))  # (N, H, page, D)
        return q @ _joined(keys, 2)[:, :tokens].swapaxes(-1, -2)
    found = bound.attend.scores(bound.attend.prepare_query(mx.array(q[None].astype(np.float32))), tile)
    return _joined(_floats(found), 3)[..., :tokens]


def _summed(
    bound: BoundSide, side: Side, tile: Mapping[str, mx.array], tokens: int
) -> Callable[[Array], Array]:  # fmt: skip
    """Weights (H, M, tokens) to sums (H, M, width) in the stored basis."""
    if side.snippet.finish is None:
        values = _joined(_floats(bound.decode(tile, _positions(tile, side, tokens))), 2)[:, :tokens]
        return lambda weights: weights @ values

    def summed(weights: Array) -> Array:
        assert bound.attend is not None
        H, M, _ = weights.shape
        whole = np.pad(weights, [(0, 0), (0, 0), (0, -tokens % side.page)]).reshape(H, M, -1, side.page)
        given = mx.array(whole.transpose(2, 0, 1, 3).astype(np.float32))
        found: Array = _floats(bound.attend.accumulate(given, tile)).sum(axis=0)
        return found

    return summed


def _joined(pages: Array, axis: int) -> Array:
    """Pages (N, H, ...) one after another along their tokens."""
    joined: Array = np.concatenate(list(pages), axis=axis - 1)
    return joined


def _floats(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _float(bits: int) -> float:
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found
