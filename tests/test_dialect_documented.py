"""docs/kernels: the examples run, and every name that the dialect's page lists is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from vq_core.kernels.simulator import Program, SimulatorError, run

DOCS = Path(__file__).parent.parent / "docs" / "kernels"
DIALECT = (DOCS / "dialect.md").read_text()
SIMULATOR = (DOCS / "simulator.md").read_text()
ONE_GROUP: dict[str, Any] = {"threadgroups": (1, 1, 1), "threads": (64, 1, 1)}

# Each documented name, used once. Another backend's prelude must take the same text.
HEADER = """\
VQ_CONSTANT(float, LEVELS, 2) = {-1.0f, 1.0f};
VQ_FN float first(VQ_GLOBAL(float) p, VQ_SHARED_PTR(float) s, VQ_LOCAL_PTR(float) l) { return p[0] + s[0] + l[0]; }
VQ_RARE float seldom(float v) { return v; }
VQ_FN void put(VQ_GLOBAL_OUT(float) p, uint i, float v) { p[i] = v; }
"""
BODY = """\
VQ_SHARED(float, s, 64);
VQ_LOCAL(float, l, 2);
const uint3 a = thread_position_in_grid, b = thread_position_in_threadgroup, c = threadgroup_position_in_grid;
const uint3 d = threadgroups_per_grid, e = threads_per_threadgroup, f = threads_per_grid;
const uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
uint n = simdgroup_index_in_threadgroup + simdgroups_per_threadgroup + threads_per_simdgroup;
n += a.x + b.y + c.z + d.x + e.x + f.x + uint(x_shape[0]) + uint(x_ndim);
s[t] = float(x[t]);
l[0] = LEVELS[1];
threadgroup_barrier(mem_flags::mem_threadgroup);
threadgroup_barrier(mem_flags::mem_device);
simdgroup_barrier(mem_flags::mem_none);
float v = seldom(first(x, s, l));
VQ_UNROLL
VQ_FOR(i, 0, 2) { v += simd_sum(v); }
VQ_FOR_STEP(i, 0, 4, 2) { v = simd_min(v); }
v = simd_max(simd_shuffle(v, lane ^ 1u)) + simd_shuffle_xor(v, 2u) + simd_broadcast(v, 3u);
v += simd_shuffle_up(v, 1u) + simd_shuffle_down(v, 1u) + float(simd_prefix_exclusive_sum(n));
n += simd_ballot(v > 0.0f) + (simd_any(v > 1.0f) ? 1u : 0u) + (simd_all(v > 1.0f) ? 1u : 0u);
n += simd_prefix_inclusive_sum(n);
v = vq_sub(vq_add(vq_mul(v, v), v), vq_div(v, 2.0f)) + vq_fraction(5u);
if (v == INFINITY || v != NAN) v = 0.5f;
v = rint(v) + round(v) + floor(v) + ceil(v) + trunc(v) + fabs(v) + abs(v) + copysign(v, v) + sqrt(fabs(v));
v = fma(v, v, clamp(min(v, 1.0f), 0.0f, max(v, 2.0f)));
if (isnan(v) || isinf(v)) v = 1.0f;
v = exp(v) + exp2(v) + log(v) + log2(v) + pow(fabs(v), 2.0f) + sin(v) + cos(v) + tanh(v) + rsqrt(v);
n += as_type<uint>(v) + popcount(n) + clz(n) + ctz(n) + extract_bits(n, 1u, 2u) + reverse_bits(n);
const float2 f2 = vq_float2(v, v);
const float4 f4 = vq_float4(f2.x, f2.y, v, v);
half2 h2 = vq_half2(half(v), half(1.0f));
h2 = fma(h2 * h2, h2 - h2, h2 + h2);
const half4 h4 = vq_half4(h2.x, h2.y, h2.x, h2.y);
const uint2 u2 = vq_uint2(n, n);
const uint4 u4 = vq_uint4(u2.x, u2.y, n, n);
const int2 i2 = vq_int2(1, 2);
const int4 i4 = vq_int4(i2.x, i2.y, 3, 4);
const float2 pair = vq_aligned<float2>(x) ? vq_view<float2>(x)[0] : f2;
const short small = short(i4.x);
const ushort word = ushort(7);
const uchar byte = uchar(7);
const int8_t tiny = int8_t(7);
const int64_t wide = int64_t(7);
const ulong large = ulong(n) + ulong(wide);
const bfloat brain = bfloat(float(h4.w));
const bool yes = true;
const int sum = int(small) + int(word) + int(byte) + int(tiny) + int(large & 1u) + (yes ? 1 : 0);
put(y, t, float(T(f4.w)) + float(u4.w) + float(sum) + pair.x + float(brain));
"""


def names(section: str) -> set[str]:
    """What stands in backticks in a section's tables and sentences, without arguments."""
    text = DIALECT[DIALECT.index(f"## {section}\n") :].split("\n## ")[0]
    quoted = re.findall(r"`([^`]+)`", text)
    return {re.sub(r"[(<\[].*", "", name) for name in quoted} - {"metal::", "dtype", ".x .y .z", ".x .y .z .w", "+ - *"}


