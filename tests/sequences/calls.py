"""Random calls on packed caches, each made on the cache and on :mod:`.plain` alike, and compared after each."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from vq_core import PackedKVCache
from vq_core.api.facts import PrepareContext
from vq_core.cache.tagged import reading_of
from vq_core.errors import CacheStateError, SettingsError, UnsupportedShapeError
from vq_core.plugins.binding import BoundSide, bind, state_arrays
from vq_core.testing.observe import stored

from .plain import Pair, Row, Rules, attention, dense

METHODS = (
    ("identity", "identity"), ("identity", "identity"), ("kivi:bits=4", "kivi:bits=4"), ("kivi:bits=2", "kivi:bits=2"),
    ("kivi:bits=4", "identity"), ("centred", "kivi:bits=2"),
    ("placed", "placed"), ("placed", "centred"),
)  # fmt: skip
RESIDUALS = (0, 1, 8, 31, 32, 40, 100, 128)
POOL = 4096
TOLERANCE = 1e-5
LOSSY = 2e-5
"""Of attention on codes: a product with codes up to 15, a scale and a zero each round once more."""
HELD = 4
"""Caches at most that a sequence of calls works on."""

_pool: dict[tuple[int, int, str], mx.array] = {}


def pool(heads: int, dim: int, dtype: str) -> mx.array:
    """(1, H, 4096, D) of N(0, 1), made once."""
    key = (heads, dim, dtype)
    if key not in _pool:
        x = np.random.default_rng(heads * dim).standard_normal((1, heads, POOL, dim), np.float32)
        _pool[key] = mx.array(x).astype(getattr(mx, dtype))
        mx.eval(_pool[key])
    return _pool[key]


@attrs.define(eq=False)
class Twins:
    """A cache and the plain rows it has to agree with; ``rows`` is empty before the first update."""

    cache: PackedKVCache
    rows: list[Row]


class Sequence:
    """One sequence of random calls.

    Args:
        seed: Of everything random in it.
        folder: Where files may be written; ``None``: no files.
    """

    def __init__(self, seed: int, folder: Path | None = None):
        self.random, self.folder = random.Random(seed), folder
        pick = self.random.choice
        self.dtype = pick(("float32", "float32", "float32", "float16"))
        self.heads, self.dim = pick((1, 2)), pick((32, 64))
        self.options: dict[str, Any] = {
            "residual": pick(RESIDUALS), "sink_tokens": pick((0, 0, 4, 33)),
        }  # fmt: skip
        self.options["keys"], self.options["values"] = pick(METHODS)
        bound = tuple(self._bind(side) for side in ("keys", "values"))
        self.rules = Rules(
            bound,  # type: ignore[arg-type]
            self.options["residual"], self.options["sink_tokens"], math.lcm(*(b.layout.block for b in bound)),
        )  # fmt: skip
        self.scale = self.dim**-0.5
        self.tolerance = TOLERANCE if self.options["keys"] == self.options["values"] == "identity" else LOSSY
        self.twins = [Twins(PackedKVCache(**self.options), []) for _ in range(pick((1, 2, 3)))]
        self.calls = [f"{self.dtype}, {self.heads} x {self.dim}, {self.options}"]
        self.found: list[tuple[str, mx.array, float]] = []

    def _bind(self, side: str) -> BoundSide:
        ctx = PrepareContext(
            side=side, kv_heads=self.heads, key_dim=self.dim, value_dim=self.dim, dtype=self.dtype  # type: ignore[arg-type]
        )  # fmt: skip
        return bind(self.options[side], ctx)

    def run(self, count: int) -> None:
        """``count`` calls; an AssertionError tells the calls that led to it."""
        names, weights = zip(*CALLS.items(), strict=True)
        try:
            for _ in range(count):
                twins = self.random.choice(self.twins)
                name = self.random.choices(names, weights)[0]
                self.calls.append(f"{self.twins.index(twins)}.{name}")
                getattr(self, name)(twins)
                self.check_counts(twins)
                if self.random.random() < 0.3:
                    self.check_tokens(self.random.choice(self.twins))
            for twins in self.twins:
                self.check_tokens(twins)
                self.check_counts(twins)
            self.settle()
            for twins in self.twins:
                self.check_codes(twins)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\ncalls: {'; '.join(self.calls)}") from error

    def settle(self) -> None:
        """Evaluate all comparisons at once."""
        mx.eval([error for _, error, _ in self.found])
        for what, error, bound in self.found:
            assert error.item() <= bound, f"{what}: off by {error.item():.3g}, at most {bound}"

    def differ(self, what: str, got: mx.array, want: mx.array, bound: float = 0) -> None:
        """Note a comparison; ``bound`` 0 means the same bits (no NaN is in the data)."""
        where = f"{what} after call {len(self.calls) - 1}"
        assert (got.shape, got.dtype) == (want.shape, want.dtype), (
            f"{where}: {got.shape} {got.dtype}, not {want.shape} {want.dtype}"
        )
        if not bound:
            self.found.append((where, (got != want).sum().astype(mx.float32), 0))
        else:
            self.found.append((where, mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max(), bound))

    # ---- comparisons

    def check_counts(self, twins: Twins) -> None:
        """Offset, lengths, packed, exact and approximate tokens, and bytes."""
        cache, rows = twins.cache, twins.rows
        tokens = [row.tokens for row in rows]
        longest = max(tokens, default=0)
        assert (cache.offset, cache.size(), cache.empty()) == (longest, longest, not longest)
        report = cache.report()
        held = state_arrays(cache, leave=(BoundSide,))
        assert cache.nbytes == sum(a.nbytes for a in held) == report.bytes.held, "bytes"
        if not rows:
            return
        history = cache._history
        assert history is not None
        assert history.lengths == tokens, f"lengths {history.lengths}, not {tokens}"
        packed = [row.packed for row in rows]
        for side, store in history.stores.items():
            assert store.tokens == packed, f"{side}: packed {store.tokens}, not {packed}"
            assert any(packed) or not (store.paged or store.sequence), f"{side}: arrays without a packed token"
        window = history.window
        assert window.counts == [row.exact for row in rows], f"window {window.counts}"
        assert window.sinks == [row.sinks for row in rows], f"sinks {window.sinks}"
        approximate = [row.approximate for row in rows]
        assert window.approximate == approximate, f"approximate {window.approximate}, not {approximate}"
        told = (report.tokens, report.packed, report.exact, report.approximate)
        exact = sum(tokens) - sum(packed) - sum(approximate)
        assert told == (sum(tokens), sum(packed), exact, sum(approximate)), f"report {told}"

    def check_tokens(self, twins: Twins) -> None:
        """Every token, bit for bit, and within half of KIVI's steps for each time that it was packed."""
        rows = twins.rows
        if not any(row.tokens for row in rows):
            return
        got = twins.cache.decode()
        want = dense([row.held for row in rows])  # type: ignore[misc]
        for side, a, b in zip(("keys", "values"), got, want, strict=False):
            self.differ(side, a, b)
        if self.dtype != "float32":
            return
        true, slack = (dense([getattr(row, name) for row in rows]) for name in ("true", "slack"))
        for side, a, b, far in zip(("keys", "values"), got, true, slack, strict=False):
            over = (mx.abs(a - b) - far * (1 + 1e-4)).max()  # type: ignore[operator]
            self.found.append((f"{side} beyond half a step a coding", over, 1e-4))

    def check_codes(self, twins: Twins) -> None:
        """Codes that were never cut are those of a fresh cache that was given the same tokens at once."""
        if not any(row.tokens for row in twins.rows) or self.random.random() > 0.3:
            return
        number = self.random.randrange(len(twins.rows))
        row = twins.rows[number]
        fresh = PackedKVCache(**self.options)
        if not row.tokens or row.true is None:
            return
        fresh.update_and_fetch(*row.true)
        assert fresh.report().packed == self.rules.frontier(row.tokens)
        same = min(row.packed, self.rules.frontier(row.tokens))
        if row.clean is not None:
            same = min(same, row.clean)
            if not same:
                return
        got, want = stored(twins.cache)[number], stored(fresh)[0]
        for name in want:
            side, _, field = name.partition(".")
            layout = self.rules.bound[side == "values"].layout
            axis = next(f.axis for f in layout.fields if f.name == field)
            if axis is None:
                assert not same or np.array_equal(got[name], want[name]), f"{name} is not a fresh cache's"
                continue
            units = layout.units(next(f for f in layout.fields if f.name == field), same)
            a, b = (x[name].take(range(units), axis=axis + 1) for x in (got, want)) if same else (0, 0)
            assert np.array_equal(a, b), f"{name}: the first {same} tokens' codes are not a fresh cache's"

    # ---- calls

    def _length(self) -> int:
        kind = self.random.random()
        if kind < 0.35:
            return 1
        if kind < 0.6:
            return self.random.randint(2, 12)
        if kind < 0.8:
            return self.random.randint(28, 70)
        return self.random.randint(96, 140) if kind < 0.94 else self.random.randint(250, 330)

    def _tokens(self, rows: int, n: int) -> list[Pair]:
        x = pool(self.heads, self.dim, self.dtype)
        pairs = []
        for _ in range(rows):
            i, j = (self.random.randrange(POOL - n) for _ in "kv")
            pairs.append((x[:, :, i : i + n], x[:, :, j : j + n]))
        return pairs

    def update(self, twins: Twins) -> None:
        """Up to three chunks, the last one attended to through what the update returns."""
        rows = len(twins.rows) or self.random.choice((1, 1, 1, 2, 3))
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            n = self._length()
            self.calls[-1] += f" {n}" if twins.rows else f" {n} of {rows} rows"
            pairs = self._tokens(rows, n)
            if not twins.rows:
                twins.rows = [Row(self.rules) for _ in range(rows)]
            tags = twins.cache.update_and_fetch(*(mx.concatenate(side) for side in zip(*pairs, strict=True)))
            read = [row.update(*pair) for row, pair in zip(twins.rows, pairs, strict=True)]
        for side, tag, want in zip(("keys", "values"), tags, dense(read), strict=False):
            self.differ(f"returned {side}", mx.array(tag), want)
        reading = reading_of(*tags)
        assert reading is not None
        if self.dtype == "float32" and n <= 40:
            q = self._queries(rows, n)
            got = reading.attend(q, scale=self.scale, mask="causal")
            self.differ("attention of the chunk", got, attention(read, q, self.scale, "causal", None), self.tolerance)

    def trim(self, twins: Twins) -> None:
        """Any length: nothing, a little, most, all, more than there is."""
        shortest = min((row.tokens for row in twins.rows), default=0)
        longest = max((row.tokens for row in twins.rows), default=0)
        kind = self.random.random()
        n = self.random.randint(0, 9) if kind < 0.5 else self.random.randint(0, shortest)
        if kind > 0.9:
            n = self.random.randint(shortest, longest + 100)
        self.calls[-1] += f" {n}"
        dropped = twins.cache.trim(n)
        assert dropped == min(n, shortest), f"trim({n}) of {shortest} dropped {dropped}"
        for row in twins.rows:
            row.trim(dropped)

    def attend(self, twins: Twins) -> None:
        """One or several queries, any mask, with and without the model's sinks."""
        shortest = min((row.tokens for row in twins.rows), default=0)
        if not shortest:
            if not any(row.tokens for row in twins.rows):
                self._refused(lambda: twins.cache.attend(self._queries(1, 1), scale=1.0), CacheStateError)
                return
            # A row without tokens in a batch of others: whatever it gets, no NaN.
            got = twins.cache.attend(self._queries(len(twins.rows), 1), scale=1.0)
            self.found.append(("NaN beside an empty row", mx.isnan(got).sum().astype(mx.float32), 0))
            return
        if self.dtype != "float32":
            return
        n = min(shortest, self.random.choice((1, 1, 2, 5, 16, 20)))
        longest, rows = max(row.tokens for row in twins.rows), len(twins.rows)
        q = self._queries(rows, n)
        mask: Any = self.random.choice((None, "causal", "bool", "rows", "heads"))
        if mask not in (None, "causal"):
            shape = {"bool": (n, longest), "rows": (rows, 1, n, longest), "heads": (*q.shape[:2], n, longest)}[mask]
            seen = np.random.default_rng(self.random.randrange(2**32)).random(shape) < 0.7
            seen[..., -1] = True  # a query that sees nothing has no answer
            mask = mx.array(seen)
        sinks = mx.arange(q.shape[1], dtype=mx.float32) - 0.5 if self.random.random() < 0.3 else None
        self.calls[-1] += (
            f" {n} queries, mask {'array' if isinstance(mask, mx.array) else mask}, sinks {sinks is not None}"
        )
        got = twins.cache.attend(q, scale=self.scale, mask=mask, sinks=sinks)
        held = [row.held for row in twins.rows]
        full = mask if mask is None or isinstance(mask, str) or mask.ndim == 4 else mask[None, None]
        self.differ("attention", got, attention(held, q, self.scale, full, sinks), self.tolerance)  # type: ignore[arg-type]

    def _queries(self, rows: int, n: int) -> mx.array:
        x, begin = pool(2, self.dim, "float32"), self.random.randrange(POOL - n)
        heads = self.heads * self.random.choice((1, 2))
        q = mx.concatenate([x, x], axis=1)[:, :heads, begin : begin + n]
        return mx.broadcast_to(q, (rows, heads, n, self.dim))

    def deepcopy(self, twins: Twins) -> None:
        """Both go on by themselves."""
        self._add(Twins(copy.deepcopy(twins.cache), [row.copy() for row in twins.rows]))

    def keys_and_values(self, twins: Twins) -> None:
        """All tokens, without adding any."""
        if any(row.tokens for row in twins.rows):
            held = dense([row.held for row in twins.rows])  # type: ignore[misc]
            for side, got, want in zip(("keys", "values"), twins.cache.keys_and_values(), held, strict=False):
                self.differ(f"{side} of keys_and_values", mx.array(got), want)

    def reload(self, twins: Twins) -> None:
        """State and back as mlx-lm does it: flattened to named leaves; a few times through a file."""
        if self.folder is not None and self.random.random() < 0.02:
            from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

            self.calls[-1] += " by file"
            file = str(self.folder / "cache.safetensors")
            save_prompt_cache(file, [twins.cache])
            twins.cache = load_prompt_cache(file)[0]
        else:
            leaves = dict(tree_flatten([twins.cache.state]))
            twins.cache = PackedKVCache.from_state(tree_unflatten(list(leaves.items()))[0])
        if twins.cache.empty():  # saved without a shape, so it has no rows either
            twins.rows = []

    def select(self, twins: Twins) -> None:
        """Some rows, in another order, perhaps one twice, as a cache of their own."""
        if not any(row.tokens for row in twins.rows):
            return
        rows = [self.random.randrange(len(twins.rows)) for _ in range(self.random.choice((1, 2, 3)))]
        self.calls[-1] += f" {rows}"
        self._add(Twins(twins.cache.select(rows), [twins.rows[r].copy() for r in rows]))

    def split(self, twins: Twins) -> None:
        """One cache a row."""
        parts = twins.cache.split()
        assert len(parts) == (len(twins.rows) if any(row.tokens for row in twins.rows) else 0)
        for part, row in zip(parts, twins.rows, strict=False):
            self._add(Twins(part, [row.copy()]))

    def join(self, twins: Twins) -> None:
        """The rows of two caches, in order."""
        other = self.random.choice(self.twins)
        if len(twins.rows) + len(other.rows) > 5:
            return
        self.calls[-1] += f" with {self.twins.index(other)}"
        rows = [row.copy() for t in (twins, other) for row in t.rows]
        empty = [not any(row.tokens for row in t.rows) for t in (twins, other)]
        if any(empty):
            if not all(empty):
                self._refused(lambda: PackedKVCache.join([twins.cache, other.cache]), CacheStateError)
            return
        self._add(Twins(PackedKVCache.join([twins.cache, other.cache]), rows))

    def refuse(self, twins: Twins) -> None:
        """What is refused changes nothing; the comparisons that follow would show it."""
        cache = twins.cache
        self._refused(lambda: cache.trim(-1), SettingsError)
        if any(row.tokens for row in twins.rows):
            x = mx.zeros((len(twins.rows), self.heads, 40, 16), getattr(mx, self.dtype))
            self._refused(lambda: cache.update_and_fetch(x, x), UnsupportedShapeError)
            self._refused(lambda: cache.select([len(twins.rows)]), SettingsError)

    def _refused(self, call: Any, error: type[Exception]) -> None:
        try:
            call()
        except error:
            return
        raise AssertionError(f"not refused: {self.calls[-1]}")

    def _add(self, twins: Twins) -> None:
        self.twins.append(twins)
        if len(self.twins) > HELD:
            self.twins.pop(self.random.randrange(len(self.twins) - 1))
        self.check_counts(twins)


CALLS = {
    "update": 40, "trim": 22, "attend": 14, "deepcopy": 6, "keys_and_values": 4, "reload": 6, "select": 4, "split": 2,
    "join": 9, "refuse": 3,
}  # fmt: skip
