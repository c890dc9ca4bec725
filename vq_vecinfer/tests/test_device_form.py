"""Caches that hold VecInfer's codes in device form: they store and give what canonical ones do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache, UnsupportedShapeError
from vq_core.attention.packed import attend
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.state import describe, rebuild
from vq_core.calibration.stand_in import completed
from vq_core.kernels.verify import same_bits

FORM = "vecinfer_m16n8k16"
HEADS, DIM = 2, 64
TEXT = "vecinfer:sub=8,centroids=256"
NAMES = ("method", "keys", "values")


def cache(device: bool = True, **rest: Any) -> PackedKVCache:
    given: dict[str, Any] = {"method": TEXT, "residual": 32, "kernels": "simulator"} | rest
    given |= {name: completed(given[name], [(HEADS, DIM)]) for name in NAMES if given.get(name)}
    return PackedKVCache.from_policy(LayerPolicy.make(**given), device_form=device)


def tokens(n: int, rows: int = 1, seed: int = 0, dtype: Any = mx.float16) -> tuple[mx.array, mx.array]:
    x = np.random.default_rng(seed + n).standard_normal((2, rows, HEADS, n, DIM)).astype(np.float32)
    return mx.array(x[0]).astype(dtype), mx.array(x[1]).astype(dtype)


def twins(chunks: Sequence[int], rows: int = 1, dtype: Any = mx.float16, **rest: Any) -> list[PackedKVCache]:
    """A cache in device form and one in canonical order, filled alike."""
    made = [cache(True, **rest), cache(False, **rest)]
    for seed, n in enumerate(chunks):
        for one in made:
            one.update_and_fetch(*tokens(n, rows, seed, dtype))
    return made


def assert_alike(ours: PackedKVCache, theirs: PackedKVCache) -> None:
    """What they save, byte for byte; what they decode; what they count."""
    (a, mine), (b, plain) = describe(ours), describe(theirs)
    assert json.dumps(a) == json.dumps(b) and list(mine) == list(plain)
    assert all(mine[n].dtype == plain[n].dtype and same_bits(mine[n], plain[n]) for n in plain)
    assert all(same_bits(x, y) for x, y in zip(ours.decode(), theirs.decode(), strict=True))
    assert ours.nbytes == theirs.nbytes
    counted, wanted = (one.report().bytes for one in (ours, theirs))
    if ours._history is not None and any(held(ours)):  # tensor cores' codebooks are constants of their own
        sides = [side.held.matrix for side in ours._history.bound.values() if side.held is not None]
        wanted = attrs.evolve(wanted, constants=wanted.constants + sum(nbytes(side.constants) for side in sides))
    assert counted == wanted


def nbytes(arrays: Mapping[str, mx.array]) -> int:
    return sum(a.nbytes for a in arrays.values())


def held(one: PackedKVCache) -> list[str]:
    assert one._history is not None
    return [side.held.form.name if side.held else "" for side in one._history.bound.values()]


@pytest.mark.parametrize(
    "methods",
    [{}, {"method": f"{TEXT},codebooks=subspace"}, {"method": None, "keys": TEXT, "values": "kivi:bits=2"}],
    ids=["shared", "places", "beside kivi"],
)
def test_filled_in_any_chunks_it_saves_the_same_bytes(methods: dict[str, Any]) -> None:
    for chunks in ([300], [7, 90, 1, 1, 64, 130]):
        ours, theirs = twins(chunks, **methods)
        assert held(ours)[0] == FORM and all(held(ours)) and held(theirs) == ["", ""]
        assert_alike(ours, theirs)
    assert ours.trim(133) == theirs.trim(133) == 133
    for one in (ours, theirs):
        one.update_and_fetch(*tokens(70, seed=5))
    assert_alike(ours, theirs)


def test_rows_selected_joined_and_loaded() -> None:
    ours, theirs = twins([150], rows=2, sink_tokens=4)
    others = twins([290], rows=1, sink_tokens=4)
    joined = [PackedKVCache.join([a, b]) for a, b in zip((ours, theirs), others, strict=True)]
    assert_alike(*joined)
    assert_alike(*[one.select([2, 0]) for one in joined])
    back = cache(True, sink_tokens=4)
    rebuild(back, *describe(joined[0]))
    assert_alike(back, joined[1])


def test_all_tiers_answer_alike_and_the_report_says_which() -> None:
    """On pages in device form: tensor cores, the portable kernels for masks that are arrays, plain operations."""
    one = twins([301], attention="matrix")[0]
    q = mx.array(np.random.default_rng(3).standard_normal((1, 8, 3, DIM)).astype(np.float16))
    causal = mx.arange(301)[None] <= mx.arange(298, 301)[:, None]
    given: tuple[tuple[str, Any], ...] = (
        ("reference", "causal"), ("matrix", "causal"), ("kernel", "causal"), ("auto", causal), ("mlx", "causal"),
    )  # fmt: skip
    outs = [np.array(attend(one._view(), q, scale=0.125, mask=m, tier=t)).astype(np.float32) for t, m in given]
    for (tier, _), out in zip(given, outs, strict=True):
        assert np.linalg.norm(out - outs[0]) < 2e-3 * np.linalg.norm(outs[0]), tier
    assert np.array_equal(outs[2], outs[3]) and not np.array_equal(outs[1], outs[2])
    report = one.report()
    assert report.attention.startswith(
        "matrix (simulator): attend_matrix_vecinfer1_k64_vecinfer1_v64_float16; masks that are arrays by the kernel"
    )
    said = [line for line in report.operations if f"device: {FORM} (" in line]
    assert len(said) == 2 and all("vecinfer_device_pack_keys" in line for line in said)
    with pytest.raises(UnsupportedShapeError, match="masks that are arrays are not for tensor cores"):
        one.attend(q, scale=0.125, mask=causal)


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [({"method": "vecinfer:sub=4,centroids=256"}, "float16", "codes of 8 bits for 4 channels"),
     ({"method": f"{TEXT},mean=true"}, "float16", "mean=true"), ({"kernels": "off"}, "float16", "kernels='off'"),
     ({"method": None, "keys": TEXT, "values": "kivi:bits=3"}, "float16", "the other side has none"),
    ],
)  # fmt: skip
def test_the_reason_stands_in_the_report(changes: dict[str, Any], dtype: str, said: str) -> None:
    ours, theirs = twins([150], dtype=getattr(mx, dtype), **changes)
    assert held(ours) == ["", ""]
    lines = [line for line in ours.report().operations if ".device: canonical order" in line]
    assert len(lines) == 2 and any(said in line for line in lines), lines
    assert_alike(ours, theirs)
