"""The matrix pass over KIVI's codes: its reference, and calls on which the two are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.kernels import Case, Kernel
from vq_core.kernels.skeleton.matrix import MatrixPlan, matrix_pass, scale_bits
from vq_kivi import method
from vq_kivi.kernels import device, matrix
from vq_kivi.kernels.reference import state_of

PAGE = 128
PAIRS = ((2, 2, 128, 128), (4, 4, 128, 128), (2, 4, 64, 96), (8, 2, 192, 64), (2, 2, 256, 256))
"""Bits of keys and values, head sizes of keys and values: what ``vq verify`` compares."""
RATIOS = (4, 1, 8, 3, 7, 2, 16, 6)
LENGTHS = (1, 1, 2, 5, 1, 3, 16, 8)
COUNT = 16


def states(k_bits: int, v_bits: int, D: int, V: int) -> tuple[method.KiviState, method.KiviState]:
    """Of both sides of a float16 layer."""
    return state_of("keys", k_bits, 32, D, "float16"), state_of("values", v_bits, 32, V, "float16")


def kernel_of(k_bits: int, v_bits: int, D: int, V: int, laid: MatrixPlan | None = None) -> Kernel:
    """The pass over these codes."""
    keys, values = states(k_bits, v_bits, D, V)
    return matrix_pass(
        matrix.snippet(keys),
        matrix.snippet(values),
        cases=lambda: cases(k_bits, v_bits, D, V),
        equals=reference(keys, values),
        laid=laid,
    )


@cache
def passes() -> tuple[Kernel, ...]:
    """Of ``PAIRS``."""
    return tuple(kernel_of(*pair) for pair in PAIRS)


def reference(keys: method.KiviState, values: method.KiviState) -> Callable[..., Sequence[mx.array]]:
    """Attention to the packed tokens in float32, (B, H, R * L, D_v)."""

    def attend(
        q: mx.array, rows: mx.array, *arrays: mx.array, scale_bits: int, causal: int, regular: int, **rest: Any
    ) -> tuple[mx.array]:
        scale = float(np.array(scale_bits, np.uint32).view(np.float32)) / math.log2(math.e)
        B, Hq, L, D = q.shape
        fields = [dict(zip(("codes", "scale", "zero"), arrays[i : i + 3], strict=True)) for i in (0, 3)]
        H, out = fields[0]["codes"].shape[1], []
        for b, row in enumerate(np.array(rows).tolist()):
            packed, first, window, _, hidden = row[:5]
            if not packed:
                out.append(mx.full((H, Hq // H * L, values.head_dim), mx.nan))
                continue
            sides = []
            for state, held, table in zip((keys, values), fields, arrays[6:], strict=True):
                depth = -(-packed // PAGE)
                ids = [d * B + b for d in range(depth)] if regular else np.array(table)[b, :depth].tolist()
                sides.append(_decoded(state, held, ids)[:, :packed])
            queries = q[b].astype(mx.float32).reshape(H, Hq // H * L, D)
            scores = (queries @ sides[0].swapaxes(-1, -2)) * scale
            token, last = mx.arange(packed), mx.arange(Hq // H * L) % L
            end = packed + (window - L + 1 + last if causal else L + 0 * last)
            seen = (token >= hidden - first) & (token < end[:, None])
            scores = mx.where(seen, scores, -mx.inf)
            weights = mx.exp(scores - scores.max(axis=-1, keepdims=True))
            out.append((weights @ sides[1]) / weights.sum(axis=-1, keepdims=True))
        return (mx.stack(out),)

    return attend


def _decoded(state: method.KiviState, held: Mapping[str, mx.array], ids: list[int]) -> mx.array:
    """Pages of one row, (H, tokens, D) float32."""
    take = mx.array(ids, mx.int32)
    tile = {name: mx.take(a, take, axis=0) for name, a in held.items()}
    x = method.vq_decode(state, device.from_device(state, tile))
    return x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, x.shape[3])


def cases(k_bits: int, v_bits: int, D: int, V: int, count: int = COUNT, seed: int = 0) -> Iterator[Case]:
    """Rows of uneven lengths, empty ones among them, ragged last pages, tables, hidden tokens, all query lengths."""
    rng = np.random.default_rng(seed)
    keys, values = states(k_bits, v_bits, D, V)
    for i in range(count):
        R, L = RATIOS[i % 8], LENGTHS[(i + i // 8) % 8]
        B, H = (1, 2, 3)[i % 3], (2, 1)[i % 2]
        dtype = ("float16", "bfloat16")[i // 2 % 2]
        packed = [32 * int(n) for n in rng.integers(0 if i % 5 == 4 else 1, 20, B)]
        causal, first, regular = int(L > 1 or i % 3 == 0), (0, 4)[i % 2], int(i % 4 != 3)
        rows = []
        for n in packed:
            window = int(rng.integers(0, 2 * L)) if n > 32 else L
            hidden = int(rng.integers(0, 60)) if i % 6 == 5 and n > 96 else 0
            rows.append([n, first, window, int(rng.integers(0, 9)), hidden, 0, 0, 0])
        depth = max(1, -(-max(packed) // PAGE))
        table = np.arange(depth * B).reshape(depth, B).T
        if not regular:
            table = rng.permutation(depth * B).reshape(B, depth)
        arrays = [_pages(rng, state, B * depth, H, i) for state in (keys, values)]
        q = mx.array((rng.standard_normal((B, H * R, L, D)) * (1, 2)[i % 2]).astype(np.float32))
        tables = [mx.array(table.astype(np.int32))] * 2
        yield Case(
            (q.astype(getattr(mx, dtype)), mx.array(rows, mx.int32), *arrays[0], *arrays[1], *tables),
            {"scale_bits": scale_bits(D**-0.5), "causal": causal, "splits": 1 + i % 5, "exact_splits": 0,
             "folded": 0, "regular": regular},
            f"{i}: B {B}, H {H}, R {R}, L {L}, {dtype}, packed {packed}, rows {rows}, regular {regular}",
        )  # fmt: skip


def _pages(rng: np.random.Generator, state: method.KiviState, pages: int, heads: int, kind: int) -> list[mx.array]:
    """Fields of so many pages in device form: normal numbers, outlier channels, numbers far from zero."""
    x = rng.standard_normal((pages, heads, PAGE, state.head_dim))
    if kind % 3 == 1:
        x = x * np.where(np.arange(state.head_dim) % 17 == 3, 4, 1)
    if kind % 3 == 2 and state.side == "values":
        x = x + 5 * rng.standard_normal(state.head_dim)
    rows = method.vq_pack(state, method.vq_encode(state, mx.array(x.astype(np.float16))))
    return list(device.to_device(state, rows).values())
