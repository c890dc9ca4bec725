"""The kernels' texts, in the dialect of docs/kernels/dialect.md.

All sums of products are of whole numbers and exact (:mod:`vq_core.codec.projection`): they may be taken in any order,
fused or not.  Sums of squares are not, and follow :func:`vq_core.codec.projection.fold_sum`.
"""

from __future__ import annotations

from vq_core.codec.projection import LOW, MOST
from vq_core.kernels.standard.projection import PROJECT
from vq_qjl.method import CHANNELS, GROUP, SMALLEST

THREADS = 128
TOKENS = 8
"""Tokens of a threadgroup, where there are no groups."""

HEADER = PROJECT


def _fold(count: int, add: str = "v[k] = vq_add(v[k], v[k + {half}u]);") -> str:
    """Text that adds v[0] to v[count - 1] up in v[0], halves onto halves."""
    lines, half = [], count // 2
    while half:
        lines.append(f"  VQ_UNROLL\n  for (uint k = 0u; k < {half}u; ++k) {add.format(half=half)}")
        half //= 2
    return "\n".join(lines)


def _square(name: str, count: str, most: int, number: str) -> str:
    """Text for the sum of the squares of ``count`` numbers, the i-th being ``number``, by a SIMD group."""
    return f"""
  float {name} = 0.0f;
  {{
    VQ_LOCAL(float, v, {most // 32});
    VQ_UNROLL
    for (uint k = 0u; k < {most // 32}u; ++k) {{
      const uint i = k * 32u + lane;
      float one = 0.0f;
      if (i < {count}) one = {number};
      v[k] = vq_mul(one, one);
    }}
{_fold(most // 32)}
    {name} = v[0];
  }}
  VQ_UNROLL
  for (uint o = 16u; o > 0u; o >>= 1) {name} = vq_add({name}, simd_shuffle_xor({name}, o));
"""


def _divisor(square: str) -> str:
    return f"{square} > {SMALLEST!r}f ? sqrt({square}) : 1.0f"


def _weight(square: str, count: str) -> str:
    return f"{square} <= {SMALLEST!r}f ? 0.0f : sqrt(vq_div({square}, float({count})))"


def _project(tokens: int, count: str, number: str, norms: str, columns: str, width: str, active: str, own: str) -> str:
    """Text that adds to high[t] and low[t] what a lane's column says of each token, 32 numbers at a time."""
    return f"""
for (uint c0 = 0u; c0 < {count}; c0 += 32u) {{
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = thread; k < {tokens * 32}u; k += {THREADS}u) {{
    const uint token = k / 32u, c = c0 + (k & 31u), i = min(c, {count} - 1u);
    const float2 two = projection_parts(vq_div({number}, {norms}[token]));
    parts[2u * k] = c < {count} ? two.x : 0.0f;
    parts[2u * k + 1u] = c < {count} ? two.y : 0.0f;
  }}
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if ({active}) {{
    for (uint j = 0u; j < 32u; j += 2u) {{  // two channels at a time: reading parts is what takes longest
      const float s = {columns}[min(c0 + j, {count} - 1u) * {width} + {own}];
      const float next = {columns}[min(c0 + j + 1u, {count} - 1u) * {width} + {own}];
      VQ_UNROLL
      for (uint t = 0u; t < {tokens}u; ++t) {{
        const float4 four = vq_view<float4>(parts)[t * 16u + j / 2u];
        high[t] += four.x * s + four.z * next;
        low[t] += four.y * s + four.w * next;
      }}
    }}
  }}
}}
"""


def _ballots(tokens: int) -> str:
    """Text that turns the lanes' sums into words: ``kept`` is the word of the token of the lane's number."""
    return f"""
uint kept = 0u;
VQ_UNROLL
for (uint t = 0u; t < {tokens}u; ++t) {{
  const bool up = high[t] * {LOW}f + low[t] > 0.0f;  // false for NaN
  const uint found = simd_ballot(up);
  kept = lane == t ? found : kept;
}}
"""


STORE = """
  if (sizeof(U) == 4) {
    signs[row * words + word] = U(kept);
  } else {  // a sketch that fills no whole words is stored in bytes; what lanes beyond it say is not
    for (uint k = word * 4u; k < min(word * 4u + 4u, m / 8u); ++k) {
      signs[row * (m / 8u) + k] = U(kept >> (k % 4u * 8u) & 255u);
    }
  }
"""

DEVICE_STORE = """
// A threadgroup has 8 tokens' 128 signs of one chunk: a lane makes a word of one token, of every fourth pair.
if (lane < 8u) taken[lane * 4u + member] = kept;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (member == 0u) {
  uint word = 0u;
  VQ_UNROLL
  for (uint j = 0u; j < 16u; ++j) {
    const uint two = taken[lane / 4u * 4u + j / 4u] >> (8u * (j & 3u) + 2u * (lane & 3u));
    word |= (two & 1u) << j | (two >> 1 & 1u) << (16u + j);
  }
  signs[(first / 32u * (m / 128u) + threadgroup_position_in_grid.y) * 128u + lane * 4u + (first / 8u & 3u)] = word;
}
"""


