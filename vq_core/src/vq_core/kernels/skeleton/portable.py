"""The portable skeleton's text: one pass over packed pages and exact tokens, in the kernel dialect.

Flash decoding, split along the tokens: a threadgroup takes a run of query rows of one KV head and every so-manieth
unit of tokens; its SIMD groups score a unit, keep a running maximum, and add up weighted values, all in float32.
What each threadgroup found is merged by :mod:`vq_core.kernels.skeleton.combine`.  Exact tokens (the window and the
first tokens) have threadgroups of their own, for a method's sums may be in another basis.

A lane scores a tile of T tokens by C channels.  Lanes lie along the tokens first, and what is left of the 32 along
the channels; the latter's partial sums are exchanged so that in the end each lane owns a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from vq_core.kernels.skeleton.scoring import Frame, scores, softmax
from vq_core.kernels.skeleton.snippet import SIMD, Snippet
from vq_core.kernels.skeleton.summing import GROUPS, finish, merge, sums, weighted

EIGHT = 8
EXACT_UNIT = 32
"""Exact tokens that a SIMD group takes at once: few, so that a window of 128 is spread over a threadgroup."""
TYPES = {
    "float32": "float", "float16": "half", "bfloat16": "bfloat", "uint32": "uint", "int32": "int", "uint16": "ushort",
    "int16": "short", "uint8": "uchar", "int8": "int8_t", "bool_": "bool",
}  # fmt: skip


@attrs.frozen
class Pointer:
    """One array that a snippet reads.

    Attributes:
        name: As the snippet's text knows it.
        dtype: Its name.
        size: Elements of one page and head; 0: a constant, read from its beginning.
        sequence: One value a row and not a page.
    """

    name: str
    dtype: str
    size: int = 0
    sequence: bool = False


@attrs.frozen(eq=False)
class Side:
    """One side of a pass: the snippet, its arrays, and the sizes of what it reads.

    Attributes:
        snippet: The method's.
        pointers: What its texts see.
        page: Tokens of a page.
        width: Numbers of a token in the stored basis.
        prefix: ``"k"`` or ``"v"``.
    """

    snippet: Snippet
    pointers: Sequence[Pointer]
    page: int
    width: int
    prefix: str

    def header(self) -> str:
        """The snippet's texts as functions."""
        takes = "".join(f"VQ_GLOBAL({TYPES[p.dtype]}) {p.name}, " for p in self.pointers)
        known = "".join(f"const int {n} = {v}; " for n, v in self.snippet.integers.items())
        text = f"""
VQ_FN void {self.prefix}_numbers({takes}int t, int c, VQ_LOCAL_PTR(float) u) {{
{known}
{self.snippet.numbers}
}}
"""
        if self.snippet.affine:
            text += f"""
VQ_FN float2 {self.prefix}_affine({takes}int t, int c) {{
{known}
{self.snippet.affine}
}}
"""
        return text

    def place(self, depth: str) -> str:
        """Text that finds the page of a depth, and where each array's part of it begins."""
        p, lines = self.prefix, []
        lines.append(f"const uint {p}_depth = {depth};")
        lines.append(
            f"const uint {p}_page = regular != 0u ? {p}_depth * B + b "
            f": uint({p}_table[b * uint({p}_table_shape[1]) + {p}_depth]);"
        )
        for a in self.pointers:
            if a.size:
                page = "b" if a.sequence else f"{p}_page"
                lines.append(f"const uint {p}_at_{a.name} = ({page} * H + head) * {a.size}u;")
        return "\n".join(lines)

    def call(self, function: str, *rest: str) -> str:
        """A call of one of the functions for the page found."""
        arrays = [
            f"{self.prefix}_{a.name}" + (f" + {self.prefix}_at_{a.name}" if a.size else "") for a in self.pointers
        ]
        return f"{self.prefix}_{function}({', '.join([*arrays, *rest])})"


