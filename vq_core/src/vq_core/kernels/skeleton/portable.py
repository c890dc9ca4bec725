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

from vq_core.kernels.skeleton.snippet import SIMD, Snippet

GROUPS = 4
"""SIMD groups of a threadgroup."""
EXACT_UNIT = 32
"""Exact tokens that a SIMD group takes at once: few, so that a window of 128 is spread over a threadgroup."""
KEYS_AHEAD, VALUES_AHEAD = (4, 2, 1), (4, 2, 1)
"""Tiles whose loads are under way together."""
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
                page = f"({p}_{a.name}_shape[0] == 1 ? 0u : {p}_page)" if a.sequence else f"{p}_page"
                lines.append(f"const uint {p}_at_{a.name} = ({page} * H + head) * {a.size}u;")
        return "\n".join(lines)

    def call(self, function: str, *rest: str) -> str:
        """A call of one of the functions for the page found."""
        arrays = [
            f"{self.prefix}_{a.name}" + (f" + {self.prefix}_at_{a.name}" if a.size else "") for a in self.pointers
        ]
        return f"{self.prefix}_{function}({', '.join([*arrays, *rest])})"


@attrs.frozen(eq=False)
class Frame:
    """How lanes share a unit's scores: T by C tiles, lanes along tokens and channels."""

    tokens: int
    channels: int
    unit: int

    @property
    def along(self) -> int:
        """Lanes along tokens."""
        return self.unit // self.tokens

    @property
    def across(self) -> int:
        """Lanes along channels."""
        return SIMD // self.along

    @property
    def owned(self) -> int:
        """Tokens that each lane has in the end."""
        return self.unit // SIMD


START = """
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup, thread = thread_index_in_threadgroup;
const uint chunk = threadgroup_position_in_grid.x, split = threadgroup_position_in_grid.y;
const uint B = q_shape[0], heads = q_shape[1], L = q_shape[2], H = exact_k_shape[1], total = heads / H * L;
const uint b = threadgroup_position_in_grid.z / H, head = threadgroup_position_in_grid.z - b * H, m0 = chunk * uint(M);
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
{START}
if (split < exact_splits) {{
{_queries("q", key_dim)}
{_exact(key_dim, value_dim, exact)}
{_finish(value_dim, _exact_channels(value_dim), (), "")}
}} else {{
{_queries("prepared" if keys.snippet.prepare else "q", keys.width)}
{_packed(keys, values, unit)}
{_finish(values.width, values.snippet.channels, values.snippet.units, values.snippet.per)}
}}
{_merge(widest_value, value_dim, values.width)}
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
    score = _scores(
        frame, keys.width, keys.snippet,
        keys.call("numbers", "t", "c", "u"), keys.call("affine", "t", "c + j"), keys.call("affine", "t + i", "c"),
    )  # fmt: skip
    return f"""
{_sums(values.snippet.channels, values.width, unit)}
const uint units = (uint(packed) + {unit - 1}u) / {unit}u, begin = (split - exact_splits) * {GROUPS}u + sg;
for (uint n = begin; n < units; n += (splits - exact_splits) * {GROUPS}u) {{
  const uint at = n * {unit}u, count = min({unit}u, uint(packed) - at);
  const int column = pad - hidden + first + int(at);
  {keys.place(f"at / {keys.page}u")}
  const int k_first = int(at - k_depth * {keys.page}u);
{score}
{_softmax(frame)}
  {values.place(f"at / {values.page}u")}
  const int v_first = int(at - v_depth * {values.page}u);
{
        _values(
            values.snippet,
            values.width,
            values.call("numbers", "v_first + t", "c", "u"),
            values.call("affine", "v_first + t + i", "c"),
            values.call("affine", "v_first + t", "c + j"),
        )
    }
}}
"""


def _exact_channels(width: int) -> int:
    """Channels of a lane's run: all lanes have work where the head is that wide."""
    return next(c for c in (8, 4, 2, 1) if width % c == 0)


def _exact(key_dim: int, value_dim: int, dtype: str) -> str:
    channels, run = next(c for c in (8, 4, 2, 1) if key_dim % c == 0), _exact_channels(value_dim)
    kind = TYPES[dtype]
    load = "VQ_UNROLL\nfor (int j = 0; j < {n}; ++j) u[j] = float({at} + j]);"
    keys = Snippet("exact", 1, channels, ".")
    values = Snippet("exact", 1, run, ".")
    frame = Frame(1, channels, EXACT_UNIT)
    return f"""
{_sums(run, value_dim, EXACT_UNIT)}
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
{_scores(frame, key_dim, keys, load.format(n=channels, at=f"from_k[min(t, int(count) - 1) * {key_dim} + c"), "", "")}
{_softmax(frame)}
{_values(values, value_dim, load.format(n=run, at=f"from_v[t * {value_dim} + c"), "", "")}
}}
"""


