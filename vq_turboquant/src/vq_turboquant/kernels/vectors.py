"""Text that kernels of turboquant_rvq and turboquant_prod share: one SIMD group takes one vector.

A vector lies in threadgroup memory, ``all[own]`` on; the lanes take its numbers in turns, ``lane``, ``lane + 32`` ...
Every result is that of :mod:`vq_turboquant.scale`, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from vq_core.codec.hadamard import SignHadamard, hadamard_sizes
from vq_core.codec.projection import MOST, DenseRotation, Projection
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels import Call
from vq_core.kernels.standard.hadamard import ROTATE
from vq_core.kernels.standard.projection import PROJECT

GROUPS = 4
"""SIMD groups, and so vectors, of a threadgroup."""
THREADS = 32 * GROUPS
LIMIT = 2**31
"""Elements of one array: bodies count in 32 bits."""
EDGES, LEVELS, MORE_EDGES, MORE_LEVELS, TABLE = 0, 16, 32, 48, 64
"""Where a table of constants holds the boundaries and centroids of two codebooks of up to 4 bits."""

PLACE = f"""
VQ_SHARED(float, all, {GROUPS * MOST});
const uint lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup * {MOST}u;
const uint n = threadgroup_position_in_grid.x * {GROUPS}u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u);  // spare SIMD groups repeat the last vector and write nothing
"""
"""Whose vector it is."""

SPLIT = f"""
VQ_SHARED(float, low, {GROUPS * MOST});
"""
DENSE = f"""{SPLIT}
VQ_SHARED(float, made, {GROUPS * MOST});
"""
"""Threadgroup memory that a dense product needs besides, of a vector in place."""


def folded(total: str, square: str) -> str:
    """Text of the sum ``total`` over a vector's numbers i, in halves as the core's fold_sum; ``square`` sets TERM."""
    terms = f"{total}_terms"
    return f"""
