"""The portable skeleton's text for values: weighted sums of a unit, of a SIMD group, of a threadgroup."""

from __future__ import annotations

from vq_core.kernels.skeleton.snippet import SIMD, Snippet

GROUPS = 4
"""SIMD groups of a threadgroup."""
AHEAD = (8, 4, 2, 1)
"""Tiles whose loads are under way together, the best first."""


def sums(channels: int, width: int, unit: int) -> str:
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


def weighted(snippet: Snippet, width: int, unit: int, numbers: str, by_token: str, by_channel: str) -> str:
    """Add the unit's values, weighted."""
    T, C = snippet.tokens, snippet.channels
    lanes = 1 << (-(-width // C) - 1).bit_length()
    step = SIMD // lanes * T
    several = next(n for n in AHEAD if unit % (step * n) == 0 or n == 1)
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
    # A whole unit is read without a guard, so that its loads are batched; of the last one only what holds tokens: zero
    # times what lies past them is not zero where that is NaN.
    return f"""
  if (count == {unit}u) {{
    for (int t0 = int(run_token) * {T}; t0 < {unit}; t0 += {step * several}) {{
      VQ_UNROLL
      for (int more = 0; more < {several}; ++more) {{
        const int t = t0 + more * {step}, c = run_channel;
        VQ_LOCAL(float, u, {T * C});
        {numbers};
{add}
      }}
    }}
  }} else {{
    for (int t = int(run_token) * {T}; t < int(count); t += {step}) {{
      const int c = run_channel;
      VQ_LOCAL(float, u, {T * C});
      {numbers};
{add}
    }}
  }}
  simdgroup_barrier(mem_flags::mem_threadgroup);
"""


def finish(width: int, channels: int, units: tuple[float, ...], per: str) -> str:
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


def merge(width: int, exact: int, packed: int) -> str:
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
