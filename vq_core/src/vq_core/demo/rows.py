"""Training rows for the demo model: the text as bytes, and passages of it that come again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BOS, EOS = 256, 257
Ids = NDArray[np.int32]


def read_works(paths: Sequence[Path], val_share: float) -> tuple[Ids, Ids]:
    """Token ids of all files, split into training and validation by position in each file."""
    train: list[Ids] = []
    val: list[Ids] = []
    for path in paths:
        ids = read_ids(path)
        cut = int(len(ids) * (1 - val_share))
        train += [np.array([BOS], np.int32), ids[:cut], np.array([EOS], np.int32)]
        val.append(ids[cut:])
    return np.concatenate(train), np.concatenate(val)


def read_ids(path: Path) -> Ids:
    """A file's bytes as token ids."""
    return np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32)


@dataclass
class Sampler:
    """Draws training rows from one long run of ids."""

    ids: Ids
    rng: np.random.Generator
    repeat: float = 0.3
    """Share of rows with a passage or two of their own again later on."""
    drill: float = 0.0
    """Share of rows that are nothing but repetitions."""
    bos: float = 0.1
    """Share of the other rows that begin with bos and a paragraph."""

    def __post_init__(self) -> None:
        """Find where words and paragraphs start."""
        newline = self.ids[:-1] == ord("\n")
        self.words = np.flatnonzero(newline | (self.ids[:-1] == ord(" "))) + 1
        self.paragraphs = np.flatnonzero(newline & (self.ids[1:] != ord("\n"))) + 1

    def batch(self, rows: int, length: int) -> Ids:
        """Rows of `length` inputs and one more id (the last target)."""
        return np.stack([self.row(length + 1) for _ in range(rows)])

    def row(self, length: int) -> Ids:
        """One row of any kind."""
        kind = self.rng.random()
        if kind < self.drill:
            return self.drilled(length)
        row = self.window(length)
        if kind > 1 - self.repeat:
            for _ in range(int(self.rng.integers(1, 3))):
                row, _ = self.repeated(row)
        return row

    def window(self, length: int) -> Ids:
        """A piece of the text as it is."""
        last = len(self.ids) - length
        if self.rng.random() < self.bos:
            starts = self.paragraphs
            start = int(starts[self.rng.integers(np.searchsorted(starts, last))])
            return np.concatenate([np.array([BOS], np.int32), self.ids[start : start + length - 1]])
        start = int(self.rng.integers(last))
        return self.ids[start : start + length]

    def drilled(self, length: int) -> Ids:
        """One to four short passages in random turns, half the time with all characters swapped.

        Copying is all there is to learn from such rows: models that saw none did not learn it.
        """
        pool = []
        table = np.arange(256, dtype=np.int32)
        if self.rng.random() < 0.5:
            table[32:127] = self.rng.permutation(table[32:127])
        for _ in range(int(self.rng.integers(1, 5))):
            size = int(np.exp(self.rng.uniform(np.log(8), np.log(800))))
            start = int(self.rng.integers(len(self.ids) - size))
            pool.append(table[np.minimum(self.ids[start : start + size], 255)])
        parts: list[Ids] = []
        while sum(map(len, parts)) < length:
            parts.append(pool[int(self.rng.integers(len(pool)))])
        return np.concatenate(parts)[:length]

    def repeated(self, row: Ids) -> tuple[Ids, slice]:
        """`row` with one of its passages inserted again later on, and where that is."""
        size = int(self.rng.integers(100, 401))
        furthest = min(1500 if len(row) < 4000 else 3000, len(row) - size - 64)
        back = int(self.rng.integers(max(300, size), furthest + 1))
        at = int(self.rng.integers(back, len(row) - size))
        source = at - back
        # Start, end and goal at words' starts, within what the row holds.
        starts = np.flatnonzero((row[:-1] == ord(" ")) | (row[:-1] == ord("\n"))) + 1
        source, stop, at = (
            int(starts[min(int(np.searchsorted(starts, n)), len(starts) - 1)]) for n in (source, source + size, at)
        )
        passage = row[source:stop]
        new = np.concatenate([row[:at], passage, row[at:]])[: len(row)]
        return new, slice(at, min(at + len(passage), len(row)))
