"""Quantize and pack straight into the device form: one launch, one piece of memory for each block of 32 tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from vq_core.api import SIDES, Side
from vq_core.kernels import Backend, Call, Case, Kernel, Output
from vq_kivi import method
from vq_kivi.kernels import bodies, device
from vq_kivi.kernels.cases import packing_cases
from vq_kivi.kernels.reference import metadata_dtype, name_of, packed, state_of

THREADS = 128
MOST = 2**31
SLAB = 128
"""Channels of a threadgroup: whole chunks, see :mod:`vq_kivi.kernels.device`."""

# Words from the codes of a slab, kept in threadgroup memory as streams. `channel` and `token` are of place j, half b.
GATHER = """
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint places = 16u / uint(bits), chunk = 128u / uint(bits), span = min(D - d0, 128u), mask = (1u << bits) - 1u;
for (uint o = thread; o < span * uint(bits); o += 128u) {
  const uint from = o / 128u * chunk, r = o % 128u;
  const bool half_chunk = from + chunk > span;
  const uint lane = half_chunk ? r / 2u : r / 4u, g = lane / 4u, t = lane & 3u, a = r & 1u, split = places / 2u;
  uint found = 0u;
  VQ_UNROLL
  for (uint j = 0u; j < places; ++j) {
    const uint i = half_chunk ? j / split : (r / 2u) & 1u, place = half_chunk ? j % split : j;
    VQ_UNROLL
    for (uint b = 0u; b < 2u; ++b) {
      const uint channel = from + 8u * place + CHANNEL, token = 16u * i + 8u * a + TOKEN;
      const uint code = (tile[STREAM] >> (BIT % 32u)) & mask;
      found |= code << (uint(bits) * j + 16u * b);
    }
  }
  codes[(block * D + d0) * uint(bits) + o] = found;
}
"""

TOP = """
// x (B, H, n, D) -> codes (B, H, n / 32, D * bits), scale and zero (B, H, n / 32, D).
// A threadgroup takes 128 channels of a block of 32 tokens.
VQ_SHARED(uint, tile, 128 * bits);
const uint n = x_shape[2], D = x_shape[3], across = (D + 127u) / 128u, slab = threadgroup_position_in_grid.x;
const uint block = slab / across, d0 = (slab - block * across) * 128u, thread = thread_index_in_threadgroup;
"""

KEEP = """
VQ_UNROLL
for (int k = 0; k < bits; ++k) {
  const uint one = word[k];
  tile[thread * uint(bits) + uint(k)] = one;
}
"""

KEYS = (
    TOP
    + """
const uint d = min(d0 + thread, D - 1u), first = block * 32u * D + d, size = 32u;
"""
    + bodies.KEYS_RANGE
    + bodies.WORDS
    + KEEP
    + GATHER.replace("CHANNEL", "2u * t + b")
    .replace("TOKEN", "g")
    .replace("STREAM", "channel * uint(bits) + token * uint(bits) / 32u")
    .replace("BIT", "(token * uint(bits))")
    + """
if (d0 + thread < D) {
  const uint at = block * D + d / 32u * 32u + d % 8u / 2u * 8u + d % 32u / 8u * 2u + (d & 1u);
  scale[at] = M(step);
  zero[at] = M(low);
}
"""
)
"""A thread takes a channel."""

VALUES = (
    TOP
    + """
const uint own = thread / 4u, group = min(d0 / 32u + (thread & 3u), D / 32u - 1u), channel = group * 32u, lanes = 1u;
const uint row = block * 32u + own, first = row * D + channel;
"""
    + bodies.VALUES_GROUP
    + bodies.WORDS
    + KEEP
    + GATHER.replace("CHANNEL", "g")
    .replace("TOKEN", "2u * t + b")
    .replace("STREAM", "token * uint(4 * bits) + channel * uint(bits) / 32u")
    .replace("BIT", "(channel * uint(bits))")
    + """