def _scores(frame: Frame, width: int, snippet: Snippet, numbers: str, by_channel: str, by_token: str) -> str:
    """Scores of the unit's tokens: in the end ``f[i * M + m]`` are those of tokens ``own + i``."""
    T, C = frame.tokens, frame.channels
    step = C * frame.across
    # Several tiles at a time, so that their loads are under way together.
    several = next(n for n in KEYS_AHEAD if width % (step * n) == 0 or n == 1)
    ragged = width % step != 0
    dots = f"""
      VQ_UNROLL
      for (int j = 0; j < {C}; ++j) {{
        VQ_UNROLL
        for (int m = 0; m < M; ++m) {{
          const float one = queries[(c + j) * M + m];
          VQ_UNROLL
          for (int i = 0; i < {T}; ++i) f[i * M + m] += u[i * {C} + j] * one;
        }}
      }}
"""
    if snippet.per == "channel":
        dots = f"""
      VQ_UNROLL
      for (int j = 0; j < {C}; ++j) {{
        const float2 map = {by_channel};
        VQ_UNROLL
        for (int m = 0; m < M; ++m) {{
          const float one = queries[(c + j) * M + m], times = one * map.x;
          base[m] += one * map.y;
          VQ_UNROLL
          for (int i = 0; i < {T}; ++i) f[i * M + m] += u[i * {C} + j] * times;
        }}
      }}
"""
    elif snippet.per == "token":
        dots = f"""
      VQ_LOCAL(float, dot, {T} * M);
      VQ_LOCAL(float, flat, M);
      VQ_UNROLL
      for (int m = 0; m < M; ++m) {{
        flat[m] = 0.0f;
        VQ_UNROLL
        for (int i = 0; i < {T}; ++i) dot[i * M + m] = 0.0f;
        VQ_UNROLL
        for (int j = 0; j < {C}; ++j) {{
          const float one = queries[(c + j) * M + m];
          flat[m] += one;
          VQ_UNROLL
          for (int i = 0; i < {T}; ++i) dot[i * M + m] += u[i * {C} + j] * one;
        }}
      }}
      VQ_UNROLL
      for (int i = 0; i < {T}; ++i) {{
        const float2 map = {by_token};
        VQ_UNROLL
        for (int m = 0; m < M; ++m) f[i * M + m] += dot[i * M + m] * map.x + flat[m] * map.y;
      }}
"""
    exact = numbers.startswith("VQ_UNROLL")
    guard = f"if (c < {width}) " if ragged else ""
    token = "along" if exact else "k_first + along"
    units = _scaled(snippet.units, T)
    base = snippet.per == "channel"
    return f"""
  VQ_LOCAL(float, f, {T} * M);
  {"VQ_LOCAL(float, base, M);" if base else ""}
  VQ_UNROLL
  for (int i = 0; i < {T} * M; ++i) f[i] = 0.0f;
  {"VQ_UNROLL" if base else ""}
  {"for (int m = 0; m < M; ++m) base[m] = 0.0f;" if base else ""}
  const int along = int(lane & {frame.along - 1}u) * {T}, across = int(lane / {frame.along}u);
  for (int c0 = across * {C}; c0 < {width}; c0 += {step * several}) {{
    VQ_UNROLL
    for (int more = 0; more < {several}; ++more) {{
      const int c = c0 + more * {step}, t = {token};
      {guard}{{
      VQ_LOCAL(float, u, {T * C});
      {numbers};
{dots}
      }}
    }}
  }}
{units}
{_exchange(frame, base)}
"""


def _scaled(units: tuple[float, ...], count: int) -> str:
    """Each of the tile's tokens times its unit."""
    lines = [
        f"  VQ_UNROLL\n  for (int m = 0; m < M; ++m) f[{i} * M + m] *= {unit!r}f;"
        for i, unit in enumerate(units[:count])
        if unit != 1
    ]
    return "\n".join(lines)


