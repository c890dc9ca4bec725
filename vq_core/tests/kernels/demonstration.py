"""Three kernels that use most of the dialect, their numpy references, and data that is hard for them.

``kivi_key``: one thread owns a group of 32 tokens of one channel.  ``kivi_value``: one SIMD group owns a group of 32
channels of one token.  ``hadamard``: one threadgroup owns a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from vq_core.kernels.simulator import Program, run

Array = np.ndarray[Any, Any]
F = np.float32

MULTIPLY_ADD = "#define MULADD(a, b, c) vq_add(vq_mul(a, b), c)"
RAW_MULTIPLY_ADD = "#define MULADD(a, b, c) ((a) * (b) + (c))"

# x [H, S, D] -> words [H, NG, 2, D], scale, zero and err [H, NG, D]; 2 bits, groups of 32 tokens.
KEY = """\
const uint S = x_shape[1], D = x_shape[2], NG = (S + 31u) / 32u, total = uint(x_shape[0]) * NG * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint c = i % D, g = i / D % NG, h = i / D / NG;
  float lo = float(x[(h * S + g * 32u) * D + c]), hi = lo;
  for (uint t = 1; t < 32u; ++t) {
    const float v = float(x[(h * S + min(g * 32u + t, S - 1u)) * D + c]);
    lo = min(lo, v);
    hi = max(hi, v);
  }
  lo = lo == 0.0f ? 0.0f : lo;  // one sign of zero: min does not promise which
  const float s = vq_sub(hi, lo) / 3.0f;
  float worst = 0.0f;
  for (uint w = 0; w < 2u; ++w) {
    uint word = 0;
    for (uint k = 0; k < 16u; ++k) {
      const float v = float(x[(h * S + min(g * 32u + w * 16u + k, S - 1u)) * D + c]);
      const float q = s > 0.0f ? clamp(rint(vq_sub(v, lo) / s), 0.0f, 3.0f) : 0.0f;
      word |= uint(q) << (2u * k);
      worst = max(worst, fabs(vq_sub(v, MULADD(q, s, lo))));
    }
    words[((h * NG + g) * 2u + w) * D + c] = word;
  }
  scale[i] = s;
  zero[i] = lo;
  err[i] = worst;
}
"""

# x [H, S, D] -> words [H, S, NG, 2], scale and zero [H, S, NG]; 2 bits, groups of 32 channels.
VALUE = """\
const uint S = x_shape[1], D = x_shape[2], NG = (D + 31u) / 32u, total = uint(x_shape[0]) * S * NG;
const uint lane = thread_index_in_simdgroup;
const uint n = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
const uint u = min(n, total - 1u);  // spare SIMD groups repeat the last unit and write nothing
const uint c = min(u % NG * 32u + lane, D - 1u);
const float v = float(x[u / NG * D + c]);
float lo = v, hi = v;
for (uint o = 16; o; o >>= 1) {
  lo = min(lo, simd_shuffle_xor(lo, o));
  hi = max(hi, simd_shuffle_xor(hi, o));
}
lo = lo == 0.0f ? 0.0f : lo;
const float s = vq_sub(hi, lo) / 3.0f;
const float q = s > 0.0f ? clamp(rint(vq_sub(v, lo) / s), 0.0f, 3.0f) : 0.0f;
uint word = uint(q) << (2u * (lane & 15u));
for (uint o = 8; o; o >>= 1) word |= simd_shuffle_xor(word, o);
if (n < total) {
  if ((lane & 15u) == 0u) words[u * 2u + lane / 16u] = word;
  if (lane == 0u) {
    scale[u] = s;
    zero[u] = lo;
  }
}
"""

# x [R, N] -> y [R, N], the normalised Walsh-Hadamard transform of each row; N / 2 threads a row.
HADAMARD = """\
VQ_SHARED(float, buf, N);
const uint t = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x;
buf[t] = float(x[row * N + t]);
buf[t + N / 2] = float(x[row * N + t + N / 2]);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint h = 1; h < N; h *= 2) {
  const uint i = t / h * 2u * h + t % h;
  const float a = buf[i], b = buf[i + h];
  buf[i] = a + b;
  buf[i + h] = a - b;
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
const float norm = 1.0f / sqrt(float(N));
y[row * N + t] = T(vq_mul(buf[t], norm));
y[row * N + t + N / 2] = T(vq_mul(buf[t + N / 2], norm));
"""


def key_program(body: str = KEY, header: str = MULTIPLY_ADD) -> Program:
    outputs = {"words": "uint32", "scale": "float32", "zero": "float32", "err": "float32"}
    return Program("kivi_key", body, {"x": "T"}, outputs, {"T": "dtype"}, header)


def value_program(body: str = VALUE) -> Program:
    outputs = {"words": "uint32", "scale": "float32", "zero": "float32"}
    return Program("kivi_value", body, {"x": "T"}, outputs, {"T": "dtype"})


def hadamard_program(body: str = HADAMARD) -> Program:
    return Program("hadamard", body, {"x": "T"}, {"y": "T"}, {"T": "dtype", "N": "int"})


def to_bfloat(x: Array) -> Array:
    """float32 -> bit patterns, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, F).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def carried(x: Array, dtype: str) -> Array:
    """``x`` in the array type that carries ``dtype``."""
    if dtype == "bfloat16":
        return to_bfloat(np.asarray(x, F))
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype)


def widened(x: Array) -> Array:
    """The float32 values of a carried array; uint16 is bfloat16."""
    return (x.astype(np.uint32) << 16).view(F) if x.dtype == np.uint16 else x.astype(F)


