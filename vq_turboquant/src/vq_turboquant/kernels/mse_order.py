"""Codes and scales of whole blocks from the canonical order into the device form, behind the kernel that packs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.api import SIDES, Side
from vq_core.codec.bits import unpack_bits
from vq_core.kernels import Backend, Call, Case, Kernel, Output
from vq_turboquant.kernels import mse
from vq_turboquant.kernels.tile_order import BLOCK, ordered
from vq_turboquant.kernels.tile_words import filled, word
from vq_turboquant.mse import MseState

THREADS = 128
MOST = 2**31

BODY = """
// codes (B, H, n, w), scale (B, H, n, 1) -> words (B, H, n / 32, 32 w), scales (B, H, n / 32, 32).
// A thread makes a word.
const uint w = codes_shape[3], all = codes_shape[0] * codes_shape[1] * codes_shape[2] * w;
const uint n = thread_position_in_grid.x;
const uint o = min(n, all - 1u), block = o / (32u * w), r = o - block * 32u * w;
WORD
if (n < all) words[n] = found;
if (n < all && r < 32u) {
  const half one = scale[block * 32u + PLACE];
  scales[block * 32u + r] = one;
}
"""


def _check(call: Call) -> str:
    codes, bits = call.shapes["codes"], call.parameters["bits"]
    if len(codes) != 4 or codes[2] % BLOCK or codes[3] % bits:
        return (
            f"codes {codes} must be (B, H, n, w) with n a multiple of {BLOCK} and w one of {bits}: runs of 32 channels"
        )
    if call.shapes["scale"] != (*codes[:3], 1):
        return f"scale {call.shapes['scale']} must be {(*codes[:3], 1)}"
    return f"codes {codes} are too many; fewer than {MOST} are accepted" if math.prod(codes) >= MOST else ""


def _cases(side: Side) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        rng = np.random.default_rng(len(side))
        for i, dim in enumerate((32, 64, 96, 128, 160, 192, 224, 256, 512) * 4):
            for bits in (2, 4):
                B, H, n = (1, 2)[i // 2 % 2], (3, 1, 2)[i % 3], 32 * (1 + (i + bits) % 5)
                codes = rng.integers(0, 2**32, (B, H, n, dim * bits // 32), np.uint32)
                scale = rng.standard_normal((B, H, n, 1)).astype(np.float16)
                scale[:, :, 3::11] = (np.nan, np.inf, -0.0)[i % 3]
                yield Case((mx.array(codes), mx.array(scale)), {"bits": bits}, f"{bits} bits, {codes.shape}, {i}")

    return cases


def _kernel(side: Side) -> Kernel:
    code = "codes[(block * 32u + token) * w + channel * uint(bits) / 32u] >> (channel * uint(bits) % 32u)"
    body = filled(BODY.replace("WORD", word(side, "bits", "32u * w", code)), side)

    def equals(codes: mx.array, scale: mx.array, *, bits: int, **rest: Any) -> tuple[mx.array, ...]:
        return ordered(side, bits, unpack_bits(codes, bits), scale)

    def blocks(last: Callable[[Call], int]) -> Callable[[Call], tuple[int, ...]]:
        def shape(call: Call) -> tuple[int, ...]:
            B, H, n, _ = call.shapes["codes"]
            return (B, H, n // BLOCK, last(call))

        return shape

    return Kernel(
        name=f"turboquant_mse_order_{side}",
        stands_for="device form",
        body=body,
        inputs={"codes": "uint32", "scale": "float16"},
        outputs={
            "words": Output("uint32", blocks(lambda call: BLOCK * call.shapes["codes"][3])),
            "scales": Output("float16", blocks(lambda call: BLOCK)),
        },
        parameters={"bits": (2, 4)},
        threads=lambda call: (THREADS, 1, 1),
        threadgroups=lambda call: (-(-math.prod(call.shapes["codes"]) // THREADS), 1, 1),
        equals=equals,
        cases=_cases(side),
        check=_check,
        backends=("cuda", "simulator"),
    )


ORDER = {side: _kernel(side) for side in SIDES}


def pack(
    state: MseState, x: mx.array, sequence: Mapping[str, mx.array], backend: Backend, **rest: Any
) -> dict[str, mx.array]:
    """What ``vq_encode``, ``vq_pack`` and ``to_device`` do, in two launches."""
    packed = mse.pack(state, x, sequence, backend)
    found = ORDER[state.side](packed["codes"], packed["scale"], backend=backend, bits=state.parts[0].bits)
    return dict(zip(("codes", "scale"), found, strict=True))