def _exchange(frame: Frame, base: bool) -> str:
    """Add up over the lanes along channels; each ends with a part of the tokens, the first numbers of ``f``."""
    lines = []
    if base:
        steps = "".join(
            f" base[m] += simd_shuffle_xor(base[m], {frame.along << i});" for i in range(frame.across.bit_length() - 1)
        )
        lines.append(f"  VQ_UNROLL\n  for (int m = 0; m < M; ++m) {{{steps} }}")
    lines.append("  int own = along;")
    kept, offset = frame.tokens, frame.along
    while offset < SIMD:
        kept //= 2
        lines.append(f"""
  {{
    const bool upper = (lane & {offset}u) != 0u;
    VQ_UNROLL
    for (int i = 0; i < {kept} * M; ++i) {{
      const float low = f[i], high = f[i + {kept} * M], sent = upper ? low : high;
      const float got = simd_shuffle_xor(sent, {offset});
      f[i] = (upper ? high : low) + got;
    }}
    own += upper ? {kept} : 0;
  }}""")
        offset *= 2
    if base:
        lines.append(f"""
  VQ_UNROLL
  for (int i = 0; i < {kept}; ++i) {{
    VQ_UNROLL
    for (int m = 0; m < M; ++m) f[i * M + m] += base[m];
  }}""")
    return "\n".join(lines)


def _softmax(frame: Frame) -> str:
    """Masks, the running maximum, the weights; sums so far shrink where the maximum rises."""
    K = frame.owned
    return f"""
  const int left = int(count) - own;
  VQ_UNROLL
  for (int m = 0; m < M; ++m) {{
    float best = lowest;
    VQ_UNROLL
    for (int i = 0; i < {K}; ++i) {{
      const int place = column + own + i;
      bool seen = place >= pad && place <= last[m];
      float score = f[i * M + m];
      if (masked != 0u && seen && i < left) {{
        const uint row = min(m0 + uint(m), total - 1u), query = head * (heads / H) + row / L;
        const uint mb = uint(mask_shape[0]) == 1u ? 0u : b, mh = uint(mask_shape[1]) == 1u ? 0u : query;
        const uint ml = uint(mask_shape[2]) == 1u ? 0u : row % L;
        const uint columns = mask_shape[3];
        const float added = mask[((mb * uint(mask_shape[1]) + mh) * uint(mask_shape[2]) + ml) * uint(mask_shape[3]) + uint(place)];
        score += added * 1.4426950408889634f;
        seen = added > lowest;
      }}
      score = seen ? score : lowest;
      f[i * M + m] = score;
      best = i < left ? max(best, score) : best;
    }}
    const float next = max(top[m], simd_max(best)), shrink = exp2(top[m] - next);
    top[m] = next;
    float added = 0.0f;
    VQ_UNROLL
    for (int i = 0; i < {K}; ++i) {{
      const float weight = i < left ? exp2(f[i * M + m] - next) : 0.0f;
      added += weight;
      weights[weighing + (own + i) * M + m] = weight;
    }}
    sum[m] = sum[m] * shrink + added;
    flats[m] *= shrink;
    VQ_UNROLL
    for (int i = 0; i < RUN; ++i) sums_of[m * RUN + i] *= shrink;
  }}
  simdgroup_barrier(mem_flags::mem_threadgroup);
"""