def test_every_documented_name_is_there() -> None:
    text = BODY + HEADER
    documented = names("What a body sees") | names("Names")
    assert len(documented) > 90
    missing = [name for name in documented if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert not missing
    program = Program("names", BODY, {"x": "float32"}, {"y": "float32"}, {"T": "dtype"}, HEADER)
    x = np.ones(64, np.float32)
    for contract in ("off", "fast"):
        outputs = {"y": ((64,), "float32")}
        got = run(program, {"T": "float32"}, {"x": x}, outputs, **ONE_GROUP, contract=contract)
        assert got["y"].shape == (64,)


def test_the_dialect_s_example() -> None:
    (body,) = re.findall(r"^```c\+\+\n(.*?)^```$", DIALECT, re.MULTILINE | re.DOTALL)
    program = Program("minus_largest", body, {"x": "T"}, {"y": "T"}, {"T": "dtype"})
    x = np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32)
    for seed in range(3):
        how: dict[str, Any] = {"threadgroups": (3, 1, 1), "threads": (64, 1, 1), "seed": seed}
        got = run(program, {"T": "float32"}, {"x": x}, {"y": (x.shape, "float32")}, **how)["y"]
        assert np.array_equal(got, x - x.max(1, keepdims=True))


def test_the_simulator_s_example() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", SIMULATOR, re.MULTILINE | re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    assert np.array_equal(space["y"], space["x"] * 2)


def test_the_message_that_is_shown() -> None:
    """The page's message is what a Hadamard kernel without the barrier between its stages gets."""
    shown = SIMULATOR[SIMULATOR.index("kernel 'hadamard'") :].split("```")[0]
    body = """\
VQ_SHARED(float, buf, N);
const uint t = thread_index_in_threadgroup;
buf[t] = float(x[t]);
buf[t + N / 2] = float(x[t + N / 2]);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint h = 1; h < N; h *= 2) {
  const uint i = t / h * 2u * h + t % h;
  const float a = buf[i], b = buf[i + h];
  buf[i] = a + b;
  buf[i + h] = a - b;
}
y[t] = buf[t];
y[t + N / 2] = buf[t + N / 2];
"""
    program = Program("hadamard", body, {"x": "float32"}, {"y": "float32"}, {"N": "int"})
    x = np.ones(128, np.float32)
    try:
        run(program, {"N": 128}, {"x": x}, {"y": ((128,), "float32")}, **ONE_GROUP)
    except SimulatorError as error:
        message = str(error).split("\n")[0]
    else:
        raise AssertionError("it ran")
    assert " ".join(shown.split()) == message
