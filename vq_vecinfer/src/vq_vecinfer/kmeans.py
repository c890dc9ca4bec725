"""k-means with the origin among its centroids: equal numbers, equal seed, equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, Any]

AT_ONCE = 2**22
"""Products held at once, 16 MiB: a difference tensor (vectors, centroids, size) would be gigabytes."""
SETTLED = 1e-4
"""Fall of the squared error a round, relative, below which the rounds end."""


def kmeans(x: Numbers, centroids: int, rounds: int, seed: tuple[int, ...]) -> Numbers:
    """Centroids of vectors, the first of which is the origin.

    Lloyd's rounds from vectors drawn at random.  A centroid that no vector is nearest to goes to the vector that is
    worst served, the next one to the next worst.  The origin stays where it is, so that zeros decode to zeros and no
    vector decodes to something farther from it than nothing.

    Args:
        x: (N, s) float32.
        centroids: C, at most N.
        rounds: At most so many.
        seed: Of numpy's generator.

    Returns:
        (C, s) float32.
    """
    import numpy as np  # here: listing methods imports their modules and should not pay for numpy

    count = len(x)
    book = np.zeros((centroids, x.shape[1]), np.float32)
    book[1:] = x[np.random.default_rng(seed).permutation(count)[: centroids - 1]]
    squares = np.square(x, dtype=np.float64).sum(axis=1)
    before = np.inf
    for _ in range(rounds):
        codes, halves = _nearest(x, book)
        errors = np.maximum(squares - 2 * halves, 0)
        members = np.bincount(codes, minlength=centroids)
        sums = np.stack([np.bincount(codes, weights=c, minlength=centroids) for c in x.T.astype(np.float64)], axis=1)
        book[1:] = (sums / np.maximum(members, 1)[:, None])[1:]
        empty = np.flatnonzero(members[1:] == 0) + 1
        if len(empty):
            book[empty] = x[np.argsort(-errors, kind="stable")[: len(empty)]]
        error = float(errors.sum())
        if not len(empty) and error >= before * (1 - SETTLED):
            break
        before = error
    return book


def _nearest(x: Numbers, book: Numbers) -> tuple[Numbers, Numbers]:
    """Of each vector its nearest centroid and x.c - ||c||^2 / 2, the largest of which is the nearest's."""
    import numpy as np

    table = mx.array(book)
    halves = table.square().sum(axis=1) / 2
    codes, best = np.empty(len(x), np.int64), np.empty(len(x), np.float64)
    step = max(1, AT_ONCE // len(book))
    for i in range(0, len(x), step):
        products = mx.array(x[i : i + step]) @ table.T - halves
        found = mx.argmax(products, axis=1, keepdims=True)
        codes[i : i + step] = np.array(found[:, 0])
        best[i : i + step] = np.array(mx.take_along_axis(products, found, axis=1)[:, 0])
    return codes, best
