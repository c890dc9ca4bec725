"""The portable skeleton's text for keys: a unit's scores, its weights, and the running maximum."""

from __future__ import annotations

import attrs

from vq_core.kernels.skeleton.snippet import SIMD, Snippet

AHEAD = (8, 4, 2, 1)
"""Tiles whose loads are under way together, the best first: on an H200 two take 1.8 times as long as eight."""


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


def scores(
    frame: Frame, width: int, snippet: Snippet, numbers: str, by_channel: str, by_token: str,
    token: str = "k_first + along",
) -> str:  # fmt: skip
    """Scores of the unit's tokens: in the end ``f[i * M + m]`` are those of tokens ``own + i``."""
    T, C = frame.tokens, frame.channels
    step = C * frame.across
    # Several tiles at a time, so that their loads are under way together.
    several = next(n for n in AHEAD if width % (step * n) == 0 or n == 1)
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
    guard = f"if (c < {width}) " if ragged else ""
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


MASK = """
      if (masked != 0u && seen && i < left) {
        const uint row = min(m0 + uint(m), total - 1u), query = head * (heads / H) + row / L;
        const uint mb = uint(mask_shape[0]) == 1u ? 0u : b, mh = uint(mask_shape[1]) == 1u ? 0u : query;
        const uint ml = uint(mask_shape[2]) == 1u ? 0u : row % L;
        const uint line = (mb * uint(mask_shape[1]) + mh) * uint(mask_shape[2]) + ml;
        const float added = mask[line * uint(mask_shape[3]) + uint(place)];
        score += added * 1.4426950408889634f;
        seen = added > lowest;
      }
"""


def softmax(frame: Frame, masks: bool = True) -> str:
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
{MASK if masks else ""}
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
