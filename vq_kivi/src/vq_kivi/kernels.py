"""KIVI's kernels: range, quantize and pack in one pass, and back.

Each equals the plain functions of :mod:`vq_kivi.method`, bit for bit.  Group size, head size and lengths are run-time
numbers; bits and dtypes are compiled in. """

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import mlx.core as mx
import numpy as np

from vq_core.api import SIDES, Side
from vq_core.kernels import Call, Case, Kernel, Output
from vq_kivi import method

BITS = (2, 3, 4, 8)
DTYPES = ("float32", "float16", "bfloat16")
GROUPS = (32, 64, 128)
THREADS = 128
MOST = 2**31
"""Elements of one input: bodies count in 32 bits."""

HELPERS = """
// A group's range, scale and zero as the store keeps them. NaN stays NaN; zero has one sign.
VQ_FN float kivi_rounded(float v) { return float(half(v)); }
VQ_FN float kivi_code(float v, float step, float base, float levels) {
  const bool usable = step > 0.0f && step < INFINITY;
  const float q = rint(vq_div(vq_sub(v, base), usable ? step : 1.0f));
  // A NaN fails every comparison, so it becomes 0.
  return usable && q > 0.0f ? (q < levels ? q : levels) : 0.0f;
}
"""

KEEP = """
if (sizeof(M) == 2) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
} else if (sizeof(T) == 2 && fabs(low) <= 65504.0f && step <= 65504.0f) {
  step = kivi_rounded(step);
  low = kivi_rounded(low);
}
"""
"""Scale and zero as the store keeps them: what the codes are computed from."""

KEYS_RANGE = """
// x (B, H, n, D). One thread owns a group of tokens of one channel; neighbours take neighbouring channels.
const uint heads = uint(x_shape[0]) * uint(x_shape[1]), n = x_shape[2], D = x_shape[3];
const uint groups = n / size, total = heads * groups * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint d = i % D, g = i / D % groups, h = i / D / groups;
  const uint first = (h * n + g * size) * D + d;
  float low = float(x[first]), high = low;
  bool bad = low != low;
  for (uint t = 1u; t < size; ++t) {
    const float v = float(x[first + t * D]);
    bad = bad || v != v;
    low = min(low, v);
    high = max(high, v);
  }
  const float levels = float((1u << bits) - 1u);
  low = bad ? NAN : low == 0.0f ? 0.0f : low;
  float step = bad ? NAN : vq_div(vq_sub(high, low), levels);
""" + KEEP

PACK_KEYS = KEYS_RANGE + """
  // codes (B, H, D, n * bits / 32), scale and zero (B, H, D, n / group).
  const uint words = size * uint(bits) / 32u;
  const uint row = h * D + d;
  uint place = row * groups * words + g * words;
  uint word = 0u, filled = 0u;
  for (uint t = 0u; t < size; ++t) {
    const float v = float(x[first + t * D]);
    const uint q = uint(kivi_code(v, step, low, levels));
    word |= q << filled;
    filled += uint(bits);
    if (filled >= 32u) {
      codes[place] = word;
      place += 1u;
      filled -= 32u;
      word = filled > 0u ? q >> (uint(bits) - filled) : 0u;
    }
  }
  scale[row * groups + g] = M(step);
  zero[row * groups + g] = M(low);
}
"""

ROUND_KEYS = KEYS_RANGE + """
  for (uint t = 0u; t < size; ++t) {
    const float v = float(x[first + t * D]);
    y[first + t * D] = vq_add(vq_mul(kivi_code(v, step, low, levels), step), low);
  }
}
"""

VALUES_RANGE = """
// x (B, H, n, D). A lane owns four neighbouring channels; the lanes of a group find its range by shuffles.
const uint rows = uint(x_shape[0]) * uint(x_shape[1]) * uint(x_shape[2]), D = x_shape[3];
const uint groups = (D + size - 1u) / size, total = rows * groups;
const uint lanes = size / 4u, lane = thread_index_in_simdgroup, member = lane % lanes;
const uint unit = (threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup)
                * (32u / lanes) + lane / lanes;
const uint u = min(unit, total - 1u);  // surplus lanes repeat the last group and write nothing
const uint row = u / groups, channel = u % groups * size + member * 4u;
VQ_LOCAL(float, v, 4);
float low = INFINITY, high = -INFINITY;
uint bad = 0u;
for (uint k = 0u; k < 4u; ++k) {
  const float w = float(x[row * D + min(channel + k, D - 1u)]);  // a group that does not fill repeats the edge
  v[k] = w;
  bad |= w != w ? 1u : 0u;
  low = min(low, w);
  high = max(high, w);
}
for (uint o = lanes / 2u; o > 0u; o >>= 1) {
  low = min(low, simd_shuffle_xor(low, o));
  high = max(high, simd_shuffle_xor(high, o));
  bad |= simd_shuffle_xor(bad, o);
}
const float levels = float((1u << bits) - 1u);
low = bad != 0u ? NAN : low == 0.0f ? 0.0f : low;
float step = bad != 0u ? NAN : vq_div(vq_sub(high, low), levels);
""" + KEEP

