"""Attention on synthetic keys and values, one side of it quantized: what a method's codes do to the output.

What is computed, for each seed: n keys and values of N(0, 1) in the model's dtype; 256 queries; the softmax p0 of the
queries on the keys as they are and its output o0; p1 and o1 with one side read back from the method's packed fields,
by its own attention (``vq_attend``) where it has one, else by ``vq_decode``.  All tokens are packed: there is no exact
window.  Softmax, outputs and figures are float64.

    error  ||o1 - o0|| / ||o0||, norms over all queries together, mean over seeds
    KL     mean over queries and seeds of KL(p0 || p1), in nats

Queries have norm T sqrt(D), so that logits q . k / sqrt(D) of keys that they do not look for have a standard deviation
of T.  The first half is retrieval-like: the direction of ``e + RETRIEVAL * k``, e of N(0, 1) and k a key drawn for each
query; the second half the direction of e alone.  Because norms are taken over all queries together, the error is mostly
that of the retrieval-like ones, whose outputs are long.

A method that needs calibration learns from CALIBRATION other tokens of the same distribution.

Columns with keys quantized:
    T1 iid      T = 1
    T3 iid      T = 3
    T3 outlier  T = 3, four channels of the keys are +-15 + 2 N(0, 1); what a query looks for is the key without that

Columns with values quantized:
    iid     T = 1
    mean    T = 1, no query is retrieval-like, and all values share a mean, 0.3 N(0, 1) a channel

The table that this regenerates (methods.md, section 12) states n, D, the number of queries and seeds, T, the offsets
and "half retrieval-like".  RETRIEVAL, the spread of the outlier channels and the size of the values' mean are chosen
here so that its rows come out; docs/evaluation.md has both side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vq_core.api.facts import SIDES, PrepareContext, Side
from vq_core.bench.environment import environment
from vq_core.cache.store import PageStore
from vq_core.errors import SettingsError, VQError
from vq_core.evaluate.arms import Candidate, by_bits, candidates
from vq_core.evaluate.learnt import Learning, needs
from vq_core.plugins.binding import BoundSide, bind
from vq_core.plugins.choice import choose

Array = NDArray[np.float64]

RETRIEVAL = 0.75
"""Weight of the key in a retrieval-like query, beside noise of weight 1: a cosine of 0.6 in the mean."""
OUTLIERS, OFFSET, SPREAD = 4, 15.0, 2.0
"""Channels of the keys with an offset of either sign, and their standard deviation."""
VALUE_MEAN = 0.3
"""Standard deviation over channels of the mean that all values share."""
CALIBRATION = 4096
"""Tokens that a method which needs calibration learns from."""


@attrs.frozen
class Column:
    """One condition.

    Attributes:
        name: For the table.
        T: Standard deviation of the logits.
        outlier: Whether four channels of the keys are outliers.
        retrieval: Whether half of the queries are retrieval-like.
        mean: Standard deviation of the values' common mean.
    """

    name: str
    T: float
    outlier: bool = False
    retrieval: bool = True
    mean: float = 0.0


COLUMNS: Mapping[Side, tuple[Column, ...]] = {
    "keys": (Column("T1 iid", 1), Column("T3 iid", 3), Column("T3 outlier", 3, outlier=True)),
    "values": (Column("iid", 1), Column("mean", 1, retrieval=False, mean=VALUE_MEAN)),
}


@attrs.frozen
class Wanted:
    """What is measured.

    Attributes:
        methods: See :func:`vq_core.evaluate.arms.candidates`.
        tokens: Keys and values, n.
        queries: Half of them retrieval-like where the column says so.
        head_dim: D.
        seeds: Of the data, and of the methods' random constants: 0 to ``seeds`` - 1.
        dtype: Of keys and values.
    """

    methods: tuple[str, ...] = ()
    tokens: int = 4096
    queries: int = 256
    head_dim: int = 128
    seeds: int = 3
    dtype: str = "float16"

    def __attrs_post_init__(self) -> None:
        for name, least in (("tokens", 1), ("queries", 2), ("head_dim", OUTLIERS), ("seeds", 1)):
            if getattr(self, name) < least:
                raise SettingsError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.dtype not in ("float16", "bfloat16", "float32"):
            raise SettingsError(f"dtype {self.dtype!r}: accepted are float16, bfloat16 and float32")


@attrs.frozen(eq=False)
class Case:
    """What is attended, and what comes of it exactly.

    Attributes:
        queries: (M, D), already divided by sqrt(D).
        keys, values: (n, D), as the model's dtype rounds them.
        logs: log p0, (M, n).
        output: o0, (M, D).
    """

    queries: Array
    keys: Array
    values: Array
    logs: Array
    output: Array

    @classmethod
    def of(cls, queries: Array, keys: Array, values: Array) -> Case:
        """With the exact attention."""
        logs = log_softmax(queries @ keys.T)
        return cls(queries, keys, values, logs, np.exp(logs) @ values)


def case(column: Column, wanted: Wanted, seed: int) -> Case:
    """The numbers of one column and seed; columns of one seed share their noise."""
    noise, keys, values = drawn(column, wanted, seed, wanted.tokens)
    rng = np.random.default_rng((seed, 1))
    queries = rng.standard_normal((wanted.queries, wanted.head_dim))
    if column.retrieval:
        half = wanted.queries // 2
        queries[:half] += RETRIEVAL * noise[rng.integers(0, wanted.tokens, half)]
    queries *= column.T / np.linalg.norm(queries, axis=1, keepdims=True)  # norm T sqrt(D), over sqrt(D)
    return Case.of(queries, keys, values)


def drawn(column: Column, wanted: Wanted, seed: int, count: int, part: int = 0) -> tuple[Array, Array, Array]:
    """``count`` tokens (count, D): keys without their offsets, keys and values, these rounded to the dtype.

    Parts of one seed are other draws of one distribution, with the same outlier channels and the same mean.
    """
    rng = np.random.default_rng((seed, 2, part))
    noise, values = (rng.standard_normal((count, wanted.head_dim)) for _ in SIDES)
    keys, shape = noise.copy(), np.random.default_rng((seed, 3))
    if column.outlier:
        channels = shape.choice(wanted.head_dim, OUTLIERS, replace=False)
        keys[:, channels] = SPREAD * keys[:, channels] + OFFSET * shape.choice([-1.0, 1.0], OUTLIERS)
    values += column.mean * shape.standard_normal(wanted.head_dim)
    return noise, _rounded(keys, wanted.dtype), _rounded(values, wanted.dtype)


def _rounded(x: Array, dtype: str) -> Array:
    return np.array(mx.array(x.astype(np.float32)).astype(getattr(mx, dtype)).astype(mx.float32)).astype(np.float64)


@attrs.frozen(eq=False)
class Held:
    """One side's tokens as a cache without a window holds them: whole blocks packed, the rest exact."""

    bound: BoundSide
    store: PageStore
    packed: int
    exact: Array

    @property
    def reading(self) -> str:
        """``"attend"`` where the method's own attention reads the fields, ``"decode"`` where vq_decode does."""
        return "decode" if self.bound.attend is None else "attend"

    def logits(self, queries: Array) -> Array:
        """Dot products with all tokens, (M, n)."""
        found = self._scores(queries) if self.bound.attend is not None else queries @ self.decoded().T
        return np.concatenate([found[:, : self.packed], queries @ self.exact.T], axis=1)

    def mixed(self, weights: Array) -> Array:
        """Sums of all tokens weighted by (M, n): (M, D)."""
        left = weights[:, : self.packed]
        found = self._sums(left) if self.bound.attend is not None else left @ self.decoded()
        return found + weights[:, self.packed :] @ self.exact

    def decoded(self) -> Array:
        """The packed tokens, (packed, D)."""
        if not self.packed:
            return np.zeros((0, self.bound.ctx.head_dim))
        page = self.bound.layout.page
        positions = mx.arange(self.store.used * page, dtype=mx.int32).reshape(-1, page)
        x = self.bound.decode(self.store.view().tile, positions)
        return _float64(x).reshape(-1, x.shape[-1])[: self.packed]

    def _scores(self, queries: Array) -> Array:
        attend: Any = self.bound.attend
        prepared = attend.prepare_query(mx.array(queries.astype(np.float32))[None, None])
        parts = [_float64(attend.scores(prepared, tile))[:, 0] for _, tile in self._tiles()]
        found = np.concatenate(parts) if parts else np.zeros((0, len(queries), self.bound.layout.page))
        return found.transpose(1, 0, 2).reshape(len(queries), -1)

    def _sums(self, weights: Array) -> Array:
        attend: Any = self.bound.attend
        layout = self.bound.layout
        rest = self.store.used * layout.page - self.packed
        given = np.pad(weights, ((0, 0), (0, rest))).reshape(len(weights), -1, layout.page).transpose(1, 0, 2)
        sums: mx.array | None = None
        for first, tile in self._tiles():
            count = tile[layout.paged[0].name].shape[0]
            run = mx.array(given[first : first + count].astype(np.float32))[:, None]
            part = attend.accumulate(run, tile).astype(mx.float32).sum(axis=0, keepdims=True)
            sums = part if sums is None else sums + part
            mx.eval(sums)
        if sums is None:
            return np.zeros((len(weights), self.bound.ctx.head_dim))
        return np.asarray(_float64(attend.finish(sums))[0, 0])

    def _tiles(self) -> list[tuple[int, dict[str, mx.array]]]:
        """Runs of pages, each with the number of its first."""
        pages, page = self.store.view(), self.bound.layout.page
        at_once = getattr(self.bound.attend, "tile_tokens", None)
        count = max(1, pages.count if at_once is None else at_once // page)
        return [(at, pages.part(at, min(at + count, pages.count))) for at in range(0, pages.count, count)]


def _float64(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def hold(bound: BoundSide, x: Array) -> Held:
    """Encode and pack tokens (n, D), a block at least at once, by the method's hooks."""
    block, packed = bound.layout.block, len(x) // bound.layout.block * bound.layout.block
    store = PageStore(bound.layout, 1, 1)
    if packed:
        tokens = mx.array(x[:packed].astype(np.float32)).astype(getattr(mx, bound.ctx.dtype))[None, None]
        positions = mx.arange(packed, dtype=mx.int32)[None]
        sequence = bound.start(tokens[:, :, :block], positions[:, :block])
        if sequence:
            store.start([0], sequence)
        store.append([0], bound.pack(tokens, positions, sequence), packed)
        mx.eval(store.arrays())
    return Held(bound, store, packed, x[packed:])


def log_softmax(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def of_keys(one: Case, held: Held) -> tuple[float, float]:
    """(relative output error, mean KL(p0 || p1)) with the keys as held."""
    logs = log_softmax(held.logits(one.queries))
    kl = (np.exp(one.logs) * (one.logs - logs)).sum(axis=1).mean()
    return relative(np.exp(logs) @ one.values, one.output), float(kl)


def of_values(one: Case, held: Held) -> float:
    """Relative output error with the values as held."""
    return relative(held.mixed(np.exp(one.logs)), one.output)


def relative(found: Array, exact: Array) -> float:
    """Norm of the difference over the norm of what is exact."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def of_side(
    text: str, side: Side, wanted: Wanted, exact: Mapping[tuple[str, int], Case], learning: Learning
) -> dict[str, Any]:
    """Figures of one method on one side, all columns."""
    D, row = wanted.head_dim, {}
    columns: dict[str, Any] = {}
    for seed, column in itertools.product(range(wanted.seeds), COLUMNS[side]):
        ctx = PrepareContext(side=side, kv_heads=1, key_dim=D, value_dim=D, dtype=wanted.dtype, seed=seed)
        bound = bind(_learnt(text, ctx, column, wanted, learning), ctx, kernels="off")
        one = exact[column.name, seed]
        held = hold(bound, one.keys if side == "keys" else one.values)
        found = columns.setdefault(column.name, {"errors": [], "kls": []})
        if side == "keys":
            error, kl = of_keys(one, held)
            found["kls"].append(kl)
        else:  # the probabilities are those of the exact keys
            error = of_values(one, held)
        found["errors"].append(error)
        codes, metadata = bound.layout.bits_per_element(D)
        row = {
            "method": text, "side": side, "settings": choose(text, side).text,
            "bits": {"codes": codes, "metadata": metadata, "total": codes + metadata},
            "sequence_bytes": sum(f.nbytes for f in bound.layout.sequence),
            "constant_bytes": sum(a.nbytes for a in bound.constants),
            "packed": held.packed, "read_by": held.reading, "learnt_from": CALIBRATION if needs(text) else 0,
        }  # fmt: skip
    for found in columns.values():
        found |= {"error": float(np.mean(found["errors"])), "error_sd": float(np.std(found["errors"]))}
        if found["kls"]:
            found["kl"] = float(np.mean(found["kls"]))
        else:
            del found["kls"]
    return row | {"columns": columns}


def _learnt(text: str, ctx: PrepareContext, column: Column, wanted: Wanted, learning: Learning) -> str:
    if not needs(text):
        return text
    _, keys, values = drawn(column, wanted, ctx.seed, CALIBRATION, part=1)
    kind = (column.outlier, column.mean)  # columns that differ in their queries only share what is learnt
    return learning.from_numbers(text, ctx, kind, keys if ctx.side == "keys" else values)


def measure(wanted: Wanted, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The table.

    Raises:
        SettingsError, UnsupportedShapeError, PluginError: a method that was asked for refuses.
    """
    found, left_out = candidates(wanted.methods)
    rows: list[dict[str, Any]] = []
    with Learning() as learning:
        for side in SIDES:
            _rows(side, found, wanted, learning, rows, left_out, tell)
    return {
        "environment": environment(),
        "conditions": attrs.asdict(wanted)
        | {"calibration": CALIBRATION, "retrieval": RETRIEVAL, "outliers": [OUTLIERS, OFFSET, SPREAD]}
        | {"columns": {side: [attrs.asdict(c) for c in COLUMNS[side]] for side in SIDES}}
        | {"kernels": "off: plain operations", "about": "vq_core.evaluate.synthetic, docs/evaluation.md"},
        "rows": rows,
        "left_out": left_out,
    }


def _rows(
    side: Side, found: list[Candidate], wanted: Wanted, learning: Learning, rows: list[dict[str, Any]],
    left_out: list[dict[str, str]], tell: Callable[[str], None],
) -> None:  # fmt: skip
    exact = {(c.name, seed): case(c, wanted, seed) for c in COLUMNS[side] for seed in range(wanted.seeds)}
    made: list[dict[str, Any]] = []
    for one in found:
        if side not in one.sides:
            continue
        tell(f"{side}: {one.text}")
        try:
            made.append({"name": one.name} | of_side(one.text, side, wanted, exact, learning))
        except VQError as error:
            if one.asked:
                raise
            left_out.append({"arm": f"{one.text} ({side})", "reason": str(error)})
    rows += by_bits(made, "name", lambda row: float(row["bits"]["total"]))