PLACE = """
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup, thread = thread_index_in_threadgroup;
const uint chunk = threadgroup_position_in_grid.x, split = threadgroup_position_in_grid.y;
const uint B = q_shape[0], heads = q_shape[1], L = q_shape[2], H = exact_k_shape[1], total = heads / H * L;
const uint b = threadgroup_position_in_grid.z / H, head = threadgroup_position_in_grid.z - b * H, m0 = chunk * uint(M);
"""
FACTS = """
const int packed = rows[b * 8u], first = rows[b * 8u + 1u], recent = rows[b * 8u + 2u], pad = rows[b * 8u + 3u];
const int hidden = rows[b * 8u + 4u];
const float scaled = as_type<float>(scale_bits), lowest = -3.0e38f;
const uint own_rows = (b * heads + head * (heads / H)) * L;
VQ_LOCAL(float, top, M);
VQ_LOCAL(float, sum, M);
VQ_LOCAL(int, last, M);
VQ_UNROLL
for (int m = 0; m < M; ++m) {
  last[m] = int(length) - (causal != 0u ? int(L) - int(min(m0 + uint(m), total - 1u) % L) : 0);
  top[m] = lowest;
  sum[m] = 0.0f;
}
"""


def body(keys: Side, values: Side, key_dim: int, value_dim: int, unit: int, exact: str) -> str:
    """The pass kernel's body.

    Args:
        keys, values: The methods' halves.
        key_dim, value_dim: Of the exact tokens.
        unit: Tokens that a SIMD group takes at once of the packed ones.
        exact: Dtype of the exact tokens.
    """
    widest, widest_value = max(key_dim, keys.width), max(value_dim, values.width)
    shared = f"""
VQ_SHARED(float, queries, {widest} * M);
VQ_SHARED(float, weights, {GROUPS * max(unit, EXACT_UNIT)} * M);
VQ_SHARED(float, partial, {GROUPS * widest_value} * M);
VQ_SHARED(float, marks, {GROUPS * 2} * M);
"""
    return f"""
{shared}
{PLACE}
{FACTS}
if (split < exact_splits) {{
{exact_part(key_dim, value_dim, exact)}
}} else {{
{_queries("prepared" if keys.snippet.prepare else "q", keys.width)}
{_packed(keys, values, unit)}
{finish(values.width, values.snippet.channels, values.snippet.units, values.snippet.per)}
}}
{merge(widest_value, value_dim, values.width)}
"""


def exact_part(key_dim: int, value_dim: int, dtype: str, masks: bool = True) -> str:
    """What the exact splits do: text for any skeleton whose body has the names of ``PLACE`` and ``FACTS``."""
    return f"""
{_queries("q", key_dim)}
{_exact(key_dim, value_dim, dtype, masks)}
{finish(value_dim, exact_channels(value_dim), (), "")}
"""


def _queries(name: str, width: int) -> str:
    return f"""
for (uint i = thread; i < {width}u * uint(M); i += {GROUPS * SIMD}u) {{
  const uint c = i / uint(M), row = min(m0 + (i - c * uint(M)), total - 1u);
  queries[i] = float({name}[(own_rows + row) * {width}u + c]) * scaled;
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
"""


def _packed(keys: Side, values: Side, unit: int) -> str:
    frame = Frame(keys.snippet.tokens, keys.snippet.channels, unit)
    score = scores(
        frame, keys.width, keys.snippet,
        keys.call("numbers", "t", "c", "u"), keys.call("affine", "t", "c + j"), keys.call("affine", "t + i", "c"),
    )  # fmt: skip
    return f"""
{sums(values.snippet.channels, values.width, unit)}
const uint units = (uint(packed) + {unit - 1}u) / {unit}u, begin = (split - exact_splits) * {GROUPS}u + sg;
for (uint n = begin; n < units; n += (splits - exact_splits) * {GROUPS}u) {{
  const uint at = n * {unit}u, count = min({unit}u, uint(packed) - at);
  const int column = pad - hidden + first + int(at);
  {keys.place(f"at / {keys.page}u")}
  const int k_first = int(at - k_depth * {keys.page}u);
{score}
{softmax(frame)}
  {values.place(f"at / {values.page}u")}
  const int v_first = int(at - v_depth * {values.page}u);
{
        weighted(
            values.snippet,
            values.width,
            unit,
            values.call("numbers", "v_first + t", "c", "u"),
            values.call("affine", "v_first + t + i", "c"),
            values.call("affine", "v_first + t", "c + j"),
        )
    }
}}
"""