PACK_VALUES = VALUES_RANGE + """
// codes (B, H, n, P * bits / 32), scale and zero (B, H, n, P / group); P is D filled up to whole groups.
// Four codes are `4 * bits` bits of the group's stream, at bit `member * 4 * bits`.
uint mine = 0u;
for (uint k = 0u; k < 4u; ++k) {
  const float w = v[k];
  mine |= uint(kivi_code(w, step, low, levels)) << (k * uint(bits));
}
const uint out = u * (size * uint(bits) / 32u);
if (bits == 3) {
  // 8 lanes make 3 words; a lane's 12 bits may lie across two of them.
  const uint at = member % 8u * 12u;
  for (uint w = 0u; w < 3u; ++w) {
    const uint from = w * 32u;
    uint part = at >= from ? (at - from < 32u ? mine << (at - from) : 0u) : (from - at < 12u ? mine >> (from - at) : 0u);
    part |= simd_shuffle_xor(part, 1u);
    part |= simd_shuffle_xor(part, 2u);
    part |= simd_shuffle_xor(part, 4u);
    if (unit < total && member % 8u == 0u) codes[out + member / 8u * 3u + w] = part;
  }
} else {
  const uint share = 8u / uint(bits);  // lanes of one word
  mine <<= member % share * 4u * uint(bits) % 32u;
  if (bits < 8) mine |= simd_shuffle_xor(mine, 1u);
  if (bits < 4) mine |= simd_shuffle_xor(mine, 2u);
  if (unit < total && member % share == 0u) codes[out + member / share] = mine;
}
if (unit < total && member == 0u) {
  scale[u] = M(step);
  zero[u] = M(low);
}
"""

ROUND_VALUES = VALUES_RANGE + """
for (uint k = 0u; k < 4u; ++k) {
  const float w = v[k];
  if (unit < total && channel + k < D) y[row * D + channel + k] = vq_add(vq_mul(kivi_code(w, step, low, levels), step), low);
}
"""

UNPACK_KEYS = """
// codes (N, H, D, words), scale and zero (N, H, D, groups) -> x (N, H, n, D).
const uint heads = uint(codes_shape[0]) * uint(codes_shape[1]), D = codes_shape[2], words = codes_shape[3];
const uint n = words * 32u / uint(bits), groups = scale_shape[3], total = heads * n * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint d = i % D, t = i / D % n, row = i / D / n * D + d;
  const uint bit = t * uint(bits), place = row * words + bit / 32u, shift = bit % 32u;
  uint q = codes[place] >> shift;
  if (shift + uint(bits) > 32u) q |= codes[place + 1u] << (32u - shift);
  q &= (1u << bits) - 1u;
  const uint group = row * groups + t / (n / groups);
  x[i] = vq_add(vq_mul(float(q), float(scale[group])), float(zero[group]));
}
"""

UNPACK_VALUES = """
// codes (N, H, n, words), scale and zero (N, H, n, groups) -> x (N, H, n, D), D = head_dim.
const uint rows = uint(codes_shape[0]) * uint(codes_shape[1]) * uint(codes_shape[2]), words = codes_shape[3];
const uint groups = scale_shape[3], D = head_dim, total = rows * D;
const uint i = thread_position_in_grid.x;
if (i < total) {
  const uint d = i % D, row = i / D;
  const uint bit = d * uint(bits), place = row * words + bit / 32u, shift = bit % 32u;
  uint q = codes[place] >> shift;
  if (shift + uint(bits) > 32u) q |= codes[place + 1u] << (32u - shift);
  q &= (1u << bits) - 1u;
  const uint group = row * groups + d / size;
  x[i] = vq_add(vq_mul(float(q), float(scale[group])), float(zero[group]));
}
"""


def metadata_dtype(dtype: str) -> str:
    """Dtype that the packing kernels write scale and zero in; bfloat16 models' are narrowed after a look at them."""
    return "float16" if dtype == "float16" else "float32"


