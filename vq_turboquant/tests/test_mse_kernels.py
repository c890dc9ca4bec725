"""turboquant_mse's kernels: bit-identical to the plain functions in every configuration, contraction off and on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import SIDES, PrepareContext, UnsupportedShapeError
from vq_core.codec.bits import unpack_bits
from vq_core.kernels.verify import same_bits
from vq_core.plugins.binding import bind
from vq_core.testing import KernelParity, SnippetConformance
from vq_core.testing.kit import decode, feed, pack
from vq_turboquant.kernels import mse as kernels
from vq_turboquant.kernels.mse import KERNELS, PACK, UNPACK
from vq_turboquant.kernels.mse_cases import FAMILIES, packing_cases
from vq_turboquant.kernels.mse_reference import packed, part_from

GOLDEN = Path(__file__).parent / "golden_mse"
by_rotation = pytest.mark.parametrize("dense", [False, True], ids=["hadamard", "haar"])


class TestParity(KernelParity):
    """All configurations with one order of lanes and threadgroups for each contraction, 24 with the other."""

    kernels = KERNELS
    configurations = 90
    golden = (("turboquant_mse", GOLDEN),)


# ---- what the configurations hold


@by_rotation
def test_what_families_are_for_is_in_them(dense: bool) -> None:
    """Counted with the plain functions: numbers on edges, zero vectors, scales that float16 cannot hold, ..."""
    seen: dict[str, Counter[Any]] = {family: Counter() for family in FAMILIES}
    everywhere = Counter[Any]()
    for case in packing_cases(dense):
        x, channels, table, turning = case.inputs
        bits, mode, has = case.parameters["bits"], case.parameters["mode"], seen[case.name.split(",")[0]]
        part = part_from(channels, bits, table, turning, dense, back=False)
        everywhere.update([x.dtype, ("bits", bits), ("mode", mode), ("D", part.dim), case.parameters["M"]])
        everywhere.update([("some channels", part.dim < x.shape[-1])])
        has.update([("mode", mode), ("bits", bits), x.dtype])
        words, scale = packed(dense, x, channels, table, turning, **case.parameters)
        v = np.array(mx.take(x, channels, axis=-1).astype(mx.float32))
        with np.errstate(all="ignore"):
            norm = np.sqrt(np.square(v).sum(axis=-1, keepdims=True))
            has["zero vectors"] += int((norm == 0).sum())
            has["no number"] += int(np.isnan(norm).sum())
            has["infinite norm"] += int((np.isinf(norm) & np.isfinite(v).all(axis=-1, keepdims=True)).sum())
            size = np.array(scale.astype(mx.float32))
            has["cut to float16"] += int((size == 65504).sum())
            has["scale is 0"] += int(((size == 0) & (norm > 0)).sum())
            y = np.array(part.rotation.rotate(mx.array(v / np.where(norm > 0, norm, 1))))
            has["on an edge"] += int(sum((y == np.float32(edge)).sum() for edge in part.edges))
            has["numbers"] += y.size
        assert not np.array(unpack_bits(words, bits))[..., part.dim :].any(), "what fills up words is zero"
    assert {mx.float32, mx.float16, mx.bfloat16, "float16", "float32", ("some channels", True)} <= set(everywhere)
    assert {("bits", b) for b in (1, 2, 3, 4)} | {("mode", m) for m in range(3)} <= set(everywhere)
    assert {("D", d) for d in ((64, 80, 100, 128, 256) if dense else (64, 80, 96, 112, 128, 192, 256))} <= set(
        everywhere
    )
    for family in FAMILIES:
        assert {("mode", m) for m in range(3)} <= set(seen[family]), family
    assert seen["ties"]["on an edge"] > 0.3 * seen["ties"]["numbers"]
    assert seen["zeros"]["zero vectors"] > 10 and seen["nan"]["no number"] > 10
    assert seen["extreme"]["infinite norm"] > 10 and seen["small"]["scale is 0"] > 0
    assert seen["extreme"]["cut to float16"] + seen["ties"]["cut to float16"] > 0


# ---- in the place of the hooks


@pytest.mark.parametrize(("text", "dim", "dtype"), [
    ("bits=2.5", 128, "float16"), ("bits=3.5,rotation=haar,mean=first", 128, "bfloat16"), ("bits=3", 80, "float16"),
    ("bits=1,mean=first", 96, "float16"), ("bits=4,rotation=haar,scale=raw", 64, "float32"),
    ("bits=3", 100, "float32"),
])  # fmt: skip
def test_kernels_serve_what_hooks_give(text: str, dim: int, dtype: str) -> None:
    """Fractional bits, a mean, words that are filled up: bound with kernels, the same bits are stored and read."""
    for side in SIDES:
        ctx = PrepareContext(side, 2, dim, dim, dtype)
        plain, quick = (bind(f"turboquant_mse:{text}", ctx, "error", kernels) for kernels in ("off", "simulator"))
        said = [one.implementation for one in quick.operations]
        assert sum("(simulator)" in one for one in said) >= 2, said
        x = np.random.default_rng(dim).standard_normal((2, 2, 64, dim)) + 2
        x[0, 1, 5], x[1, 0, 40] = 0, np.nan
        given = mx.array(x.astype(np.float32)).astype(getattr(mx, dtype))
        want, got = pack(plain, given), pack(quick, given)
        assert all(same_bits(got[name], want[name]) for name in want)
        assert same_bits(decode(quick, want, 64), decode(plain, want, 64))


FUSED = {
    "bits=1": (64, "float16"), "bits=3": (80, "float16"), "bits=4,rotation=haar": (96, "bfloat16"),
    "bits=2.5": (128, "float16"), "bits=3.5,mean=first": (128, "float32"), "bits=2,mean=first": (256, "float16"),
}  # fmt: skip


@pytest.mark.parametrize("text", FUSED)
def test_fused_attention_of_every_width(text: str) -> None:
    """One and four query heads, window and first tokens, against attention over what is decoded."""
    kit, (dim, dtype) = SnippetConformance(), FUSED[text]
    cache = PackedKVCache(
        method=f"turboquant_mse:{text}", kernels="simulator", attention="kernel", residual=24, sink_tokens=3
    )
    rng = np.random.default_rng(dim)
    tokens = [mx.array(rng.standard_normal((2, 2, 170, dim)).astype(np.float32) + 1) for _ in SIDES]
    feed(cache, (tokens[0].astype(getattr(mx, dtype)), tokens[1].astype(getattr(mx, dtype))), [169, 1])
    assert cache.report().packed >= 128 and cache.report().attention.startswith("kernel (simulator)")
    kit.check_fused(cache, dtype, (4, 1, "none", True), text)


# ---- limits


@by_rotation
def test_what_a_kernel_is_not_for_is_refused(dense: bool) -> None:
    x, channels, table = mx.zeros((1, 2, 3, 64)), mx.arange(64, dtype=mx.uint32), mx.zeros(32)
    turning = mx.zeros((64, 64)) if dense else mx.ones((2, 64))
    given = {"bits": 2, "words": 4, "mode": 1, "rows": 6, "M": "float32", "backend": "simulator"}
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x, channels, table, turning), {"bits": 5}, "codes of 5 bits: accepted are 1 to 4"),
        ((x, channels, table, turning), {"bits": 0}, "codes of 0 bits: accepted are 1 to 4"),
        ((x, channels, table, turning), {"mode": 3}, "mode 3: accepted are 0 to 2, for raw, matched, unbiased"),
        ((x, channels, table, turning), {"rows": 7}, "holds 6 vectors, rows is 7"),
        ((x, channels, table, turning), {"words": 3}, "64 codes of 2 bits do not take 3 words"),
        ((x, channels, table, turning), {"words": 6}, "64 codes of 2 bits do not take 6 words"),
        ((x.astype(mx.float16), channels, table, turning), {}, "scales of float16 numbers are float16, not float32"),
        ((x.astype(mx.int32), channels, table, turning), {}, "T 'int32' is not accepted"),
        ((x[..., :63], channels, table, turning), {}, "must be some of x"),
        ((x, channels, table[:16], turning), {}, r"table \(16,\) must be \(32,\)"),
        ((x, channels, table, turning[..., :32]), {}, "must be"),
        ((mx.broadcast_to(mx.zeros((1, 1, 1, 64)), (2**10, 2**10, 32, 64)), channels, table, turning),
         {"rows": 2**25}, "fewer than 2147483648 elements are accepted"),
    ]  # fmt: skip
    for arrays, changes, said in bad:
        with pytest.raises(UnsupportedShapeError, match=said):
            PACK[dense](*arrays, **given | changes)
    codes, scale = mx.zeros((1, 2, 3, 4), mx.uint32), mx.zeros((1, 2, 3, 1))
    given = {"bits": 2, "d": 64, "rows": 6, "backend": "simulator"}
    bad = [
        ((codes, scale[:, :1], table, turning), {}, "must be"),
        ((codes, scale, table, turning), {"d": 65}, "4 words hold no 65 codes|must be|size 65"),
        ((codes, scale, table, turning), {"bits": 3}, "4 words hold no 64 codes of 3 bits"),
        ((codes, scale, table, turning), {"d": 1024}, "vectors of 1024 numbers: accepted are 1 to 512"),
        ((codes, scale, table, turning), {"rows": 5}, "holds 6 vectors, rows is 5"),
    ]
    for arrays, changes, said in bad:
        with pytest.raises(UnsupportedShapeError, match=said):
            UNPACK[dense](*arrays, **given | changes)


@by_rotation
def test_no_tokens_are_fine(dense: bool) -> None:
    text, ctx = (
        "turboquant_mse:rotation=" + ("haar" if dense else "hadamard"),
        PrepareContext("keys", 2, 64, 64, "float16"),
    )
    state = bind(text, ctx, kernels="off").state
    found = kernels.pack(state, mx.zeros((1, 2, 0, 64), mx.float16), {}, "simulator")
    assert found["codes"].shape == (1, 2, 0, 8) and found["scale"].shape == (1, 2, 0, 1)
    assert kernels.unpack(state, found, "simulator").shape == (1, 2, 0, 64)
