"""The skeleton's kernels for one pair of methods and one shape of a head, made once and kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.codec.hadamard import SignHadamard, hadamard_sizes
from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels.kernel import Call, Case, Kernel, Output
from vq_core.kernels.skeleton import combine, portable
from vq_core.kernels.skeleton.portable import EXACT_UNIT, Side, exact_channels
from vq_core.kernels.skeleton.snippet import SIMD, Snippet
from vq_core.kernels.skeleton.summing import GROUPS
from vq_core.kernels.standard.hadamard import held

if TYPE_CHECKING:
    from vq_core.kernels.skeleton.matrix import MatrixSnippet

MOST_ROWS = 4
"""Query rows that a threadgroup takes at once: each costs a lane 16 sums or more in registers."""
MOST_ELEMENTS = 2**32
MOST_SHARED = 32768
THREADS = GROUPS * SIMD
NUMBERS = (
    "scale_bits", "length", "causal", "masked", "regular", "splits", "exact_splits",
)  # fmt: skip
FACTS = 8
"""Numbers that ``rows`` holds of a row: packed tokens, first tokens, window tokens, left padding, hidden tokens."""


@attrs.frozen(eq=False)
class Pair:
    """The kernels of one key side with one value side.

    Attributes:
        run: The pass over packed and exact tokens.
        merge: The merging of its splits, see :func:`merge_of`.
        unit: Packed tokens that a SIMD group takes at once.
        rows: Query rows that a threadgroup can take.
        keys, values: The sides.
    """

    run: Kernel
    merge: Kernel
    unit: int
    rows: int
    keys: Side
    values: Side


_lock = threading.Lock()
_made: dict[str, tuple[Pair, str]] = {}


def pair(keys: Side, values: Side, key_dim: int, value_dim: int, dtype: str) -> Pair:
    """The kernels for two sides and exact tokens of a dtype.

    Raises:
        UnsupportedShapeError: the skeleton cannot do it, naming the limit.
        PluginError: two different texts under one name, or signs that are not of the head size.
    """
    for side, dim in ((keys, key_dim), (values, value_dim)):
        signs = side.snippet.signs
        if signs is not None and (signs.shape[1], side.width) != (dim, dim):
            raise PluginError(
                f"snippet {side.snippet.name!r}: signs of {signs.shape[1]} numbers for a head size of {dim} and a "
                f"stored width of {side.width}: all three must be one"
            )
    unit = _unit(keys, values)
    rows = _rows(keys, values, key_dim, value_dim, unit)
    kinds = "".join(short(p.dtype) for side in (keys, values) for p in side.pointers)
    name = f"attend_{keys.snippet.label}_{values.snippet.label}_{key_dim}_{value_dim}_{short(dtype)}_{kinds}"
    text = portable.body(keys, values, key_dim, value_dim, unit, dtype)
    header = _header(keys, values) + portable.exact_header(dtype)
    with _lock:
        known = _made.get(name)
        if known is None:
            known = _made[name] = (_pair(name, text, header, keys, values, key_dim, value_dim, dtype, unit, rows), text)
    if known[1] != text or known[0].run.header != header:
        raise PluginError(
            f"two different snippets are called {keys.snippet.label!r} or {values.snippet.label!r}: give each text a "
            f"name of its own, with what it depends on among its integers"
        )
    # One text serves all layers, and rotations of any kind.
    merge = merge_of(values.snippet)
    return attrs.evolve(known[0], merge=merge, keys=keys, values=values)


def merge_of(values: Snippet | MatrixSnippet) -> Kernel:
    """What merges the splits of a snippet's values."""
    if values.finish is None:
        return MERGE
    return MERGE_APART if values.signs is None else MERGE_TURNED


def short(dtype: str) -> str:
    """A dtype in a kernel's name."""
    known = {"float16": "h", "bfloat16": "b", "float32": "f", "bool_": "o"}
    return known.get(dtype, dtype.replace("uint", "u").replace("int", "i"))


def _header(keys: Side, values: Side) -> str:
    parts = dict.fromkeys([keys.snippet.header.strip(), values.snippet.header.strip()])  # both sides may share one
    return "\n".join([*parts, keys.header(), values.header()])


