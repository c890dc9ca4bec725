"""turboquant_rvq's kernels for its device form: blocks of 32 tokens rotated, quantized twice and laid out in one pass.

A threadgroup takes a block: its SIMD groups code their vectors one after another, into a byte a number, and all threads
make words of these.  Each kernel equals ``vq_encode``, ``vq_pack`` and ``to_device``, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.api import SIDES, Side
from vq_core.kernels import Backend, Call, Case, Kernel, Output
from vq_core.kernels.skeleton.matrix import HEAD_DIMS
from vq_turboquant import rvq
from vq_turboquant.kernels import rvq_device, vectors
from vq_turboquant.kernels.cases import FAMILIES, numbers
from vq_turboquant.kernels.rvq import QUANTIZE, arrays, constants_of, state_of
from vq_turboquant.kernels.tile_words import filled, word

BLOCK, LONGEST = rvq.BLOCK, max(HEAD_DIMS)
GROUPS = {"hadamard": 8, "haar": 4}
"""SIMD groups of a threadgroup: as many as have registers, and room for a vector of each."""
WIDTHS = (1, 2)


def _text(side: Side, kind: str) -> str:
    dense, groups = kind == "haar", GROUPS[kind]
    more = "".join(f"VQ_SHARED(float, {name}, {groups * LONGEST});\n" for name in ("low", "made") if dense)
    return filled(
        f"""
// x (B, H, n, D) -> codes and rest (B, H, n / 32, D * bits), scale (B, H, n / 32, 32), a block a threadgroup.
VQ_SHARED(float, all, {groups * LONGEST});
VQ_SHARED(float, steps, {BLOCK});
VQ_SHARED(uchar, held, {BLOCK * LONGEST});
{more}
const uint lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup * {LONGEST}u;
const uint D = x_shape[3], W = D, block = threadgroup_position_in_grid.x, total = 64u * D * uint(bits) / 32u;
for (uint next = 0u; next < {BLOCK // groups}u; ++next) {{
  const uint mine = next * {groups}u + simdgroup_index_in_threadgroup, row = block * {BLOCK}u + mine;
{vectors.LOAD}
{vectors.turn("turning", "turning_low") if dense else vectors.HADAMARD}
{QUANTIZE}
  for (uint i = lane; i < D; i += 32u) {{
    const uint both = uint(all[own + i]);
    held[mine * {LONGEST}u + i] = uchar((both & 255u) | both >> 8u << uint(bits));
  }}
  if (lane == 0u) steps[mine] = step;
  simdgroup_barrier(mem_flags::mem_threadgroup);
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint r = thread_index_in_threadgroup; r < total; r += {32 * groups}u) {{
{word(side, "(2 * bits)", "total", f"uint(held[token * {LONGEST}u + channel])")}
  if ((r & 1u) != 0u) rest[block * (total / 2u) + r / 2u] = found;
  else codes[block * (total / 2u) + r / 2u] = found;
}}
if (thread_index_in_threadgroup < {BLOCK}u) {{
  const uint r = thread_index_in_threadgroup;
  scale[block * {BLOCK}u + r] = M(steps[PLACE]);
}}
""",
        side,
    )


def _packed(side: Side, x: mx.array, *constants: mx.array, bits: int, **more: Any) -> tuple[mx.array, ...]:
    state = attrs.evolve(constants_of(constants, x.shape[3], bits, x.shape[3], "float16"), side=side)
    found = rvq_device.to_device(state, rvq.vq_pack(state, rvq.vq_encode(state, x)))
    return found["codes"], found["rest"], found["scale"]


def _cases(side: Side, kind: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        rng = np.random.default_rng(len(side))
        for i in range(72):
            dim, bits, family = HEAD_DIMS[(i + i // 7) % 5], WIDTHS[i // 7 % 2], FAMILIES[i % 7]
            shape = ((1, 1, 32), (1, 2, 32), (2, 1, 64))[0 if dim > 128 else i % 3]
            x = numbers(rng, (*shape, dim), family, "float16")
            given = {"bits": bits, "M": "float16", "blocks": math.prod(shape) // BLOCK}
            yield Case((x, *arrays(state_of(bits, dim, "float16", kind))), given, f"{family} {x.shape}, {bits} bits")

    return cases


def _check(call: Call) -> str:
    x, blocks, tables = call.shapes["x"], call.numbers["blocks"], call.shapes["tables"]
    if len(x) != 4 or x[2] % BLOCK or x[3] not in HEAD_DIMS:
        return f"x {x} must be (B, H, n, D), n a multiple of {BLOCK} and D one of {', '.join(map(str, HEAD_DIMS))}"
    if math.prod(x[:3]) != BLOCK * blocks or math.prod(x) >= vectors.LIMIT:
        return f"x {x} with blocks={blocks}: these are B H n / {BLOCK}, of fewer than {vectors.LIMIT} numbers"
    if tables != (vectors.TABLE,):
        return f"tables {tables} must be ({vectors.TABLE},)"
    return vectors.check_rotation(call.shapes, x[3])


def _blocks(last: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
    def shape(call: Call) -> tuple[int, ...]:
        B, H, n, _ = call.shapes["x"]
        return (B, H, n // BLOCK, last(call))

    return shape


def _kernel(side: Side, kind: str) -> Kernel:
    def equals(*inputs: mx.array, **given: Any) -> tuple[mx.array, ...]:
        return _packed(side, *inputs, **given)

    words = Output("uint32", _blocks(lambda call: call.shapes["x"][3] * call.parameters["bits"]))
    return Kernel(
        name=f"turboquant_rvq_device_{side}_{kind}",
        stands_for="device form",
        body=_text(side, kind),
        header=vectors.HELPERS[kind],
        inputs={"x": "float16", **vectors.rotation_inputs(kind), "tables": "float32"},
        outputs={"codes": words, "rest": words, "scale": Output("M", _blocks(lambda call: BLOCK))},
        parameters={"M": ("float16",), "bits": WIDTHS},
        numbers=("blocks",),
        threads=lambda call: (32 * GROUPS[kind], 1, 1),
        threadgroups=lambda call: (call.numbers["blocks"], 1, 1),
        equals=equals,
        cases=_cases(side, kind),
        check=_check,
        backends=("cuda", "simulator"),
    )


PACK = {(side, kind): _kernel(side, kind) for side in SIDES for kind in vectors.KINDS}
KERNELS = tuple(PACK.values())


def pack(
    state: rvq.State, x: mx.array, sequence: Mapping[str, mx.array], backend: Backend, **rest: Any
) -> dict[str, mx.array]:
    """What ``vq_encode``, ``vq_pack`` and ``to_device`` do, in one launch."""
    given = {"bits": state.bits, "M": "float16", "blocks": math.prod(x.shape[:3]) // BLOCK}
    made = PACK[state.side, vectors.kind_of(state.rotation)](x, *state.arrays, backend=backend, **given)
    return dict(zip(("codes", "rest", "scale"), made, strict=True))
