"""turboquant_prod's kernels for its device form: rotated, quantized, sketched and laid out in one launch.

A word of the order is of one token, so the SIMD group that codes it writes its words: each equals ``vq_encode``,
``vq_pack`` and ``to_device``, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.kernels import Backend, Call, Case, Kernel, Output
from vq_turboquant import prod
from vq_turboquant.kernels import prod as canonical
from vq_turboquant.kernels import prod_device, vectors
from vq_turboquant.kernels.cases import FAMILIES, numbers
from vq_turboquant.kernels.tile_order import BLOCK

DIM = prod.TILE_DIM
WIDTHS = (1, 2)

CODES = """
// A lane makes a word of one chunk and quarter of the channels.
if (n < rows && lane < 4u * uint(bits)) {
  uint word = 0u;
  VQ_UNROLL
  for (uint j = 0u; j < 16u / uint(bits); ++j) {
    VQ_UNROLL
    for (uint b = 0u; b < 2u; ++b) {
      const uint code = uint(made[own + lane / 4u * 64u + 8u * j + 2u * (lane & 3u) + b]);
      if (bits == 2) word |= code << (16u * (j / 4u) + 2u * (j / 2u & 1u) + 4u * ((j & 1u) + 2u * b));
      else word |= code << (j + 16u * b);
    }
  }
  codes[row / 32u * (128u * uint(bits)) + lane / 4u * 128u + place * 4u + (lane & 3u) * 4u + quarter] = word;
}
"""
SIGNS = f"""
{vectors.split("D")}
uint kept = 0u;
for (uint j = lane; j < m; j += 32u) {{  // m is a multiple of 32: all lanes vote
{vectors.product("sketching", "sketching_low", "D", "m")}
  const uint word = simd_ballot(projected(whole, mixed, other, 1.0f) > 0.0f);
  kept = lane == j / 32u ? word : kept;
}}
uint half_pairs = 0u;
VQ_UNROLL
for (uint j = 0u; j < 16u; ++j) {{
  const uint two = simd_shuffle(kept, j / 4u) >> (8u * (j & 3u) + 2u * (lane & 3u));
  half_pairs |= (two & 1u) << j | (two >> 1 & 1u) << (16u + j);
}}
if (n < rows && lane < 4u) sketch[row / 32u * 128u + place * 4u + lane * 4u + quarter] = half_pairs;
"""


def _text(kind: str) -> str:
    return f"""
// x (B, H, n, 128) -> codes (B, H, n / 32, 128 * bits), sketch (B, H, n / 32, 128), scale and gap (B, H, n / 32, 32).
const uint D = x_shape[3], m = sketching_shape[1], W = D;
{vectors.DENSE}
{vectors.PLACE}
const uint place = (row & 7u) * 4u, quarter = row / 8u & 3u, token = row / 32u * 32u + place + quarter;
{vectors.LOAD}
{canonical.TURN[kind][0]}
const float unit = vq_div(1.0f, root);
{vectors.folded("left", canonical.LEFT)}
simdgroup_barrier(mem_flags::mem_threadgroup);
{CODES}
if (n < rows && lane == 0u) gap[token] = M({vectors.mean("left")});
{SIGNS}
if (n < rows && lane == 0u) scale[token] = M(step);
"""


def _packed(x: mx.array, *constants: mx.array, bits: int, **rest: Any) -> tuple[mx.array, ...]:
    rows = canonical.packed(x, *constants, bits=bits, M="float16")
    named = dict(zip(("codes", "sketch", "scale", "gap"), rows, strict=True))
    state = canonical.constants_of(constants, DIM, bits, "float16", undo=False)
    return tuple(prod_device.to_device(state, named).values())


def _cases(kind: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        rng = np.random.default_rng(len(kind))
        for i in range(72):
            bits, family = WIDTHS[i // 7 % 2], FAMILIES[i % 7]
            x = numbers(rng, (*((1, 1, 32), (1, 2, 32), (2, 1, 64))[i % 5 % 3], DIM), family, "float16")
            given = {"bits": bits, "M": "float16", "rows": x.size // DIM}
            arrays = canonical.arrays(canonical.state_of(bits, DIM, "float16", kind))
            yield Case((x, *arrays), given, f"{family} {x.shape}, {bits} bits")

    return cases


def _check(call: Call) -> str:
    x, rows = call.shapes["x"], call.numbers["rows"]
    if len(x) != 4 or x[2] % BLOCK or x[3] != DIM:
        return f"x {x} must be (B, H, n, {DIM}), n a multiple of {BLOCK}"
    if math.prod(x[:3]) != rows or math.prod(x) >= vectors.LIMIT:
        return f"x {x} with rows={rows}: these are B H n, of fewer than {vectors.LIMIT} numbers"
    return vectors.check_rotation(call.shapes, x[3]) or canonical.check_constants(call, (DIM, DIM))


def _blocks(last: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    def shape(call: Call) -> tuple[int, ...]:
        B, H, n, _ = call.shapes["x"]
        return (B, H, n // BLOCK, last(call))

    return shape


def _kernel(kind: str) -> Kernel:
    return Kernel(
        name=f"turboquant_prod_device_{kind}",
        stands_for="device form",
        body=_text(kind),
        header=canonical.header(kind),
        inputs={"x": "float16", **canonical.constant_inputs(kind)},
        outputs={
            "codes": Output("uint32", _blocks(lambda call: DIM * int(call.parameters["bits"]))),
            "sketch": Output("uint32", _blocks(lambda call: DIM)),
            "scale": Output("M", _blocks(lambda call: BLOCK)),
            "gap": Output("M", _blocks(lambda call: BLOCK)),
        },
        parameters={"M": ("float16",), "bits": WIDTHS},
        numbers=("rows",),
        threads=vectors.threads,
        threadgroups=vectors.threadgroups,
        equals=_packed,
        cases=_cases(kind),
        check=_check,
        backends=("cuda", "simulator"),
    )


PACK = {kind: _kernel(kind) for kind in vectors.KINDS}
KERNELS = tuple(PACK.values())


def pack(
    state: prod.State, x: mx.array, sequence: Mapping[str, mx.array], backend: Backend, **rest: Any
) -> dict[str, mx.array]:
    """What ``vq_encode``, ``vq_pack`` and ``to_device`` do, in one launch."""
    assert state.rotation is not None
    given = {"bits": state.bits, "M": "float16", "rows": x.size // DIM}
    made = PACK[vectors.kind_of(state.rotation)](x, *state.arrays, backend=backend, **given)
    return dict(zip(("codes", "sketch", "scale", "gap"), made, strict=True))