VQ_LOCAL(float, {terms}, {MOST // 32});
VQ_UNROLL
for (uint k = 0u; k < {MOST // 32}u; ++k) {{
  const uint i = k * 32u + lane;
{square.replace("TERM", f"{terms}[k]")}
}}
VQ_UNROLL
for (uint h = {MOST // 64}u; h > 0u; h >>= 1) {{
  VQ_UNROLL
  for (uint k = 0u; k < h; ++k) {terms}[k] = vq_add({terms}[k], {terms}[k + h]);
}}
float {total} = {terms}[0];
VQ_UNROLL
for (uint h = 16u; h > 0u; h >>= 1) {total} = vq_add({total}, simd_shuffle_xor({total}, h));
"""


def mean(total: str) -> str:
    """The root mean square that a sum of squares makes."""
    return f"sqrt(vq_div({total}, float(D)))"


SQUARE = """
  const float w = i < D ? float(x[row * D + i]) : 0.0f;
  TERM = vq_mul(w, w);
  if (i < D) all[own + i] = w;
"""
LOAD = f"""
{folded("sum", SQUARE)}
float step = {mean("sum")};
if (sizeof(M) == 2) step = float(half(step));  // as it is stored
const float root = sqrt(float(D)), size = vq_mul(step, root);
const bool usable = size > 0.0f && size < INFINITY;
for (uint i = lane; i < D; i += 32u) {{
  const float w = all[own + i];
  all[own + i] = usable ? vq_div(w, size) : 0.0f;
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
"""
"""A vector of norm about 1, and its scale ``step``."""

HADAMARD = """
for (uint k = 0u; k < uint(signs_shape[0]); ++k) {
  for (uint i = lane; i < D; i += 32u) all[own + i] *= signs[k * D + i];
  hadamard(all + own, D, lane, false);
}
"""
UNHADAMARD = """
for (uint k = uint(signs_shape[0]); k > 0u; --k) {
  hadamard(all + own, D, lane, true);
  for (uint i = lane; i < D; i += 32u) all[own + i] *= signs[(k - 1u) * D + i];
}
simdgroup_barrier(mem_flags::mem_threadgroup);
"""


def split(count: str) -> str:
    """The two parts of each of so many numbers of ``all``, into ``all`` and ``low``."""
    return f"""
for (uint i = lane; i < {count}; i += 32u) {{
  const float2 parts = projection_parts(all[own + i]);
  all[own + i] = parts.x;
  low[own + i] = parts.y;
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
"""


def product(high: str, low: str, count: str, results: str) -> str:
    """Text of the three exact sums of result j over so many split numbers; the matrix's parts are (count, results)."""
    return f"""
  float whole = 0.0f, mixed = 0.0f, other = 0.0f;  // every sum is exact, see vq_core.codec.projection
  for (uint i = 0u; i < {count}; ++i) {{
    const float a = all[own + i], b = low[own + i], f = {high}[i * {results} + j], s = {low}[i * {results} + j];
    whole += a * f;
    mixed += a * s;
    other += b * f;
  }}
"""


def turn(high: str, low: str) -> str:
    """``all`` becomes its product with a matrix of D by D numbers whose parts, transposed, are two inputs."""
    return f"""
{split("D")}
for (uint j = lane; j < D; j += 32u) {{
{product(high, low, "D", "D")}
  made[own + j] = projected(whole, mixed, other, 1.0f);
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = lane; i < D; i += 32u) {{
  const float w = made[own + i];
  all[own + i] = w;
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
"""


def count(code: str, v: str, edges: int) -> str:
    """Text that counts the boundaries below a number, from their place in the input ``tables`` on."""
    return f"""
  uint {code} = 0u;
  VQ_UNROLL
  for (int k = 0; k < (1 << bits) - 1; ++k) {code} += {v} > tables[{edges} + k] ? 1u : 0u;
"""


def packed(target: str, code: str, words: str, source: str = "all") -> str:
    """Text that writes the words of a stream, W codes of ``bits``, from ``code`` of the numbers w of ``source``."""
    return f"""
for (uint o = lane; o < {words}; o += 32u) {{
  const uint begin = o * 32u / uint(bits);
  uint word = 0u;
  VQ_UNROLL
  for (uint k = 0u; k < (31u + uint(bits)) / uint(bits) + 1u; ++k) {{
    const uint i = begin + k, at = i * uint(bits);
    if (at < o * 32u + 32u && i < W) {{
      const uint w = uint({source}[own + i]), q = {code};
      word |= at >= o * 32u ? q << (at - o * 32u) : q >> (o * 32u - at);
    }}
  }}
  if (n < rows) {target}[row * ({words}) + o] = word;
}}
"""


UNPACK = """
VQ_FN uint turboquant_code(uint low, uint high, uint shift, uint bits) {
  const uint q = shift + bits > 32u ? low >> shift | high << (32u - shift) : low >> shift;
  return q & ((1u << bits) - 1u);
}
"""


def code(source: str, i: str) -> str:
    """Text of code i of a stream of this row, of ``words`` words."""
    at = f"{i} * uint(bits)"
    word = f"row * words + {at} / 32u"
    return (
        f"turboquant_code({source}[{word}], {source}[row * words + min({at} / 32u + 1u, words - 1u)], "
        f"{at} % 32u, uint(bits))"
    )


HELPERS = {"hadamard": ROTATE, "haar": PROJECT}
KINDS = tuple(HELPERS)


# ---- arrays that the texts read


def rotation_inputs(kind: str) -> dict[str, str]:
    """Names and dtypes."""
    return {"signs": "float32"} if kind == "hadamard" else {"turning": "float32", "turning_low": "float32"}


def rotation_arrays(rotation: SignHadamard | DenseRotation, undo: bool = False) -> tuple[mx.array, ...]:
    """The arrays for these."""
    if isinstance(rotation, SignHadamard):
        return (rotation.signs,)
    matrix = rotation.back if undo else rotation.forward
    return (mx.contiguous(matrix.first.T), mx.contiguous(matrix.second.T))


def rotation_of(given: Sequence[mx.array]) -> SignHadamard | DenseRotation:
    """The rotation that these arrays are, for one direction."""
    if len(given) == 1:
        return SignHadamard(given[0], given[0])
    one = Projection(given[0], given[0].T, given[1].T, 1.0)
    return DenseRotation(one, one)


def declines(state: Any) -> str:
    """Why there is no kernel for a head size; empty where there is one."""
    return "" if state.dim <= MOST else f"head size {state.dim} is above {MOST}"


def kind_of(rotation: SignHadamard | DenseRotation) -> str:
    """Which texts and inputs it takes."""
    return "haar" if isinstance(rotation, DenseRotation) else "hadamard"


def table(*parts: tuple[float, ...] | mx.array) -> mx.array:
    """Boundaries and centroids, each filled up to 16 places."""
    filled = [mx.array(part, mx.float32).reshape(-1) for part in parts]
    return mx.concatenate([mx.pad(part, (0, 16 - part.size)) for part in filled])


def floats(x: mx.array) -> tuple[float, ...]:
    """A row's numbers."""
    found: Any = x.tolist()
    return tuple(found)


def threads(call: Call) -> tuple[int, int, int]:
    """Of a threadgroup."""
    return (THREADS, 1, 1)


def threadgroups(call: Call) -> tuple[int, int, int]:
    """One SIMD group a vector."""
    return (-(-call.numbers["rows"] // GROUPS), 1, 1)


def check(call: Call, dim: int, shape: Sequence[int], name: str) -> str:
    """What is wrong with vectors (..., D) whose array is called so, and with the rotation for them."""
    if len(shape) != 4:
        return f"{name} {tuple(shape)} must have four axes, (B, H, n, ...)"
    if not 1 <= dim <= MOST:
        return f"head size {dim}: accepted are 1 to {MOST}"
    if math.prod(shape[:3]) != call.numbers["rows"] or math.prod(shape[:3]) * max(shape[3], dim) >= LIMIT:
        return f"{name} {tuple(shape)} with rows={call.numbers['rows']}: rows is B H n, with fewer than {LIMIT} numbers"
    return check_rotation(call.shapes, dim)


def check_rotation(shapes: Mapping[str, Sequence[int]], dim: int) -> str:
    """What is wrong with the rotation for vectors of so many numbers."""
    if "signs" in shapes:
        if len(shapes["signs"]) != 2 or shapes["signs"][1] != dim:
            return f"signs {tuple(shapes['signs'])} are not (rounds, {dim})"
        try:
            hadamard_sizes(dim)
        except UnsupportedShapeError as wrong:
            return str(wrong)
    for name in ("turning", "turning_low"):
        if name in shapes and tuple(shapes[name]) != (dim, dim):
            return f"{name} {tuple(shapes[name])} is not ({dim}, {dim})"
    return ""


def metadata_dtype(dtype: str) -> str:
    """The scale's, for numbers of a dtype."""
    return "float16" if dtype == "float16" else "float32"


def name_of(x: mx.array) -> str:
    """An array's dtype by name."""
    return str(x.dtype).removeprefix("mlx.core.")
