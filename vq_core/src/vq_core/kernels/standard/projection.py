"""Dense projections in kernels, equal to :mod:`vq_core.codec.projection` bit for bit.

``PROJECT`` is text for the header of a kernel that projects as a part of its work.  All its sums are exact, so they
may be taken in any order, in as many parts as there are lanes, and multiplies and adds may be fused or not.
"""

from __future__ import annotations

from vq_core.codec.projection import HIGH, LOW

PROJECT = f"""
// The first and the second part of a number, see vq_core.codec.projection.
VQ_FN float2 projection_parts(float v) {{
  const float scaled = v * {HIGH}f, first = rint(scaled);
  return vq_float2(first, rint((scaled - first) * {LOW}f));
}}
// What the three exact sums <x1, a1>, <x1, a2> + <x2, a1> make, for a matrix of this scale.
VQ_FN float projected(float high, float first_second, float second_first, float scale) {{
  const float low = first_second + second_first;
  return vq_add(high * (scale * {1 / HIGH**2!r}f), low * (scale * {1 / (HIGH**2 * LOW)!r}f));
}}
"""