def _unit(keys: Side, values: Side) -> int:
    for side in (keys, values):
        if not keys.snippet.unit(side.page):
            raise UnsupportedShapeError(
                f"pages of {side.page} tokens with tiles of {keys.snippet.tokens} tokens: a unit of 32, 64 or 128 "
                f"tokens must divide a page, and its tiles 32 lanes"
            )
    unit = min(keys.snippet.unit(keys.page), keys.snippet.unit(values.page))
    if unit % values.snippet.tokens:
        raise UnsupportedShapeError(f"tiles of {values.snippet.tokens} tokens of values do not divide units of {unit}")
    return unit


def _rows(keys: Side, values: Side, key_dim: int, value_dim: int, unit: int) -> int:
    if keys.width % keys.snippet.channels:
        raise UnsupportedShapeError(f"{keys.width} numbers a key are no whole runs of {keys.snippet.channels} channels")
    if -(-values.width // values.snippet.channels) > SIMD:
        raise UnsupportedShapeError(
            f"{values.width} numbers a value in runs of {values.snippet.channels}: at most 32 runs are accepted"
        )
    if value_dim // exact_channels(value_dim) > SIMD:
        raise UnsupportedShapeError(f"head size {value_dim} of the values: at most 256 is accepted, a multiple of 8")
    widest, values_widest = max(key_dim, keys.width), max(value_dim, values.width)
    for rows in range(MOST_ROWS, 0, -1):
        floats = rows * (widest + GROUPS * (max(unit, EXACT_UNIT) + values_widest + 2))
        if floats * 4 <= MOST_SHARED and rows * values.snippet.channels <= 64 and rows * keys.snippet.tokens <= 64:
            return rows
    raise UnsupportedShapeError(
        f"head sizes {key_dim} and {value_dim} need more than {MOST_SHARED} bytes of threadgroup memory"
    )


def _pair(
    name: str, text: str, header: str, keys: Side, values: Side, key_dim: int, value_dim: int, dtype: str, unit: int,
    rows: int,
) -> Pair:  # fmt: skip
    widest = max(value_dim, values.width)
    prepared = {"prepared": "float32"} if keys.snippet.prepare else {}
    arrays = {
        f"{side.prefix}_{p.name}": p.dtype for side in (keys, values) for p in side.pointers
    }  # fmt: skip

    def partial(last: int) -> Output:
        def shape(call: Call) -> tuple[int, ...]:
            B, heads, L, _ = call.shapes["q"]
            H = call.shapes["exact_k"][1]
            return (B, H, call.numbers["splits"], heads // H * L, last)

        return Output("float32", shape)

    def threadgroups(call: Call) -> tuple[int, int, int]:
        B, heads, L, _ = call.shapes["q"]
        H = call.shapes["exact_k"][1]
        return (-(-(heads // H * L) // call.parameters["M"]), call.numbers["splits"], B * H)

    def check(call: Call) -> str:
        return _check(call, key_dim, value_dim)

    run = Kernel(
        name=name,
        stands_for="attend",
        body=text,
        header=header,
        inputs={"q": "Q"} | prepared | {"rows": "int32", "mask": "float32"}
        | {"exact_k": dtype, "exact_v": dtype, "sink_k": dtype, "sink_v": dtype}
        | {"k_table": "int32", "v_table": "int32"} | arrays,
        outputs={"sums": partial(widest), "tops": partial(2)},
        parameters={"Q": tuple(dict.fromkeys((dtype, "float32"))), "M": tuple(range(1, rows + 1))},
        numbers=NUMBERS,
        threads=lambda call: (THREADS, 1, 1),
        threadgroups=threadgroups,
        equals=_not_here,
        cases=lambda: (),
        exact=False,
        tolerance=1e-5,
        check=check,
    )  # fmt: skip
    return Pair(run, MERGE, unit, rows, keys, values)


def _not_here(*inputs: mx.array, **parameters: object) -> Sequence[mx.array]:
    """What a pass gives only the bound methods' own hooks can say."""
    raise PluginError("a pass kernel is compared by what vq_core.attention.verifying.pass_kernel makes of it")


def _check(call: Call, key_dim: int, value_dim: int) -> str:
    q, k, v = call.shapes["q"], call.shapes["exact_k"], call.shapes["exact_v"]
    if (
        len(q) != 4
        or len(k) != 4
        or len(v) != 4
        or q[1] % k[1]
        or q[3] != key_dim
        or k[3] != key_dim
        or v[3] != value_dim
    ):
        return f"queries {q}, exact keys {k} and values {v} do not fit head sizes {key_dim} and {value_dim}"
    if any(math.prod(shape) >= MOST_ELEMENTS for shape in call.shapes.values()):
        return f"an array of {max(map(math.prod, call.shapes.values()))} elements; fewer than 2**32 are accepted"
    if not 0 < call.numbers["splits"] <= combine.MOST_SPLITS or call.numbers["exact_splits"] > call.numbers["splits"]:
        return f"{call.numbers['splits']} splits: 1 to {combine.MOST_SPLITS} are accepted"
    return ""


def _merged(dtype: str, size: str) -> Output:
    def shape(call: Call) -> tuple[int, ...]:
        B, H, _, rows, _ = call.shapes["sums"]
        L = call.numbers["query_length"]
        return (B, H * rows // L, L, call.numbers[size])

    return Output(dtype, shape)


def _query_rows(call: Call) -> tuple[int, int, int]:
    B, H, _, rows, _ = call.shapes["sums"]
    return (B * H * rows, 1, 1)


def _check_merge(call: Call) -> str:
    sums, tops, L = call.shapes["sums"], call.shapes["tops"], call.numbers["query_length"]
    if len(sums) != 5 or tops != (*sums[:4], 2) or not L or sums[3] % L or not 0 < sums[2] <= combine.MOST_SPLITS:
        return f"sums {sums} and tops {tops} of queries of length {L} do not fit"
    return ""


def _merge_reference(
    sums: mx.array, tops: mx.array, logits: mx.array, *, query_length: int, with_logits: int, exact_splits: int
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """(exact, packed) parts of the output, (B, H_q, L, W) float32."""
    B, H, _, rows, W = sums.shape
    top, whole = tops[..., 0], tops[..., 1]
    top = mx.where(whole != 0, top, -3.0e38)
    highest = top.max(axis=2, keepdims=True)
    if with_logits:
        logit = mx.repeat(logits.reshape(H, -1), query_length, axis=1)[None, :, None] * math.log2(math.e)
        highest = mx.maximum(highest, logit)
    share = mx.where(whole != 0, mx.exp((top - highest) * math.log(2)), 0)
    total = (share * whole).sum(axis=2, keepdims=True)
    if with_logits:
        total = total + mx.exp((logit - highest) * math.log(2))
    parts = share[..., None] * sums / mx.where(total == 0, 1, total)[..., None]
    shape = (B, H * rows // query_length, query_length, W)
    return parts[:, :, :exact_splits].sum(axis=2).reshape(shape), parts[:, :, exact_splits:].sum(axis=2).reshape(shape)


def _merge_together(
    sums: mx.array, tops: mx.array, logits: mx.array, *, T: str, D: int, **numbers: int
) -> list[mx.array]:
    exact, packed = _merge_reference(sums, tops, logits, **numbers)
    return [(exact + packed)[..., :D].astype(getattr(mx, T))]


def _merge_apart(
    sums: mx.array, tops: mx.array, logits: mx.array, *, D: int, width: int, **numbers: int
) -> list[mx.array]:
    exact, packed = _merge_reference(sums, tops, logits, **numbers)
    return [exact[..., :D], packed[..., :width]]


def _merge_turned(
    sums: mx.array, tops: mx.array, logits: mx.array, signs: mx.array, *, T: str, D: int, **numbers: int
) -> list[mx.array]:
    exact, packed = _merge_reference(sums, tops, logits, **numbers)
    return [(exact + SignHadamard(signs, signs).undo(packed)).astype(getattr(mx, T))]


def _check_turned(call: Call) -> str:
    sums, signs, D = call.shapes["sums"], call.shapes["signs"], call.numbers["D"]
    if len(signs) != 2 or not signs[0] or signs[1] != D or sums[-1] != D or D > combine.MOST:
        return f"sums {sums}, signs {signs}, D={D}: sums have D numbers, at most {combine.MOST}, signs are (rounds, D)"
    try:
        hadamard_sizes(D)
    except UnsupportedShapeError as wrong:
        return str(wrong)
    return _check_merge(call)


def _merge_case(
    rng: np.random.Generator, B: int, H: int, splits: int, R: int, L: int, W: int, logits: int
) -> tuple[tuple[mx.array, ...], dict[str, int], str]:
    """Inputs, numbers and a name; among them splits that had no tokens, and a query that saw none."""
    sums = rng.standard_normal((B, H, splits, R * L, W), np.float32)
    tops = rng.standard_normal((B, H, splits, R * L, 2), np.float32) * np.float32(9)
    tops[..., 1] = np.abs(tops[..., 1]) + 1
    tops[:, :, 1::3] = sums[:, :, 1::3] = 0
    tops[:, :, :, 1:2] = sums[:, :, :, 1:2] = 0
    logit = rng.standard_normal(max(8, H * R)).astype(np.float32) * np.float32(15)
    numbers = {"query_length": L, "with_logits": logits, "exact_splits": splits // 3}
    inputs = (mx.array(sums), mx.array(tops), mx.array(logit[: H * R] if logits else logit))
    return inputs, numbers, f"{splits} splits of {R * L} rows of {W}, {'with' if logits else 'without'} sinks"


SHAPES = ((1, 2, 1, 1, 1, 0), (1, 2, 7, 4, 1, 0), (2, 1, 33, 3, 2, 1), (1, 1, 300, 2, 5, 1))
"""B, H, splits, R, L and whether there are sinks."""


def _merge_cases(apart: bool) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        rng = np.random.default_rng(3)
        for (B, H, splits, R, L, logits), D in zip(SHAPES, (16, 128, 80, 160), strict=True):
            inputs, numbers, name = _merge_case(rng, B, H, splits, R, L, D + 16, logits)
            if apart:
                yield Case(inputs, numbers | {"D": D, "width": D + 16}, name)
            else:
                for T in MERGED:
                    yield Case(inputs, numbers | {"D": D, "T": T}, name)

    return cases


def _turned_cases() -> Iterator[Case]:
    rng = np.random.default_rng(4)
    for turn, D in enumerate((64, 128, 96, 80, 256, 112, 192, 160, 20, 224) * 8):
        B, H, splits, R, L, logits = SHAPES[turn % 4]
        inputs, numbers, name = _merge_case(rng, B, H, splits - turn % 3 if splits > 3 else splits, R, L, D, logits)
        signs = mx.array(rng.choice([-1.0, 1.0], (1 + turn // 2 % 3, D)).astype(np.float32))
        T = MERGED[turn % 3]
        yield Case((*inputs, signs), numbers | {"D": D, "T": T}, f"{name}, {signs.shape[0]} rounds, {T}")


MERGED = ("float16", "bfloat16", "float32")
_COMMON: dict[str, Any] = {
    "stands_for": "attend",
    "inputs": {"sums": "float32", "tops": "float32", "logits": "float32"},
    "threads": lambda call: (combine.THREADS, 1, 1),
    "threadgroups": _query_rows,
    "exact": False,
    "check": _check_merge,
}
MERGE = Kernel(
    name="attend_merge",
    body=combine.TOGETHER,
    outputs={"out": _merged("T", "D")},
    parameters={"T": MERGED},
    numbers=("query_length", "with_logits", "exact_splits", "D"),
    equals=_merge_together,
    cases=_merge_cases(False),
    tolerance=8e-3,  # a last place of bfloat16; the others agree far closer, see the tests
    **_COMMON,
)
MERGE_APART = Kernel(
    name="attend_merge_apart",
    body=combine.APART,
    outputs={"plain": _merged("float32", "D"), "stored": _merged("float32", "width")},
    numbers=("query_length", "with_logits", "exact_splits", "D", "width"),
    equals=_merge_apart,
    cases=_merge_cases(True),
    tolerance=1e-5,
    **_COMMON,
)
MERGE_TURNED = Kernel(
    name="attend_merge_turned",
    body=combine.TURNED,
    header=held(combine.MOST),
    outputs={"out": _merged("T", "D")},
    parameters={"T": MERGED},
    numbers=("query_length", "with_logits", "exact_splits", "D"),
    equals=_merge_turned,
    cases=_turned_cases,
    tolerance=8e-3,  # as attend_merge
    **_COMMON | {"inputs": _COMMON["inputs"] | {"signs": "float32"}, "check": _check_turned},
)
KERNELS = (MERGE, MERGE_APART, MERGE_TURNED)
