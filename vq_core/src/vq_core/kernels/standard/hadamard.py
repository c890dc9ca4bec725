"""Sign-Hadamard rotations in kernels, equal to :mod:`vq_core.codec.hadamard` bit for bit.

``ROTATE`` is text for the header of a kernel that rotates as a part of its work: a SIMD group turns one vector that
lies in threadgroup memory, by :data:`MOST` numbers at most.  The head size is a run-time number.  :func:`held` and
:func:`turn` are the same for a vector that lies in registers, where powers of two stay: shuffles in the place of a
barrier for each stride, which is what counts where there are few vectors.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from vq_core.codec.hadamard import SignHadamard, hadamard_sizes, small_hadamard
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.kernel import Call, Case, Kernel, Output

MOST = 512
"""Largest size: 16 numbers a lane."""
THREADS = 128


def _minus(transposed: bool) -> list[int]:
    """Of each row of the matrices of 12, 20 and 28: a bit for each -1."""
    found = []
    for m in (12, 20, 28):
        rows = small_hadamard(m)
        for row in zip(*rows, strict=True) if transposed else rows:
            found.append(sum(1 << j for j, sign in enumerate(row) if sign < 0))
    return found


_TABLE = ", ".join(f"{row}u" for row in _minus(False) + _minus(True))

MINUS = f"""
// Rows of the Hadamard matrices of 12, 20 and 28, then of their transposes: a bit for each -1.
VQ_CONSTANT(uint, HADAMARD_MINUS, 120) = {{{_TABLE}}};
"""
ROTATE = f"""{MINUS.rstrip()}
// v (D) = H v, or H^T v, by one SIMD group. Before, each lane has written the numbers lane, lane + 32, ...; after, all
// lanes may read all of them.
VQ_FN void hadamard(VQ_SHARED_PTR(float) v, uint D, uint lane, bool transposed) {{
  const float norm = vq_div(1.0f, sqrt(float(D)));
  const uint odd = D >> ctz(D), m = odd == 1u ? 1u : 4u * odd, run = D / m;
  for (uint i = lane; i < D; i += 32u) v[i] = vq_mul(v[i], norm);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint stride = 1u; stride < run; stride <<= 1) {{
    for (uint p = lane; p < D / 2u; p += 32u) {{
      const uint at = 2u * p - (p & (stride - 1u));
      const float a = v[at], b = v[at + stride];
      v[at] = a + b;
      v[at + stride] = a - b;
    }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }}
  if (m > 1u) {{
    const uint table = (odd == 3u ? 0u : odd == 5u ? 12u : 32u) + (transposed ? 60u : 0u);
    VQ_LOCAL(float, mixed, {MOST // 32});
    VQ_UNROLL
    for (uint r = 0u; r < {MOST // 32}u; ++r) {{
      const uint i = r * 32u + lane;
      if (i < D) {{
        const uint minus = HADAMARD_MINUS[table + i / run], place = i % run;
        const float first = v[place];
        float sum = minus & 1u ? -first : first;
        for (uint j = 1u; j < m; ++j) {{
          const float w = v[j * run + place];
          sum += minus >> j & 1u ? -w : w;
        }}
        mixed[r] = sum;
      }}
    }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
    VQ_UNROLL
    for (uint r = 0u; r < {MOST // 32}u; ++r) {{
      if (r * 32u + lane < D) {{
        const float w = mixed[r];
        v[r * 32u + lane] = w;
      }}
    }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }}
}}
"""


def held(most: int) -> str:
    """Header text for :func:`turn`, of vectors of so many numbers at most."""
    return f"""{MINUS}
// The same of a vector in registers: v[r] is number 32 r + lane; by one SIMD group, whose `room` has {2 * most} places.
VQ_FN void hadamard_held(VQ_LOCAL_PTR(float) v, VQ_SHARED_PTR(float) room, uint D, uint lane, bool transposed) {{
  const float norm = vq_div(1.0f, sqrt(float(D)));
  VQ_UNROLL
  for (uint r = 0u; r < {most // 32}u; ++r) v[r] = vq_mul(v[r], norm);
  if (D >= 32u && (D & (D - 1u)) == 0u) {{
    VQ_UNROLL
    for (uint r = 0u; r < {most // 32}u; ++r) {{
      if (r * 32u < D) {{
        VQ_UNROLL
        for (uint o = 1u; o < 32u; o <<= 1) {{
          const float mine = v[r], other = simd_shuffle_xor(mine, ushort(o));
          v[r] = (lane & o) != 0u ? other - mine : mine + other;
        }}
      }}
    }}
    VQ_UNROLL
    for (uint o = 1u; o < {most // 32}u; o <<= 1) {{
      if (o * 32u < D) {{
        VQ_UNROLL
        for (uint r = 0u; r < {most // 32}u; ++r) {{
          if ((r & o) == 0u && r * 32u < D) {{
            const float a = v[r], b = v[r + o];
            v[r] = a + b;
            v[r + o] = a - b;
          }}
        }}
      }}
    }}
    return;
  }}
  const uint odd = D >> ctz(D), m = odd == 1u ? 1u : 4u * odd, run = D / m;
  VQ_UNROLL
  for (uint r = 0u; r < {most // 32}u; ++r)
    if (r * 32u + lane < D) room[r * 32u + lane] = v[r];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint stride = 1u; stride < run; stride <<= 1) {{
    for (uint p = lane; p < D / 2u; p += 32u) {{
      const uint at = 2u * p - (p & (stride - 1u));
      const float a = room[at], b = room[at + stride];
      room[at] = a + b;
      room[at + stride] = a - b;
    }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }}
  const uint table = (odd == 3u ? 0u : odd == 5u ? 12u : 32u) + (transposed ? 60u : 0u);
  for (uint i = lane; i < D; i += 32u) {{
    const uint minus = m > 1u ? uint(HADAMARD_MINUS[table + i / run]) : 0u, place = i % run;
    const float first = room[place];
    float sum = minus & 1u ? -first : first;
    for (uint j = 1u; j < m; ++j) {{
      const float w = room[j * run + place];
      sum += minus >> j & 1u ? -w : w;
    }}
    room[{most}u + i] = sum;
  }}
  VQ_UNROLL
  for (uint r = 0u; r < {most // 32}u; ++r)
    if (r * 32u + lane < D) v[r] = room[{most}u + r * 32u + lane];
  simdgroup_barrier(mem_flags::mem_threadgroup);
}}
"""


def _load(round_: str, most: int) -> str:
    return f"""
VQ_UNROLL
for (uint r = 0u; r < {most // 32}u; ++r)
  if (r * 32u < D) ahead[r] = signs[({round_}) * D + min(r * 32u + lane, D - 1u)];
"""


def first_signs(undo: str, most: int) -> str:
    """Text that starts to read a round's signs, for :func:`turn`, before the vector is there."""
    return f"VQ_LOCAL(float, ahead, {most // 32});\n" + _load(f"{undo} ? rounds - 1u : 0u", most)


def turn(undo: str, room: str, most: int) -> str:
    """Text that rotates ``v`` in registers (see :func:`held`) by ``rounds`` of ``signs``; undone, from the last.

    Args:
        undo: Text of a bool.
        room: Threadgroup memory of the SIMD group, 2 * most numbers.
        most: As of :func:`held`.
    """
    times = f"VQ_UNROLL\n  for (uint r = 0u; r < {most // 32}u; ++r) v[r] *= by[r];"
    return f"""
for (uint k = 0u; k < rounds; ++k) {{
  VQ_LOCAL(float, by, {most // 32});
  VQ_UNROLL
  for (uint r = 0u; r < {most // 32}u; ++r) by[r] = r * 32u < D ? float(ahead[r]) : 0.0f;
  // The next round's signs are on their way while this one is done.
  if (k + 1u < rounds) {{ {_load(f"{undo} ? rounds - 2u - k : k + 1u", most)} }}
  if (!({undo})) {{ {times} }}
  hadamard_held(v, {room}, D, lane, {undo});
  if ({undo}) {{ {times} }}
}}
"""


BODY = f"""
// x (..., D), signs (rounds, D) -> y (..., D) float32: rounds of signs, then H; undone, of H^T, then signs, from the
// last. One SIMD group a vector.
VQ_SHARED(float, room, {THREADS // 16 * MOST});
const uint D = signs_shape[1], rounds = signs_shape[0], lane = thread_index_in_simdgroup;
const uint n = threadgroup_position_in_grid.x * {THREADS // 32}u + simdgroup_index_in_threadgroup;
const uint row = min(n, rows - 1u), own = simdgroup_index_in_threadgroup * {MOST}u;
{first_signs("undo", MOST)}
VQ_LOCAL(float, v, {MOST // 32});
VQ_UNROLL
for (uint r = 0u; r < {MOST // 32}u; ++r) v[r] = r * 32u + lane < D ? float(x[row * D + r * 32u + lane]) : 0.0f;
{turn("undo", "room + 2u * own", MOST)}
VQ_UNROLL
for (uint r = 0u; r < {MOST // 32}u; ++r) {{
  const uint i = r * 32u + lane;
  if (n < rows && i < D) y[row * D + i] = v[r];
}}
"""


def rotated(x: mx.array, signs: mx.array, *, undo: bool, **rest: object) -> tuple[mx.array]:
    """The reference."""
    rotation = SignHadamard(signs, signs)
    return (rotation.undo(x.astype(mx.float32)) if undo else rotation.rotate(x),)


def _check(call: Call) -> str:
    x, signs = call.shapes["x"], call.shapes["signs"]
    if len(signs) != 2 or signs[1] != x[-1] or signs[1] > MOST or not signs[0]:
        return f"x {x} and signs {signs}: accepted are (..., D) and (rounds, D), rounds at least 1, D at most {MOST}"
    try:
        hadamard_sizes(signs[1])
    except UnsupportedShapeError as wrong:
        return str(wrong)
    rows = call.numbers["rows"]
    size = 1
    for length in x[:-1]:
        size *= length
    return "" if size == rows and size * x[-1] < 2**31 else f"x {x} holds {size} vectors, rows is {rows}"


def _cases() -> Iterator[Case]:
    rng = np.random.default_rng(11)
    dims = (64, 80, 96, 112, 128, 192, 256, 160, 224, 320, 512, 20, 8)
    for i in range(78):
        D, dtype = dims[i % 13], ("float32", "float16", "bfloat16")[i // 13 % 3]
        rows, rounds = (1, 5, 3)[i % 3], 1 + i % 2
        x = rng.standard_normal((rows, D))
        x[0, :: 1 + i % 5] *= 40
        if i % 7 == 3:
            x = np.where(rng.random(x.shape) < 0.9, rng.choice([0.0, -0.0], x.shape), x)
        if i % 11 == 5:
            x[0, i % D] = (np.nan, np.inf, -np.inf)[i % 3]
        signs = rng.choice([-1.0, 1.0], (rounds, D)).astype(np.float32)
        given = {"rows": rows, "undo": bool(i >= 39)}
        made = mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
        yield Case((made, mx.array(signs)), given, f"{rows} of {D}, {rounds} rounds, {dtype}, undo {i >= 39}")


SIGN_HADAMARD = Kernel(
    name="sign_hadamard",
    stands_for="rotate",
    body=BODY,
    header=held(MOST),
    inputs={"x": "T", "signs": "float32"},
    outputs={"y": Output("float32", lambda call: call.shapes["x"])},
    parameters={"T": ("float32", "float16", "bfloat16"), "undo": (False, True)},
    numbers=("rows",),
    threads=lambda call: (THREADS, 1, 1),
    threadgroups=lambda call: (-(-call.numbers["rows"] // (THREADS // 32)), 1, 1),
    equals=rotated,
    cases=_cases,
    check=_check,
)
KERNELS = (SIGN_HADAMARD,)
