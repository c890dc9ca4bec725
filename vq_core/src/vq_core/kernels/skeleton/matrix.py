"""The matrix skeleton: attention of few queries straight from packed codes on NVIDIA's tensor cores.

A method brings two snippets, one a side, for a device form of its pages whose token axis counts blocks of 32 tokens.
The result of the pass is that of the portable skeleton's: sums and maxima of each split, to be merged.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import mlx.core as mx

from vq_core.api.facts import Side
from vq_core.errors import PluginError
from vq_core.kernels.kernel import Call, Case, Kernel, Output
from vq_core.kernels.skeleton import matrix_exact
from vq_core.kernels.skeleton import matrix_text as text
from vq_core.kernels.skeleton.snippet import wrong_signs

BLOCK = 32
"""Tokens of a block: two tiles of 16."""
MOST_QUERIES = 16
HEAD_DIMS = (64, 96, 128, 192, 256)
NUMBERS = ("scale_bits", "causal", "splits", "exact_splits", "folded", "regular")
FACTS = 8
"""Numbers that ``rows`` holds of a row: packed tokens, first tokens, window tokens, left padding, hidden tokens."""
MOST_WIDTH = 256
"""Numbers of a key in the stored basis: a lane holds an eighth of them in registers."""
MOST_ELEMENTS = 2**32
INFINITE_BITS = 0x7F800000


@attrs.frozen
class MatrixField:
    """A field of a side's device form as the skeleton copies it.

    Attributes:
        name: The field's.
        dtype: As stored.
        words: Words of 32 bits of one block of 32 tokens of one head; a multiple of 4.
    """

    name: str
    dtype: str
    words: int


@attrs.frozen(eq=False)
class MatrixSnippet:
    """How a method's codes of one side take part in matrix products.

    The text sees macros: ``UNIT`` blocks of a step; for each of its fields, ``K_NAME_AT`` (or ``V_NAME_AT``), the first
    word of the field in a step, whose blocks follow each other ``K_NAME_WORDS`` apart.  ``step`` points to the step's
    words in threadgroup memory, ``lane`` is the lane's number, 4 g + t.

    A key snippet defines ::

        float matrix_fold(uint pair)  // a power of two that query channels 8 pair + 2 t and the next are multiplied by
        void matrix_scores(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) query, VQ_LOCAL_PTR(float4) c)

    ``query[pair]`` are two halves of query row g, below 1 but for the fold.  It sets ``c[2 u + i]`` to the scores of
    tokens 16 i + g and 16 i + g + 8 of block u with query rows 2 t and 2 t + 1, each times 1 / ``scale``.

    A value snippet defines ::

        void matrix_values(VQ_SHARED_PTR(uint) step, uint lane, VQ_LOCAL_PTR(uint) p, VQ_LOCAL_PTR(float4) acc,
                           VQ_LOCAL_PTR(float4) extra)
        void matrix_finish(uint lane, VQ_LOCAL_PTR(float4) acc, VQ_LOCAL_PTR(float4) extra)

    ``p[4 u + 2 i + a]`` are the weights of tokens 16 i + 8 a + 2 t and the next, of block u, for query row g: the
    fragment B of a product over 16 tokens is ``p[4 u + 2 i]``, ``p[4 u + 2 i + 1]``.  Weights are at most 2^4.
    Tile ``acc[n]`` holds channels 16 n + g and 16 n + g + 8; ``extra[0]`` is a tile of the snippet's own, whose row 8
    must become the sums of the weights (a row of ones in A).  ``matrix_finish`` makes ``acc`` the sums.

    A method that stores its tokens in another basis says how to get there and back, as a
    :class:`~vq_core.kernels.skeleton.snippet.Snippet` does; exact tokens stay in the model's.  That of keys may have
    ``width`` numbers, such as those of a sketch: ``query`` then has width / 8 pairs.

    A side with ``constants`` finds them, one behind the other, in threadgroup memory: each of its functions but
    ``matrix_fold`` then takes ``VQ_SHARED_PTR(uint) kept`` before all else.

    Attributes:
        side: ``"keys"`` or ``"values"``.
        name: Letters, digits and underscores; all that the text depends on, and whether there is a ``prepare``.
        head_dim: D, one of 64, 96, 128, 192, 256.
        fields: In the order in which a step holds them.
        text: In the dialect, for CUDA and the simulator.
        scale: Of keys, see above.
        page: Tokens of a page.
        width: Of keys: numbers of one in the stored basis, a multiple of 16; 0: the head size.
        constants: Arrays of uint32, multiples of 4 words, whose sizes the name tells; they may differ by layer.
        prepare: Keys: queries (B, H_q, L, D), float32, into the stored basis, (B, H_q, L, width) float32. ``None``: as
            they are, and the kernel takes no more of them than the model gives.
        finish: Values: sums of packed tokens (B, H_q, L, D_v), float32, out of the stored basis. ``None``: as they are.
        signs: As those of a :class:`~vq_core.kernels.skeleton.snippet.Snippet`.
    """

    side: Side
    name: str
    head_dim: int
    fields: tuple[MatrixField, ...]
    text: str
    scale: float = 1.0
    page: int = 128
    width: int = 0
    constants: Mapping[str, mx.array] = attrs.field(factory=dict)
    prepare: Callable[[mx.array], mx.array] | None = None
    finish: Callable[[mx.array], mx.array] | None = None
    signs: mx.array | None = None

    def __attrs_post_init__(self) -> None:
        wrong = ""
        if self.prepare is not None and self.side != "keys":
            wrong = "queries are prepared for keys, not for values"
        elif self.finish is not None and self.side != "values":
            wrong = "sums are finished for values, not for keys"
        elif not re.fullmatch(r"\w+", self.name, re.ASCII):
            wrong = "its name must be letters, digits and underscores"
        elif self.head_dim not in HEAD_DIMS:
            wrong = f"head size {self.head_dim}: accepted are {', '.join(map(str, HEAD_DIMS))}"
        elif self.page % (2 * BLOCK) or any(field.words % 4 or field.words < 4 for field in self.fields):
            wrong = f"pages of {self.page} tokens must hold pairs of blocks, and fields multiples of 4 words"
        elif not (1e-30 < self.scale < 1e30):
            wrong = f"scale {self.scale} is out of range"
        elif self.width % 16 or not 0 <= self.width <= MOST_WIDTH:
            wrong = f"width {self.width}: accepted are multiples of 16 up to {MOST_WIDTH}"
        elif self.width not in (0, self.head_dim) and self.prepare is None:
            wrong = f"queries of {self.head_dim} numbers need a prepare for keys of {self.width}"
        elif any(a.dtype != mx.uint32 or a.size % 4 or not a.size for a in self.constants.values()):
            wrong = "its constants must be arrays of uint32, multiples of 4 words"
        else:
            wrong = wrong_signs(self.signs, self.prepare is not None or self.finish is not None)
            if not wrong and self.signs is not None and self.signs.shape[1] != self.head_dim:
                wrong = f"signs of {self.signs.shape[1]} numbers for a head size of {self.head_dim}"
        if wrong:
            raise PluginError(f"matrix snippet {self.name!r}: {wrong}")

    @property
    def prefix(self) -> str:
        """``k`` or ``v``."""
        return "k" if self.side == "keys" else "v"

    @property
    def stored(self) -> int:
        """Numbers of a token in the stored basis."""
        return self.width or self.head_dim

    @property
    def inputs(self) -> dict[str, str]:
        """What a kernel takes of the side, and the dtypes: fields, then constants."""
        held = {field.name: field.dtype for field in self.fields} | dict.fromkeys(self.constants, "uint32")
        return {f"{self.prefix}_{name}": dtype for name, dtype in held.items()}


@attrs.frozen
class MatrixPlan:
    """How a pass is laid out on a processor.

    Attributes:
        unit: Blocks of 32 tokens of a warp's step, 1 or 2.
        warps: Of a threadgroup.
        stages: Steps of a warp that have room in threadgroup memory, one of which is worked on.
    """

    unit: int
    warps: int
    stages: int


def plan(keys: MatrixSnippet, values: MatrixSnippet) -> MatrixPlan:
    """What ran best on an H200: two blocks a step where the registers hold it."""
    return MatrixPlan(2 if max(keys.head_dim, values.head_dim) <= 128 else 1, 4, 2)


@attrs.frozen(eq=False)
class MatrixText:
    """The parts of a pass kernel's text.

    Attributes:
        header: Of the kernel.
        shared: Threadgroup memory, at the top of the body.
        common: Names that all parts use: ``lane``, ``warp``, ``turn``, ``h``, ``b``, ``m0``, ``held``, ``M``, ``H``.
        accumulators: Sums, weights and maxima, as both of the next begin with them.
        packed: The packed tokens of ``split``, from ``exact_splits`` on; where ``folded`` is not 0, the first
            ``exact_splits`` of these take so many steps less than the others.
        exact: The exact tokens of split ``turn``.
        mix: The threadgroup's sums and maxima, out, as ``split``.
        dynamic_bytes: Of threadgroup memory.
        threads: Of a threadgroup.
        step: Tokens that a warp takes at once.
    """

    header: str
    shared: str
    common: str
    accumulators: str
    packed: str
    exact: str
    mix: str
    dynamic_bytes: int
    threads: int
    step: int


def matrix_text(
    keys: MatrixSnippet, values: MatrixSnippet, laid: MatrixPlan | None = None, dtype: str = ""
) -> MatrixText:
    """The text of a pass over packed tokens, and with a dtype of that over exact ones.

    Raises:
        PluginError: a snippet of the wrong side, or what does not fit a processor's threadgroup memory.
    """
    if (keys.side, values.side) != ("keys", "values"):
        raise PluginError(f"matrix snippets {keys.name!r} and {values.name!r} are not of keys and of values")
    laid = laid or plan(keys, values)
    D, V, at, defines, loads, clear = keys.head_dim, values.head_dim, 0, [], [], []
    for snippet in (keys, values):
        k, blocks = snippet.prefix, snippet.page // BLOCK
        loads.append(
            f"const uint {k}_deep = next / {blocks // laid.unit}u;\n"
            f"const uint {k}_in = next % {blocks // laid.unit}u * {laid.unit}u;"
            f"\n      const uint {k}_page = regular != 0u ? {k}_deep * rows_all + b : "
            f"uint({k}_table[b * uint({k}_table_shape[1]) + {k}_deep]);\n"
            f"      const uint {k}_first = ({k}_page * H + h) * {blocks}u + {k}_in;"
        )
        for field in snippet.fields:
            size, name = field.words * laid.unit, f"{k.upper()}_{field.name.upper()}"
            defines += [f"#define {name}_AT {at}u", f"#define {name}_WORDS {field.words}u"]
            loads.append(
                f"matrix_copy<{size // 4}>(to + {at // 4}u, "
                f"vq_view<uint4>({k}_{field.name}) + {k}_first * {field.words // 4}u, lane);"
            )
            if snippet is values:
                words = f"{name}_AT + filled * {name}_WORDS + i"
                clear.append(f"for (uint i = lane; i < (UNIT - filled) * {name}_WORDS; i += 32u) mine[{words}] = 0u;")
            at += size
    room = max(laid.warps * laid.stages * at, laid.warps * 8 * (V + 4))
    sizes = {s.prefix: {name: a.size for name, a in s.constants.items()} for s in (keys, values)}
    kept, room = text.kept(sizes, room, laid.warps * BLOCK)
    constants = {
        "PAIRS": f"{D // 8}", "TILES": f"{V // 16}", "D": f"{D}u", "V": f"{V}u", "UNIT": f"{laid.unit}",
        "STORED_PAIRS": f"{keys.stored // 8}", "STORED": f"{keys.stored}u",
        "WARPS": f"{laid.warps}u", "STAGES": f"{laid.stages}u", "STEP_SIZE": f"{at // 4}u",
        "STEP": f"{laid.unit * BLOCK}u", "KEY_SCALE": f"{keys.scale:.9e}f", "HEADROOM": f"{text.HEADROOM}f",
        "FIRST_FIELD_shape": f"k_{keys.fields[0].name}_shape", "LOAD": "\n      ".join(loads),
        "CLEAR": "\n    ".join(clear), "CHANNEL": "16u * i + g", "NEXT": "8u",
    } | kept  # fmt: skip
    asked = text.PLAIN if keys.prepare is None else text.PREPARED
    constants |= {word: part.replace("PAIRS", constants["PAIRS"]) for word, part in asked.items()}

    def filled(part: str) -> str:
        return re.sub(r"\b[A-Z][A-Za-z_]*\b", lambda word: constants.get(word[0], word[0]), part)

    own = matrix_exact.header(dtype) if dtype else ""
    header = "\n".join([f"#define UNIT {laid.unit}u", *defines, text.HEADER, own, keys.text, values.text])
    if dtype:
        constants |= {
            "CHANNEL": f"phase == 0u ? {matrix_exact.channel(V)} : 16u * i + g", "NEXT": "phase == 0u ? 1u : 8u",
        }  # fmt: skip
    return MatrixText(
        header, filled(text.SHARED), filled(text.COMMON), filled(text.ACCUMULATORS), filled(text.PACKED),
        filled(matrix_exact.text(dtype, V)) if dtype else "", filled(text.MIX), 4 * room, laid.warps * BLOCK,
        laid.unit * BLOCK,
    )  # fmt: skip


def matrix_pass(
    keys: MatrixSnippet,
    values: MatrixSnippet,
    *,
    cases: Callable[[], Iterable[Case]],
    equals: Callable[..., Sequence[mx.array]],
    laid: MatrixPlan | None = None,
) -> Kernel:
    """The kernel that attends to packed tokens alone (``exact_splits=0``).

    Inputs ``q`` (B, H_q, L, D) float16 or bfloat16, not scaled; ``prepared``, what the keys' ``prepare`` makes of it,
    if there is one; ``rows`` (B, 8) int32, see ``FACTS``; the device
    fields of the keys, ``k_<name>``, and of the values, ``v_<name>``, (N pages, H, ...); ``k_table`` and ``v_table``
    (B, depth) int32, the page of row b and depth d, read where ``regular`` is 0 (else it is d * B + b).  Run-time
    numbers: ``scale_bits``, the scale times log2(e) as the bits of a float; ``causal``; ``splits``; ``exact_splits``;
    ``folded``, see :class:`MatrixText`; ``regular``.

    Outputs: ``sums`` (B, H, splits, R * L, D_v) and ``tops`` (B, H, splits, R * L, 2), a split's maximum (a score in
    powers of two that no score exceeds by more than 2^4) and its weights' sum; the maximum of a split without tokens
    is -1e30, its weights 0.

    Args:
        keys, values: The snippets.
        cases, equals: Of the kernel; compared are the merged outputs, (B, H, R * L, D_v) float32.
        laid: Another plan than the best.
    """
    parts = matrix_text(keys, values, laid)
    fields = {**keys.inputs, **values.inputs}
    first = next(iter(fields))

    def shape(*last: int) -> Callable[[Call], tuple[int, ...]]:
        def of(call: Call) -> tuple[int, ...]:
            B, Hq, L, _ = call.shapes["q"]
            H = call.shapes[first][1]
            return (B, H, call.numbers["splits"], Hq // H * L, *last)

        return of

    def threadgroups(call: Call) -> tuple[int, int, int]:
        B, H, _, M = shape()(call)
        return (grid_splits(call), H * -(-M // 8), B)

    return Kernel(
        name=f"matrix_{keys.name}_{values.name}",
        stands_for="attend",
        body="\n".join(
            (parts.shared, parts.common, "const uint split = turn;", parts.accumulators, parts.packed, parts.mix)
        ),
        header=parts.header,
        inputs={"q": "Q", **prepared(keys), "rows": "int32", **fields, "k_table": "int32", "v_table": "int32"},
        outputs={"sums": Output("float32", shape(values.head_dim)), "tops": Output("float32", shape(2))},
        parameters={"Q": ("float16", "bfloat16")},
        numbers=NUMBERS,
        threads=lambda call: (parts.threads, 1, 1),
        threadgroups=threadgroups,
        equals=equals,
        cases=cases,
        exact=False,
        tolerance=4e-3,
        check=lambda call: wrong(call, keys, values),
        backends=("cuda", "simulator"),
        dynamic_bytes=parts.dynamic_bytes,
        compared=merged,
    )


def prepared(keys: MatrixSnippet) -> dict[str, str]:
    """The input that queries in the stored basis are, where there is one."""
    return {} if keys.prepare is None else {"prepared": "float32"}


def merged(sums: mx.array, tops: mx.array) -> tuple[mx.array, ...]:
    """One softmax of all splits: (B, H, M, D_v) float32."""
    share = mx.exp((tops[..., 0] - tops[..., 0].max(axis=2, keepdims=True)) * math.log(2))
    return ((sums * share[..., None]).sum(axis=2) / (tops[..., 1] * share).sum(axis=2)[..., None],)


def grid_splits(call: Call) -> int:
    """Threadgroups that share a head's tokens: where they are folded, the exact tokens have none of their own."""
    n = call.numbers
    return n["splits"] - (n["exact_splits"] if n["folded"] else 0)