def _state(side: Side, bits: int, group_size: int, head_dim: int, dtype: str) -> method.KiviState:
    padded = -(-head_dim // group_size) * group_size
    metadata = "float32" if dtype == "float32" else "float16"
    return method.KiviState(bits, group_size, side, head_dim, padded, metadata, dtype == "bfloat16")  # type: ignore[arg-type]


def _name(x: mx.array) -> str:
    return str(x.dtype).removeprefix("mlx.core.")


def _packed(side: Side) -> Callable[..., tuple[mx.array, ...]]:
    def pack(x: mx.array, *, bits: int, size: int, **rest: object) -> tuple[mx.array, ...]:
        state = _state(side, bits, size, x.shape[3], _name(x))
        found = method.quantize(state, x)
        dtype = mx.float16 if x.dtype == mx.float16 else mx.float32
        return method.vq_pack(state, found)["codes"], found.scale.astype(dtype), found.zero.astype(dtype)

    return pack


def _rounded(side: Side) -> Callable[..., tuple[mx.array, ...]]:
    def both(x: mx.array, *, bits: int, size: int, **rest: object) -> tuple[mx.array, ...]:
        state = _state(side, bits, size, x.shape[3], _name(x))
        found = method.quantize(state, x)
        packed = method.vq_pack(state, found)
        return (method.vq_decode(state, packed),)

    return both


def _unpacked(side: Side) -> Callable[..., tuple[mx.array, ...]]:
    def unpack(
        codes: mx.array, scale: mx.array, zero: mx.array, *, bits: int, size: int, head_dim: int, **rest: object
    ) -> tuple[mx.array, ...]:
        state = _state(side, bits, size, head_dim, _name(scale))
        return (method.vq_decode(state, {"codes": codes, "scale": scale, "zero": zero}),)

    return unpack


# ---- shapes: of rows, of grids


def _keys(per_group: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    def shape(call: Call) -> tuple[int, ...]:
        B, H, n, D = call.shapes["x"]
        return (B, H, D, n // call.numbers["size"] * per_group(call))

    return shape


def _values(per_group: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    def shape(call: Call) -> tuple[int, ...]:
        B, H, n, D = call.shapes["x"]
        return (B, H, n, -(-D // call.numbers["size"]) * per_group(call))

    return shape


def _words(call: Call) -> int:
    return int(call.numbers["size"] * call.parameters["bits"] // 32)


def _one(call: Call) -> int:
    return 1


def _threads(call: Call) -> tuple[int, int, int]:
    return (THREADS, 1, 1)


def _grid(count: Callable[[Call], int]) -> Callable[[Call], tuple[int, int, int]]:
    """Threadgroups for so many threads."""
    return lambda call: (-(-count(call) // THREADS), 1, 1)


def _check_packing(call: Call) -> str:
    x, size = call.shapes["x"], call.numbers["size"]
    wanted = metadata_dtype(call.parameters["T"])
    if call.parameters["M"] != wanted:
        return f"scale and zero of {call.parameters['T']} numbers are {wanted}, not {call.parameters['M']}"
    if size not in GROUPS:
        return f"groups of {size}: accepted are {', '.join(map(str, GROUPS))}"
    if len(x) != 4:
        return f"x {x} must be (B, H, n, D)"
    return f"x {x} has {math.prod(x)} elements; fewer than {MOST} are accepted" if math.prod(x) >= MOST else ""


def _check_keys(call: Call) -> str:
    n, size = call.shapes["x"][2], call.numbers["size"]
    return _check_packing(call) or ("" if n % size == 0 else f"{n} tokens are no whole groups of {size}")


def _check_unpacking(call: Call) -> str:
    codes, scale, size = call.shapes["codes"], call.shapes["scale"], call.numbers["size"]
    if size not in GROUPS or len(codes) != 4 or scale != call.shapes["zero"] or scale[:3] != codes[:3]:
        return f"codes {codes}, scale {scale} and zero {call.shapes['zero']} in groups of {size} do not fit"
    if codes[3] * 32 != scale[3] * size * call.parameters["bits"]:
        return f"{codes[3]} words are not {scale[3]} groups of {size} codes of {call.parameters['bits']} bits"
    return ""


def _dense_keys(call: Call) -> tuple[int, ...]:
    N, H, D, words = call.shapes["codes"]
    return (N, H, words * 32 // call.parameters["bits"], D)


def _dense_values(call: Call) -> tuple[int, ...]:
    return (*call.shapes["codes"][:3], call.numbers["head_dim"])


# ---- inputs that show that kernel and reference agree


def _data(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, family: int) -> mx.array:
    """Normal, with ties and both zeros, with outliers, constant, extreme, or with NaN and infinities."""
    x = rng.standard_normal(shape)
    if family == 1:
        x = np.where(rng.random(shape) < 0.2, -0.0, rng.integers(-3, 4, shape))
    if family == 2:
        x = x * np.exp(np.minimum(3 * rng.standard_normal(shape[-1:]), 6))
    if family == 3:
        x = np.broadcast_to(rng.standard_normal(shape[:2] + (1, 1)), shape) + (rng.random(shape[:1] + (1, 1, 1)) < 0.5) * x
    if family == 4:
        x = np.clip(x * 1e30, *((-65504, 65504) if dtype == "float16" else (-1e30, 1e30)))
    if family == 5:
        x = np.where(rng.random(shape) < 0.02, rng.choice([np.nan, np.inf, -np.inf], shape), x)
    return mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))


FAMILIES = 6
DIMS = (64, 80, 96, 128, 192, 256, 36)
TOKENS = (1, 2, 3, 4)


def _packing_cases(side: Side) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        rng = np.random.default_rng(5)
        for i in range(324):
            dtype, bits, size = DTYPES[i % 3], BITS[i // 3 % 4], GROUPS[i // 12 % 3]
            D, family, B, H = DIMS[i % 7], i % FAMILIES if i % 2 else 0, 1 + i % 2, 1 + i % 3
            n = TOKENS[i // 7 % 4] * size if side == "keys" else (1, 2, 33, 7, 128)[i % 5]
            if D * n * B * H > 40000:
                B, H = 1, 1
            x = _data(rng, (B, H, n, D), dtype, (i // 36) % FAMILIES if family == 0 else family)
            yield Case((x,), {"bits": bits, "size": size, "M": metadata_dtype(dtype)}, f"{x.shape} {dtype} {bits} bits, {size}")

    return cases


def _unpacking_cases(side: Side) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for case in _packing_cases(side)():
            (x,), bits, size = case.inputs, case.parameters["bits"], case.parameters["size"]
            codes, scale, zero = _packed(side)(x, bits=bits, size=size)
            yield Case((codes, scale, zero), {"bits": bits, "size": size, "head_dim": x.shape[3]}, case.name)

    return cases


def _packer(side: Side) -> Kernel:
    shape = _keys if side == "keys" else _values
    one_thread_owns = (lambda call: math.prod(call.shapes["x"]) // call.numbers["size"]) if side == "keys" else None
    return Kernel(
        name=f"kivi_pack_{side}",
        stands_for="encode+pack",
        body=PACK_KEYS if side == "keys" else PACK_VALUES,
        header=HELPERS,
        inputs={"x": "T"},
        outputs={"codes": Output("uint32", shape(_words)), "scale": Output("M", shape(_one)), "zero": Output("M", shape(_one))},
        parameters={"T": DTYPES, "M": ("float16", "float32"), "bits": BITS},
        numbers=("size",),
        threads=_threads,
        threadgroups=_grid(one_thread_owns or (lambda call: math.prod(_values(lambda c: c.numbers["size"] // 4)(call)))),
        equals=_packed(side),
        cases=_packing_cases(side),
        check=_check_keys if side == "keys" else _check_packing,
    )


def _rounder(side: Side) -> Kernel:
    """What the values become: quantized and dequantized without being stored, as published KIVI kernels compute."""
    packer = PACK[side]
    return attrs.evolve(
        packer,
        name=f"kivi_round_{side}",
        stands_for="encode+decode",
        body=ROUND_KEYS if side == "keys" else ROUND_VALUES,
        outputs={"y": Output("float32", lambda call: call.shapes["x"])},
        equals=_rounded(side),
    )


def _unpacker(side: Side) -> Kernel:
    shape = _dense_keys if side == "keys" else _dense_values
    return Kernel(
        name=f"kivi_unpack_{side}",
        stands_for="decode",
        body=UNPACK_KEYS if side == "keys" else UNPACK_VALUES,
        inputs={"codes": "uint32", "scale": "M", "zero": "M"},
        outputs={"x": Output("float32", shape)},
        parameters={"M": ("float16", "float32"), "bits": BITS},
        numbers=("size", "head_dim"),
        threads=_threads,
        threadgroups=_grid(lambda call: math.prod(shape(call))),
        equals=_unpacked(side),
        cases=_unpacking_cases(side),
        check=_check_unpacking,
    )


PACK = {side: _packer(side) for side in SIDES}
ROUND = {side: _rounder(side) for side in SIDES}
UNPACK = {side: _unpacker(side) for side in SIDES}
KERNELS = (*PACK.values(), *ROUND.values(), *UNPACK.values())
