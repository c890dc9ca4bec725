"""The matrix pass with the exact tokens in the same launch: one kernel for a pair of methods in device form."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels.kernel import Call, Kernel, Output
from vq_core.kernels.skeleton import matrix_exact
from vq_core.kernels.skeleton.kernels import merge_of
from vq_core.kernels.skeleton.matrix import NUMBERS, MatrixSnippet, grid_splits, matrix_text, prepared, wrong

COLUMNS = 8
"""Query rows of a threadgroup: the columns of a tensor-core tile."""
DTYPES = ("float16", "bfloat16")
PROCESSORS = 132
"""Of an H200: how many threadgroups run at once decides how finely a pass is split, not whether it is right."""
THREADGROUP_MEMORY = 227 * 1024
RESERVED = 1024


@attrs.frozen(eq=False)
class MatrixPair:
    """The kernels of one key side with one value side.

    Attributes:
        run: The pass over packed and exact tokens. Where ``fresh`` is not 0, so many tokens ``new_k`` and ``new_v``
            (B, H, fresh, D) follow those of the window, which must be of one length in all rows; ``grown_k`` and
            ``grown_v`` are the window with them. Else the last two inputs are not read, the last outputs not written.
        merge: The merging of its splits.
        step: Packed tokens that a warp takes at once.
        slots: Threadgroups that run at once.
        fields: For each side the fields in the order in which the kernel takes them, and its snippet's constants.
        prepare: The keys' snippet's.
        finish: The values' snippet's; with it exact and packed sums are merged apart.
        signs: Of the keys' snippet and of the values'.
    """

    run: Kernel
    merge: Kernel
    step: int
    slots: int
    fields: tuple[tuple[str | mx.array, ...], tuple[str | mx.array, ...]]
    prepare: Callable[[mx.array], mx.array] | None = None
    finish: Callable[[mx.array], mx.array] | None = None
    signs: tuple[mx.array | None, mx.array | None] = (None, None)


_lock = threading.Lock()
_made: dict[tuple[str, bool, bool], MatrixPair] = {}


def matrix_pair(keys: MatrixSnippet, values: MatrixSnippet, dtype: str) -> MatrixPair:
    """The kernels for two snippets and exact tokens of a dtype.

    Raises:
        UnsupportedShapeError: tensor cores take 16-bit floats.
    """
    if dtype not in DTYPES:
        raise UnsupportedShapeError(f"tensor cores take float16 and bfloat16 queries, not {dtype}")
    name = f"attend_matrix_{keys.name}_{values.name}_{dtype}"
    with _lock:
        key = (name, keys.prepare is not None, values.finish is not None)
        if key not in _made:
            _made[key] = _pair(name, keys, values, dtype)
        # One text serves all layers, whose rotations and constants differ.
        return attrs.evolve(
            _made[key],
            merge=merge_of(values),
            prepare=keys.prepare,
            finish=values.finish,
            signs=(keys.signs, values.signs),
            fields=(_read(keys), _read(values)),
        )


def _read(side: MatrixSnippet) -> tuple[str | mx.array, ...]:
    return (*(field.name for field in side.fields), *side.constants.values())


def _pair(name: str, keys: MatrixSnippet, values: MatrixSnippet, dtype: str) -> MatrixPair:
    parts = matrix_text(keys, values, dtype=dtype)
    if parts.dynamic_bytes + RESERVED > THREADGROUP_MEMORY:
        said = f"{parts.dynamic_bytes} bytes of threadgroup memory, of which tensor cores' kernels have"
        raise UnsupportedShapeError(f"{keys.name} with {values.name} takes {said} {THREADGROUP_MEMORY - RESERVED}")
    D, V, kind = keys.head_dim, values.head_dim, matrix_exact.TYPES[dtype]
    # Exact tokens have threadgroups of their own, or come first in some of those that take packed ones.
    body = f"""
{parts.shared}
{parts.common}
if (fresh == 0u && turn + h + m0 + b + thread_index_in_threadgroup == 0u) {{
  grown_k[0] = {kind}(0.0f);  // nobody reads it, but there is no output without a number
  grown_v[0] = {kind}(0.0f);
}}
const uint final = folded != 0u || turn >= exact_splits ? 1u : 0u;
for (uint phase = turn < exact_splits ? 0u : 1u; phase <= final; ++phase) {{
const uint split = phase != 0u && folded != 0u ? turn + exact_splits : turn;
{parts.accumulators}
if (phase == 0u) {{
{parts.exact}
}} else {{
{parts.packed}
}}
{parts.mix}
if (phase < final) threadgroup_barrier(mem_flags::mem_threadgroup);
}}
"""
    fields = {**keys.inputs, **values.inputs}

    def partial(*last: int) -> Output:
        def shape(call: Call) -> tuple[int, ...]:
            B, Hq, L, _ = call.shapes["q"]
            H = call.shapes["exact_k"][1]
            return (B, H, call.numbers["splits"], Hq // H * L, *last)

        return Output("float32", shape)

    def grown(side: str) -> Output:
        def shape(call: Call) -> tuple[int, ...]:
            B, H, kept, last = call.shapes[f"exact_{side}"]
            fresh = call.numbers["fresh"]
            return (B, H, kept + fresh, last) if fresh else (1,)

        return Output(dtype, shape)

    def threadgroups(call: Call) -> tuple[int, int, int]:
        B, Hq, L, _ = call.shapes["q"]
        H = call.shapes["exact_k"][1]
        return (grid_splits(call), H * -(-(Hq // H * L) // COLUMNS), B)

    def check(call: Call) -> str:
        exact = (call.shapes["exact_k"][3:], call.shapes["exact_v"][3:])
        if exact != ((D,), (V,)):
            return f"exact tokens of head sizes {exact}"
        fresh = call.numbers["fresh"]
        new = [call.shapes[f"new_{s}"] for s in "kv"]
        if fresh and new != [(*call.shapes[f"exact_{s}"][:2], fresh, d) for s, d in (("k", D), ("v", V))]:
            return f"new tokens {new} are not {fresh} of each row and head"
        return wrong(call, keys, values)

    run = Kernel(
        name=name,
        stands_for="attend",
        body=body,
        header=parts.header,
        inputs={"q": "Q"} | prepared(keys) | {"rows": "int32"}
        | {"exact_k": dtype, "exact_v": dtype, "sink_k": dtype, "sink_v": dtype}
        | {"k_table": "int32", "v_table": "int32"} | fields | {"new_k": dtype, "new_v": dtype},
        outputs={"sums": partial(V), "tops": partial(2), "grown_k": grown("k"), "grown_v": grown("v")},
        parameters={"Q": (dtype,)},
        numbers=(*NUMBERS, "length", "fresh"),
        threads=lambda call: (parts.threads, 1, 1),
        threadgroups=threadgroups,
        equals=_not_here,
        cases=lambda: (),
        exact=False,
        tolerance=4e-3,
        check=check,
        backends=("cuda", "simulator"),
        dynamic_bytes=parts.dynamic_bytes,
    )  # fmt: skip
    slots = PROCESSORS * max(1, min(3, THREADGROUP_MEMORY // (parts.dynamic_bytes + RESERVED)))
    return MatrixPair(run, merge_of(values), parts.step, slots, ((), ()))


def _not_here(*inputs: mx.array, **parameters: object) -> Sequence[mx.array]:
    """What a pass gives only the bound methods' own hooks can say."""
    raise PluginError("a pass kernel is compared by what vq_core.attention.verifying.matrix makes of it")