def exact_header(dtype: str) -> str:
    """Functions that ``exact_part`` calls: eight numbers of 16 bits at once where they lie so."""
    both = {
        "float16": "const half2 both = as_type<half2>(pair);\n  return vq_float2(float(both.x), float(both.y));",
        "bfloat16": "return vq_float2(as_type<float>(pair << 16), as_type<float>(pair & 0xffff0000u));",
    }.get(dtype)
    if both is None:
        return ""
    return f"""
VQ_FN float2 exact_both(uint pair) {{
  {both}
}}
VQ_FN void exact_run(VQ_GLOBAL({TYPES[dtype]}) from, bool wide, VQ_LOCAL_PTR(float) u) {{
  if (wide) {{
    const uint4 four = vq_view<uint4>(from)[0];
    const float2 a = exact_both(four.x), b = exact_both(four.y), c = exact_both(four.z), d = exact_both(four.w);
    u[0] = a.x;
    u[1] = a.y;
    u[2] = b.x;
    u[3] = b.y;
    u[4] = c.x;
    u[5] = c.y;
    u[6] = d.x;
    u[7] = d.y;
  }} else {{
    VQ_UNROLL
    for (int j = 0; j < {EIGHT}; ++j) u[j] = float(from[j]);
  }}
}}
"""


def exact_channels(width: int) -> int:
    """Channels of a lane's run: all lanes have work where the head is that wide."""
    return next(c for c in (8, 4, 2, 1) if width % c == 0)


def _exact(key_dim: int, value_dim: int, dtype: str, masks: bool) -> str:
    channels, run = next(c for c in (8, 4, 2, 1) if key_dim % c == 0), exact_channels(value_dim)
    kind = TYPES[dtype]

    def load(n: int, name: str, at: str) -> str:
        if exact_header(dtype) and n == EIGHT:
            return f"exact_run({name} + {at}, wide, u)"
        return f"VQ_UNROLL\nfor (int j = 0; j < {n}; ++j) u[j] = float({name}[{at} + j])"

    key = load(channels, "from_k", f"min(t, int(count) - 1) * {key_dim} + c")
    value = load(run, "from_v", f"t * {value_dim} + c")
    runs = exact_header(dtype) and EIGHT in (channels, run)
    keys = Snippet("exact", 1, channels, ".")
    values = Snippet("exact", 1, run, ".")
    frame = Frame(1, channels, EXACT_UNIT)
    return f"""
{sums(run, value_dim, EXACT_UNIT)}
const uint near = (uint(recent) + {EXACT_UNIT - 1}u) / {EXACT_UNIT}u;
const uint units = near + (uint(first) + {EXACT_UNIT - 1}u) / {EXACT_UNIT}u, width = exact_k_shape[2];
for (uint n = split * {GROUPS}u + sg; n < units; n += exact_splits * {GROUPS}u) {{
  const bool old = n >= near;
  const uint unit = old ? n - near : n, tokens = old ? uint(first) : uint(recent);
  const uint count = min({EXACT_UNIT}u, tokens - unit * {EXACT_UNIT}u);
  const uint place = unit * {EXACT_UNIT}u + (old ? 0u : width - uint(recent));
  const uint above = (b * H + head) * (old ? uint(sink_k_shape[2]) : width) + place;
  const int column = old ? pad - hidden + int(place) : int(length) - int(width) + int(place);
  VQ_GLOBAL({kind}) from_k = (old ? sink_k : exact_k) + above * {key_dim}u;
  VQ_GLOBAL({kind}) from_v = (old ? sink_v : exact_v) + above * {value_dim}u;
  {"const bool wide = vq_aligned<uint4>(from_k) && vq_aligned<uint4>(from_v);" if runs else ""}
{scores(frame, key_dim, keys, key, "", "", "along")}
{softmax(frame, masks)}
{weighted(values, value_dim, EXACT_UNIT, value, "", "")}
}}
"""
