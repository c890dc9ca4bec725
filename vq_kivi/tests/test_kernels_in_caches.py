"""A cache with kernels and one without hold the same bytes and read the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.errors import KernelError
from vq_core.testing.observe import assert_same, gaussian, snapshot
from vq_kivi.kernels import PACK, UNPACK
from vq_kivi.kernels.cases import numbers

PAIRS = [
    (bits, size, dtype)
    for bits in (2, 3, 4, 8)
    for size, dtype in ((32, "float16"), (64, "bfloat16"), (128, "float32"))
]


def pair(method: str, **options: Any) -> list[PackedKVCache]:
    """Caches without and with kernels; attention by one tier, for it is compared bit for bit."""
    options |= {"method": method, "attention": "mlx"}
    return [PackedKVCache(kernels="off", **options), PackedKVCache(kernels="simulator", **options)]


def one_nan(cache: PackedKVCache) -> dict[str, Any]:
    """A snapshot in which every NaN has the same bits: conversions to float16 do not promise which."""
    found = snapshot(cache)
    for row in found["stored"]:
        for name in row:
            if name.endswith(("scale", "zero")):
                numbers = row[name].view({2: np.float16, 4: np.float32}[row[name].itemsize])
                row[name] = np.where(np.isnan(numbers), np.nan, numbers).astype(numbers.dtype).view(row[name].dtype)
    return found


def same(caches: list[PackedKVCache], what: str) -> None:
    plain, quick = caches
    assert_same(snapshot(quick), snapshot(plain), what)
    assert_same(quick.decode(), plain.decode(), f"{what}, decoded")


def feed(caches: list[PackedKVCache], keys: mx.array, values: mx.array) -> None:
    made = [cache.update_and_fetch(keys, values) for cache in caches]
    for quick, plain in zip(made[1], made[0], strict=True):
        assert_same(mx.array(quick), mx.array(plain), "what an update returns")


@pytest.mark.parametrize(("bits", "size", "dtype"), PAIRS)
def test_the_life_of_a_cache(bits: int, size: int, dtype: str) -> None:
    """Chunks, single steps, sink tokens, a trim behind the frontier, rows, attention; ragged head sizes."""
    caches = pair(f"kivi:bits={bits},group_size={size}", residual=17, sink_tokens=3)
    keys, values = (gaussian((2, 2, 420, D), dtype, seed) for seed, D in ((1, 80), (2, 96)))
    begin = 0
    for n in (200, 1, 1, 150, 48):
        feed(caches, keys[:, :, begin : begin + n], values[:, :, begin : begin + n])
        begin += n
    same(caches, "fed")
    assert [cache.report().packed > 0 for cache in caches] == [True, True]
    for side in ("keys", "values"):
        lines = [line for line in caches[1].report().operations if line.startswith(side)]
        assert sum("(simulator)" in line for line in lines) == 3, lines
    assert [cache.trim(100) for cache in caches] == [100, 100]
    same(caches, "trimmed")
    feed(caches, keys[:, :, 300:], values[:, :, 300:])
    same(caches, "fed again")
    queries = gaussian((2, 4, 3, 80), dtype, 5)
    found = [cache.attend(queries, scale=0.1) for cache in caches]
    assert_same(found[1], found[0], "attention")
    again = copy.deepcopy(caches)
    assert again[1].policy.kernels == "simulator"
    feed(again, keys[:, :, :40], values[:, :, :40])
    same(again, "a copy")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("family", ["ties", "zeros", "constant", "extreme", "small", "nan"])
def test_hard_numbers(dtype: str, family: str) -> None:
    """Also those for which a bfloat16 model's scales are kept in float32 from some flush on."""
    rng = np.random.default_rng(3)
    caches = pair("kivi:bits=3", residual=0)
    first, rest = (
        gaussian((1, 2, 96, 64), dtype),
        [numbers(rng, (1, 2, 96, 64), s, family, dtype, 3, 32) for s in ("keys", "values")],
    )  # type: ignore[arg-type]
    feed(caches, first, first)
    feed(caches, rest[0], rest[1])
    if family == "nan":
        assert_same(one_nan(caches[1]), one_nan(caches[0]), "nan")
        for got, want in zip(caches[1].decode(), caches[0].decode(), strict=True):
            assert mx.array_equal(got, want, equal_nan=True) and mx.isnan(want).any()
    else:
        same(caches, family)
    widened = {a.dtype for a in caches[1].state[1:] if a.dtype == mx.float32}
    assert bool(widened) == (dtype == "float32" or (family, dtype) == ("extreme", "bfloat16"))


def test_a_cache_keeps_its_kernels_out_of_its_state() -> None:
    """What is stored does not depend on them, so a state is read on any machine."""
    plain, quick = pair("kivi:bits=4", residual=0)
    x = gaussian((1, 2, 64, 64))
    for cache in (plain, quick):
        cache.update_and_fetch(x, x)
    assert plain.state[0] == quick.state[0]
    assert PackedKVCache.from_state(quick.state).policy.kernels == "auto"


def test_every_flush_goes_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the probe: what runs is counted."""
    from vq_core.kernels.simulated import Simulated

    launched: list[str] = []
    run = Simulated.run

    def counted(self: Simulated, kernel: Any, *rest: Any) -> Any:
        launched.append(kernel.name)
        return run(self, kernel, *rest)

    monkeypatch.setattr(Simulated, "run", counted)
    _, quick = pair("kivi:bits=4", residual=0)
    x = gaussian((1, 2, 64, 112))
    quick.prepare_for(kv_heads=2, key_dim=112, value_dim=112, dtype=x.dtype)
    del launched[:]
    for _ in range(3):
        quick.update_and_fetch(x, x)
        mx.eval(quick.state[1:])
    names = [kernel.name for kernel in PACK.values()]
    assert [name for name in launched if name in names] == names * 3
    quick.decode()
    assert {kernel.name for kernel in UNPACK.values()} <= set(launched)


def test_a_kernel_that_fails_later_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from vq_core.kernels.simulated import Simulated

    _, quick = pair("kivi:bits=4", residual=0)
    x = gaussian((1, 2, 64, 64))
    quick.update_and_fetch(x, x)
    before, error = snapshot(quick), KernelError("kernel 'kivi_pack_values', line 3: lost")

    def lost(self: Simulated, kernel: Any, *rest: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Simulated, "run", lost)
        with pytest.raises(KernelError, match="line 3: lost"):
            quick.update_and_fetch(x, x)
    assert_same(snapshot(quick), before, "after the error")
    quick.update_and_fetch(x, x)
    assert quick.offset == 128