def _sums(channels: int, width: int, unit: int) -> str:
    """Where a lane adds up values: its run of channels."""
    runs = -(-width // channels)
    lanes = 1 << (runs - 1).bit_length()
    return f"""
const int RUN = {channels};
VQ_LOCAL(float, sums_of, {channels} * M);
VQ_LOCAL(float, flats, M);
VQ_UNROLL
for (int i = 0; i < {channels} * M; ++i) sums_of[i] = 0.0f;
VQ_UNROLL
for (int m = 0; m < M; ++m) flats[m] = 0.0f;
const uint run_lane = lane & {lanes - 1}u, run_token = lane / {lanes}u, run_lanes = {lanes}u;
const int weighing = int(sg) * {unit} * M;
const bool has_run = run_lane < {runs}u;
const int run_channel = has_run ? int(run_lane) * {channels} : 0;
"""


def _values(snippet: Snippet, width: int, numbers: str, by_token: str, by_channel: str) -> str:
    """Add the unit's values, weighted."""
    T, C = snippet.tokens, snippet.channels
    lanes = 1 << (-(-width // C) - 1).bit_length()
    step = SIMD // lanes * T
    several = next(n for n in VALUES_AHEAD if step * n <= 32 or n == 1)
    weight = "weights[weighing + (t + i) * M + m]"
    add = f"""
      VQ_UNROLL
      for (int i = 0; i < {T}; ++i) {{
        VQ_UNROLL
        for (int m = 0; m < M; ++m) {{
          const float weight = {weight};
          VQ_UNROLL
          for (int j = 0; j < {C}; ++j) sums_of[m * RUN + j] += weight * u[i * {C} + j];
        }}
      }}
"""
    if snippet.per == "token":
        add = f"""
      VQ_UNROLL
      for (int i = 0; i < {T}; ++i) {{
        const float2 map = {by_token};
        VQ_UNROLL
        for (int m = 0; m < M; ++m) {{
          const float weight = {weight}, times = weight * map.x;
          flats[m] += weight * map.y;
          VQ_UNROLL
          for (int j = 0; j < {C}; ++j) sums_of[m * RUN + j] += times * u[i * {C} + j];
        }}
      }}
"""
    elif snippet.per == "channel":
        add = f"""
      VQ_UNROLL
      for (int j = 0; j < {C}; ++j) {{
        const float2 map = {by_channel};
        VQ_UNROLL
        for (int m = 0; m < M; ++m) {{
          float dot = 0.0f, flat = 0.0f;
          VQ_UNROLL
          for (int i = 0; i < {T}; ++i) {{
            const float weight = {weight};
            flat += weight;
            dot += weight * u[i * {C} + j];
          }}
          sums_of[m * RUN + j] += dot * map.x + flat * map.y;
        }}
      }}
"""
    return f"""
  for (int t0 = int(run_token) * {T}; t0 < int(count); t0 += {step * several}) {{
    VQ_UNROLL
    for (int more = 0; more < {several}; ++more) {{
      const int t = t0 + more * {step}, c = run_channel;
      {"if (t < int(count)) " if several > 1 else ""}{{
      VQ_LOCAL(float, u, {T * C});
      {numbers};
{add}
      }}
    }}
  }}
  simdgroup_barrier(mem_flags::mem_threadgroup);
"""


def _finish(width: int, channels: int, units: tuple[float, ...], per: str) -> str:
    """A SIMD group's sums, over the lanes that took other tokens, into threadgroup memory."""
    scale = "".join(f"  sums_of[m * RUN + {j}] *= {unit!r}f;\n" for j, unit in enumerate(units) if unit != 1)
    return f"""
VQ_UNROLL
for (int m = 0; m < M; ++m) {{
  for (uint o = run_lanes; o < {SIMD}u; o <<= 1) {{
    flats[m] += simd_shuffle_xor(flats[m], ushort(o));
    VQ_UNROLL
    for (int j = 0; j < RUN; ++j) sums_of[m * RUN + j] += simd_shuffle_xor(sums_of[m * RUN + j], ushort(o));
  }}
{scale}
  float all = sum[m];
  VQ_UNROLL
  for (uint o = 1u; o < {SIMD}u; o <<= 1) all += simd_shuffle_xor(all, ushort(o));
  if (lane == 0u) {{
    const float highest = top[m];
    marks[(sg * uint(M) + uint(m)) * 2u] = highest;
    marks[(sg * uint(M) + uint(m)) * 2u + 1u] = all;
  }}
  if (run_token == 0u && has_run) {{
    VQ_UNROLL
    for (int j = 0; j < RUN; ++j) {{
      const float one = sums_of[m * RUN + j] + flats[m];
      if (run_channel + j < {width}) partial[(int(sg) * M + m) * {width} + run_channel + j] = one;
    }}
  }}
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
"""


def _merge(width: int, exact: int, packed: int) -> str:
    """The SIMD groups' sums into one, and out."""
    return f"""
const uint mine = split < exact_splits ? {exact}u : {packed}u;
for (uint i = thread; i < {width}u * uint(M); i += {GROUPS * SIMD}u) {{
  const uint m = i / {width}u, c = i - m * {width}u;
  float highest = lowest, found = 0.0f, all = 0.0f;
  VQ_UNROLL
  for (uint g = 0u; g < {GROUPS}u; ++g) highest = max(highest, float(marks[(g * uint(M) + m) * 2u]));
  VQ_UNROLL
  for (uint g = 0u; g < {GROUPS}u; ++g) {{
    const float shrink = exp2(marks[(g * uint(M) + m) * 2u] - highest);
    all += shrink * marks[(g * uint(M) + m) * 2u + 1u];
    if (c < mine) found += shrink * partial[(g * uint(M) + m) * mine + c];
  }}
  if (m0 + m < total) {{
    const uint out = ((b * H + head) * splits + split) * total + m0 + m;
    sums[out * {width}u + c] = found;
    if (c < 2u) tops[out * 2u + c] = c == 0u ? (all == 0.0f ? 0.0f : highest) : all;
  }}
}}
"""