def _quantized(g: Array) -> tuple[Array, Array, Array]:
    """Codes, scale and zero of [..., 32, n], statistics over the axis of 32."""
    lo, hi = g.min(-2), g.max(-2)
    lo = np.where(lo == 0, F(0), lo)
    s = (hi - lo) / F(3)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.clip(np.rint((g - lo[..., None, :]) / s[..., None, :]), 0, 3)
    return np.where(s[..., None, :] > 0, q, F(0)).astype(F), s, lo


def _words(q: Array) -> Array:
    """[..., 32] codes of 2 bits -> [..., 2] words."""
    shifted = q.astype(np.uint32).reshape(*q.shape[:-1], 2, 16) << (2 * np.arange(16, dtype=np.uint32))
    return np.asarray(np.bitwise_or.reduce(shifted, axis=-1))


def key_reference(x: Array) -> dict[str, Array]:
    h, s_, d = x.shape
    groups = -(-s_ // 32)
    g = widened(x)[:, np.minimum(np.arange(groups * 32), s_ - 1)].reshape(h, groups, 32, d)
    q, s, lo = _quantized(g)
    err = np.abs(g - (q * s[:, :, None] + lo[:, :, None])).max(2)
    return {"words": np.moveaxis(_words(np.moveaxis(q, 2, 3)), 3, 2), "scale": s, "zero": lo, "err": err}


def value_reference(x: Array) -> dict[str, Array]:
    h, s_, d = x.shape
    groups = -(-d // 32)
    g = widened(x)[..., np.minimum(np.arange(groups * 32), d - 1)].reshape(h, s_, groups, 32, 1)
    q, s, lo = _quantized(g)
    return {"words": _words(q[..., 0]), "scale": s[..., 0], "zero": lo[..., 0]}


def hadamard_reference(x: Array) -> dict[str, Array]:
    n = x.shape[1]
    v, h = widened(x), 1
    while h < n:
        v = v.reshape(-1, n // (2 * h), 2, h)
        v = np.stack([v[:, :, 0] + v[:, :, 1], v[:, :, 0] - v[:, :, 1]], 2)
        h *= 2
    y = v.reshape(-1, n) * (F(1) / np.sqrt(F(n)))
    return {"y": to_bfloat(y) if x.dtype == np.uint16 else y.astype(x.dtype)}


REFERENCES: dict[str, Callable[[Array], dict[str, Array]]] = {
    "kivi_key": key_reference,
    "kivi_value": value_reference,
    "hadamard": hadamard_reference,
}


def data(seed: int, shape: tuple[int, ...], dtype: str, family: str) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if family == "ties":  # exact halves of a code, both zeros, constant groups
        x = np.where(rng.random(shape) < 0.2, -0.0, rng.integers(-3, 4, shape))
        x[..., : max(1, shape[-1] // 8)] = 1.5
    elif family == "outliers":
        x = x * np.exp(np.minimum(rng.standard_normal(shape[-1:]) * 3, 6))
    elif family == "extreme":  # close to fp16's largest and to its smallest subnormal
        x = np.where(rng.random(shape) < 0.5, x * 2.0**-24, np.clip(x * 2.0**14, -65504 / 2, 65504 / 2))
    return carried(x, dtype)


@attrs.frozen
class Launch:
    """How a program is launched on ``x``, and what comes out."""

    arguments: dict[str, object]
    outputs: dict[str, tuple[tuple[int, ...], str]]
    threadgroups: tuple[int, int, int]
    threads: tuple[int, int, int]


def launch(program: Program, x: Array, dtype: str) -> Launch:
    if program.name == "hadamard":
        rows, n = x.shape
        return Launch({"T": dtype, "N": n}, {"y": (x.shape, dtype)}, (rows, 1, 1), (n // 2, 1, 1))
    h, s, d = x.shape
    if program.name == "kivi_key":
        groups = -(-s // 32)
        statistic = ((h, groups, d), "float32")
        outputs = {"words": ((h, groups, 2, d), "uint32"), "scale": statistic, "zero": statistic, "err": statistic}
        return Launch({"T": dtype}, outputs, (-(-h * groups * d // 64), 1, 1), (64, 1, 1))
    groups = -(-d // 32)
    statistic = ((h, s, groups), "float32")
    outputs = {"words": ((h, s, groups, 2), "uint32"), "scale": statistic, "zero": statistic}
    return Launch({"T": dtype}, outputs, (-(-h * s * groups // 4), 1, 1), (128, 1, 1))


def outputs_of(program: Program, x: Array, dtype: str, **options: Any) -> dict[str, Array]:
    how = launch(program, x, dtype)
    grid = {"threadgroups": how.threadgroups, "threads": how.threads}
    return run(program, how.arguments, {"x": x}, how.outputs, **{**grid, **options})


def differences(program: Program, x: Array, dtype: str, **options: Any) -> str:
    """Empty if all outputs equal the reference bit for bit; else a line for each output that differs."""
    got, want = outputs_of(program, x, dtype, **options), REFERENCES[program.name](x)
    lines = []
    for name, expected in want.items():
        unsigned = f"u{expected.dtype.itemsize}"
        a, b = (np.ascontiguousarray(array).view(unsigned) for array in (got[name], expected))
        different = np.argwhere(a != b)
        if different.size:
            at = tuple(int(n) for n in different[0])
            lines.append(
                f"{program.name}: {name} differs from the reference in {len(different)} of {a.size} elements, "
                f"first at {at}: {got[name][at]} instead of {expected[at]}"
            )
    return "\n".join(lines)