def scale_bits(scale: float) -> int:
    """The run-time number that says how scores are scaled."""
    return int(struct.unpack("<I", struct.pack("<f", scale * math.log2(math.e)))[0])


def wrong(call: Call, keys: MatrixSnippet, values: MatrixSnippet) -> str:
    """Why the skeleton cannot do a call; nothing if it can."""
    q, rows, numbers = call.shapes["q"], call.shapes["rows"], call.numbers
    if len(q) != 4 or q[3] != keys.head_dim or min(q) < 1:
        return f"q {q} must be (B, H_q, L, {keys.head_dim})"
    if q[2] > MOST_QUERIES:
        return f"{q[2]} queries a row: at most {MOST_QUERIES} are accepted"
    wanted = (*q[:3], keys.stored)
    if keys.prepare is not None and call.shapes["prepared"] != wanted:
        return f"prepared {call.shapes['prepared']} must be {wanted}, of the queries in q"
    if rows != (q[0], FACTS):
        return f"rows {rows} must be {(q[0], FACTS)}"
    if not 0 < numbers["scale_bits"] < INFINITE_BITS:
        return "the scale must be above 0 and finite"
    heads = None
    for snippet in (keys, values):
        k, pages = snippet.prefix, None
        for field in snippet.fields:
            size = 4 * field.words // (2 if field.dtype in ("float16", "bfloat16", "uint16") else 4)
            shape = call.shapes[f"{k}_{field.name}"]
            must = (pages or shape[0], heads or shape[1], snippet.page // BLOCK, size)
            if shape != must:
                return f"{k}_{field.name} {shape} must be {must}"
            pages, heads = shape[0], shape[1]
            if math.prod(shape) >= MOST_ELEMENTS:
                return f"{k}_{field.name} {shape} has {MOST_ELEMENTS} elements or more"
        for name, array in snippet.constants.items():
            if call.shapes[f"{k}_{name}"] != array.shape:
                return f"{k}_{name} {call.shapes[f'{k}_{name}']} must be {array.shape}"
        table = call.shapes[f"{k}_table"]
        if len(table) != 2 or (table[0] != q[0] and not numbers["regular"]):
            return f"{k}_table {table} must be ({q[0]}, depth)"
    if q[1] % (heads or 1):
        return f"{q[1]} query heads are no multiple of the {heads} KV heads"
    if not numbers["exact_splits"] < numbers["splits"]:
        return f"{numbers['splits']} splits with {numbers['exact_splits']} exact ones: at least one more is needed"
    if numbers["folded"] and 2 * numbers["exact_splits"] > numbers["splits"]:
        return f"{numbers['splits']} splits cannot fold {numbers['exact_splits']} exact ones: twice as many are needed"
    return ""