def _encode(outputs: str, shared: str, place: str, store: str) -> str:
    """Text that encodes keys without outliers, and puts the norm of ``row`` at ``place``."""
    return (
        f"""
// x (B, H, n, D), columns (D, m) -> {outputs}.
// A threadgroup takes {TOKENS} tokens and four words of their signs: a SIMD group a word, a lane a sign.
VQ_SHARED(float, parts, {TOKENS * 64});
VQ_SHARED(float, norms, {TOKENS});
{shared}const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3], m = columns_shape[1];
const uint thread = thread_index_in_threadgroup, lane = thread & 31u, member = thread / 32u, words = (m + 31u) / 32u;
const uint first = threadgroup_position_in_grid.x * {TOKENS}u;
const uint word = threadgroup_position_in_grid.y * 4u + member, own = min(word * 32u + lane, m - 1u);
for (uint k = member; k < {TOKENS}u; k += 4u) {{
  const uint row = min(first + k, rows - 1u);  // surplus tokens repeat the last one and write nothing
"""
        + _square("square", "D", MOST, "float(x[row * D + i])")
        + f"""
  if (lane == 0u) {{
    norms[k] = {_divisor("square")};
    if (threadgroup_position_in_grid.y == 0u && first + k < rows) weight[{place}] = M({_weight("square", "D")});
  }}
}}
VQ_LOCAL(float, high, {TOKENS});
VQ_LOCAL(float, low, {TOKENS});
VQ_UNROLL
for (uint t = 0u; t < {TOKENS}u; ++t) {{
  high[t] = 0.0f;
  low[t] = 0.0f;
}}
"""
        + _project(
            TOKENS,
            "D",
            "float(x[min(first + token, rows - 1u) * D + i])",
            "norms",
            "columns",
            "m",
            "word < words",
            "own",
        )
        + _ballots(TOKENS)
        + f"""
{store}"""
    )


ENCODE = _encode(
    "signs (B, H, n, m bits), weight (B, H, n, 1)",
    "",
    "row",
    f"""if (lane < {TOKENS}u && first + lane < rows && word < words) {{
  const uint row = first + lane;
{STORE}
}}
""",
)
ENCODE_DEVICE = _encode(
    "signs (B, H, n / 32, m words), weight (B, H, n / 32, 32)",
    "VQ_SHARED(uint, taken, 32);\n",
    "row / 32u * 32u + (row & 7u) * 4u + (row / 8u & 3u)",
    DEVICE_STORE,
).replace("= M(", "= half(")

ENCODE_OUTLIERS = (
    f"""
// x (B, H, n, D), columns (D, m), own_columns (o, w) -> signs (B, H, n, m bits), weight (B, H, n, 1),
// outlier_signs (B, H, n, w bits), outlier_weight (B, H, n, 1), channels (B, H, n / {GROUP}, o).
// A threadgroup takes a group of {GROUP} tokens and four words of their signs, the outliers' words being the last.
VQ_SHARED(float, parts, {GROUP * 64});
VQ_SHARED(float, energy, {CHANNELS});
VQ_SHARED(uint, chosen, {CHANNELS});
VQ_SHARED(uint, listed, {CHANNELS});
VQ_SHARED(float, norms, {GROUP});
VQ_SHARED(float, own_norms, {GROUP});
const uint D = x_shape[3], m = columns_shape[1], O = own_columns_shape[0], width = own_columns_shape[1];
const uint thread = thread_index_in_threadgroup, lane = thread & 31u, member = thread / 32u;
const uint words = (m + 31u) / 32u, own_words = width / 32u;
const uint group = threadgroup_position_in_grid.x, first = group * {GROUP}u;
const bool writes = threadgroup_position_in_grid.y == 0u;
const uint word = threadgroup_position_in_grid.y * 4u + member, own_word = word < words ? 0u : word - words;
const uint own = min(word * 32u + lane, m - 1u), apart = min(own_word * 32u + lane, width - 1u);
for (uint c = thread; c < D; c += {THREADS}u) {{
  VQ_LOCAL(float, v, {GROUP});
  VQ_UNROLL
  for (uint k = 0u; k < {GROUP}u; ++k) {{
    const float one = float(x[(first + k) * D + c]);
    v[k] = vq_mul(one, one);
  }}
{_fold(GROUP)}
  energy[c] = v[0] == v[0] ? v[0] : INFINITY;
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint c = thread; c < D; c += {THREADS}u) {{
  const float mine = energy[c];
  uint before = 0u;
  for (uint k = 0u; k < D; ++k) {{
    const float other = energy[k];
    before += other > mine || (other == mine && k < c) ? 1u : 0u;
  }}
  chosen[c] = before < O ? 1u : 0u;
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint c = thread; c < D; c += {THREADS}u) {{
  uint place = 0u;
  for (uint k = 0u; k < c; ++k) place += chosen[k];
  if (chosen[c] == 1u) {{
    listed[place] = c;
    if (writes) channels[group * O + place] = uchar(c);
  }}
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint k = member; k < {GROUP}u; k += 4u) {{
  const uint row = first + k;
"""
    + _square("square", "D", CHANNELS, "chosen[i] == 1u ? 0.0f : float(x[row * D + i])")
    + _square("apart_square", "O", CHANNELS, "float(x[row * D + listed[i]])")
    + f"""
  if (lane == 0u) {{
    norms[k] = {_divisor("square")};
    own_norms[k] = {_divisor("apart_square")};
    if (writes) {{
      weight[row] = M({_weight("square", "D")});
      outlier_weight[row] = M({_weight("apart_square", "O")});
    }}
  }}
}}
VQ_LOCAL(float, high, {GROUP});
VQ_LOCAL(float, low, {GROUP});
VQ_UNROLL
for (uint t = 0u; t < {GROUP}u; ++t) {{
  high[t] = 0.0f;
  low[t] = 0.0f;
}}
"""
    + _project(
        GROUP,
        "D",
        "chosen[i] == 1u ? 0.0f : float(x[(first + token) * D + i])",
        "norms",
        "columns",
        "m",
        "word < words",
        "own",
    )
    + _project(
        GROUP,
        "O",
        "float(x[(first + token) * D + listed[i]])",
        "own_norms",
        "own_columns",
        "width",
        "word >= words",
        "apart",
    )
    + _ballots(GROUP)
    + f"""
const uint row = first + lane;
if (word < words) {{
{STORE}
}} else if (own_word < own_words) {{
  outlier_signs[row * own_words + own_word] = kept;
}}
"""
)