if (d0 / 32u + (thread & 3u) == group) {
  const uint at = block * D + group * 32u + own % 8u / 2u * 8u + own / 8u * 2u + (own & 1u);
  scale[at] = M(step);
  zero[at] = M(low);
}
"""
)
"""A thread takes a group of 32 channels of a token."""


def _shape(words: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    def of(call: Call) -> tuple[int, ...]:
        B, H, n, D = call.shapes["x"]
        return (B, H, n // device.BLOCK, D * words(call))

    return of


def _check(call: Call) -> str:
    x = call.shapes["x"]
    if len(x) != 4 or x[2] % device.BLOCK or x[3] % device.BLOCK:
        return f"x {x} must be (B, H, n, D) with n and D multiples of {device.BLOCK}"
    wanted = metadata_dtype(call.parameters["T"])
    if call.parameters["M"] != wanted:
        return f"scale and zero of {call.parameters['T']} numbers are {wanted}, not {call.parameters['M']}"
    count = x[0] * x[1] * x[2] * x[3]
    return f"x {x} has {count} elements; fewer than {MOST} are accepted" if count >= MOST else ""


def _reference(side: Side) -> Callable[..., tuple[mx.array, ...]]:
    def pack(x: mx.array, *, bits: int, **rest: object) -> tuple[mx.array, ...]:
        state = state_of(side, bits, device.BLOCK, x.shape[3], name_of(x))
        rows = dict(zip(("codes", "scale", "zero"), packed(side)(x, bits=bits, size=device.BLOCK), strict=True))
        return tuple(device.to_device(state, rows).values())

    return pack


def _cases(side: Side) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for case in packing_cases(side)():
            x, given = case.inputs[0], case.parameters
            if x.dtype == mx.float32 or given["bits"] not in device.BITS or given["size"] != 32 or x.shape[3] < 32:
                continue
            tokens, channels = -(-x.shape[2] // 32) * 32, x.shape[3] // 32 * 32
            x = mx.pad(x[..., :channels], [(0, 0), (0, 0), (0, tokens - x.shape[2]), (0, 0)], mode="edge")
            yield Case((x,), {"bits": given["bits"], "M": given["M"]}, f"{case.name} as {x.shape}")
        rng = np.random.default_rng(6)
        for i, shape in enumerate([(1, 2, 64, 96), (2, 1, 32, 160), (1, 1, 96, 96), (1, 3, 32, 224)]):
            x = mx.array(rng.standard_normal(shape).astype(np.float32)).astype((mx.float16, mx.bfloat16)[i % 2])
            yield Case((x,), {"bits": 2, "M": metadata_dtype(name_of(x))}, f"half a chunk {shape}")

    return cases


def _packer(side: Side) -> Kernel:
    def threadgroups(call: Call) -> tuple[int, int, int]:
        B, H, n, D = call.shapes["x"]
        return (B * H * (n // device.BLOCK) * -(-D // SLAB), 1, 1)

    return Kernel(
        name=f"kivi_device_pack_{side}",
        stands_for="encode+pack, device form",
        body=KEYS if side == "keys" else VALUES,
        header=bodies.HELPERS,
        inputs={"x": "T"},
        outputs={
            "codes": Output("uint32", _shape(lambda call: call.parameters["bits"])),
            "scale": Output("M", _shape(lambda call: 1)),
            "zero": Output("M", _shape(lambda call: 1)),
        },
        parameters={"T": ("float16", "bfloat16"), "M": ("float16", "float32"), "bits": device.BITS},
        threads=lambda call: (THREADS, 1, 1),
        threadgroups=threadgroups,
        equals=_reference(side),
        cases=_cases(side),
        check=_check,
        backends=("cuda", "simulator"),
    )


PACK = {side: _packer(side) for side in SIDES}


def pack(state: method.KiviState, x: mx.array, backend: Backend, **rest: object) -> dict[str, mx.array]:
    """What ``vq_encode``, ``vq_pack`` and ``to_device`` do, in one launch."""
    given = {"bits": state.bits, "M": metadata_dtype(name_of(x))}
    codes, scale, zero = PACK[state.side](x, backend=backend, **given)
    scale, zero = method.stored(state, scale, zero)
    return {"codes": codes, "scale": scale, "zero": zero}