def _sum(tokens: int, words: str, read: str, width: str, sketch: str) -> str:
    """Text that adds up the signed rows of the sketch in sum[t], for a lane's channel."""
    return f"""
  VQ_UNROLL
  for (uint t = 0u; t < {tokens}u; ++t) sum[t] = 0.0f;
  for (uint w = 0u; w < {words}; ++w) {{
    VQ_LOCAL(uint, word, {tokens});
    VQ_UNROLL
    for (uint t = 0u; t < {tokens}u; ++t) {{
      const uint row = min(first + t, rows - 1u);
{read}
    }}
    for (uint b = 0u; b < min(32u, {width} - w * 32u); ++b) {{
      const float s = {sketch};
      VQ_UNROLL
      for (uint t = 0u; t < {tokens}u; ++t) sum[t] += (word[t] >> b & 1u) != 0u ? s : -s;
    }}
  }}
"""


READ = """
      if (sizeof(U) == 4) {
        word[t] = uint(signs[row * words + w]);
      } else {
        uint bytes = 0u;
        for (uint k = w * 4u; k < min(w * 4u + 4u, m / 8u); ++k) {
          bytes |= uint(signs[row * (m / 8u) + k]) << (k % 4u * 8u);
        }
        word[t] = bytes;
      }
"""

_DECODE = (
    f"""
// A threadgroup takes {TOKENS} tokens and 128 channels, a lane one of them.
const uint rows = uint(signs_shape[0]) * uint(signs_shape[1]) * uint(signs_shape[2]);
const uint m = sketch_shape[0], D = sketch_shape[1], words = (m + 31u) / 32u;
const uint first = threadgroup_position_in_grid.x * {TOKENS}u;
const uint d = threadgroup_position_in_grid.y * {THREADS}u + thread_index_in_threadgroup, channel = min(d, D - 1u);
VQ_LOCAL(float, sum, {TOKENS});
{{
"""
    + _sum(TOKENS, "words", READ, "m", "sketch[(w * 32u + b) * D + channel]")
    + f"""
  VQ_UNROLL
  for (uint t = 0u; t < {TOKENS}u; ++t) {{
    const float one = float(weight[min(first + t, rows - 1u)]);
    sum[t] = vq_mul(sum[t], vq_mul(one, as_type<float>(unit)));
  }}
}}
"""
)
_WRITE = f"""
VQ_UNROLL
for (uint t = 0u; t < {TOKENS}u; ++t) {{
  if (first + t < rows && d < D) x[(first + t) * D + d] = sum[t];
}}
"""

DECODE = "// signs (N, H, n, m bits), weight (N, H, n, 1), sketch (m, D) -> x (N, H, n, D)." + _DECODE + _WRITE

DECODE_OUTLIERS = (
    "// As without outliers; a lane whose channel is one of the group's takes the outliers' sketch (w, o) instead."
    + _DECODE
    + f"""
const uint O = own_sketch_shape[1], width = own_sketch_shape[0], own_words = width / 32u, group = first / {GROUP}u;
uint place = O;
for (uint k = 0u; k < O; ++k) place = uint(channels[group * O + k]) == channel ? k : place;
if (place < O) {{
"""
    + _sum(
        TOKENS,
        "own_words",
        "      word[t] = outlier_signs[row * own_words + w];",
        "width",
        "own_sketch[(w * 32u + b) * O + place]",
    )
    + f"""
  VQ_UNROLL
  for (uint t = 0u; t < {TOKENS}u; ++t) {{
    const float one = float(outlier_weight[min(first + t, rows - 1u)]);
    sum[t] = vq_mul(sum[t], vq_mul(one, as_type<float>(own_unit)));
  }}
}}
"""
    + _WRITE
)
