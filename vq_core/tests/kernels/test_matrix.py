"""Matrix products, turned tiles and asynchronous copies in the simulator: values, fragment maps, and the rules."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels import Kernel, Output
from vq_core.kernels.golden import differences, write
from vq_core.kernels.simulator import Program, SimulatorError, run

from .probe import BARRIER
from .toys import times

ONE: dict[str, Any] = {"threadgroups": (1, 1, 1), "threads": (32, 1, 1)}
GROUP_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

PRODUCT = """
const uint lane = thread_index_in_simdgroup, g = lane / 4u, t = lane & 3u;
const uint a0 = a[g * 8u + t], a1 = a[(g + 8u) * 8u + t], a2 = a[g * 8u + t + 4u], a3 = a[(g + 8u) * 8u + t + 4u];
const uint b0 = b[g * 8u + t], b1 = b[g * 8u + t + 4u];  // the columns of b, one after another
const uint top = g * 8u + 2u * t, low = top + 64u;
float4 d = vq_float4(c[top], c[top + 1u], c[low], c[low + 1u]);
d = vq_mma_m16n8k16(d, a0, a1, a2, a3, b0, b1);
y[g * 8u + 2u * t] = d.x;
y[g * 8u + 2u * t + 1u] = d.y;
y[(g + 8u) * 8u + 2u * t] = d.z;
y[(g + 8u) * 8u + 2u * t + 1u] = d.w;
"""


def product(a: Any, b: Any, c: Any, body: str = PRODUCT, **options: Any) -> Any:
    """a (16, 16), b (16, 8), c (16, 8): a b + c."""
    program = Program("product", body, {"a": "uint32", "b": "uint32", "c": "float32"}, {"y": "float32"})
    given = {"a": a.view(np.uint32), "b": np.ascontiguousarray(b.T).view(np.uint32), "c": c}
    return run(program, {}, given, {"y": ((16, 8), "float32")}, **ONE, **options)["y"]


def numbers(seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    return a, b, rng.standard_normal((16, 8)).astype(np.float32)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("contract", ["off", "fast"])
def test_a_product_is_numpy_s(seed: int, contract: Any) -> None:
    a, b, c = numbers(seed)
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    got = product(a, b, c, seed=seed, contract=contract)
    assert np.abs(got - want).max() < 17 * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(c)).max()


def test_a_product_of_bfloats() -> None:
    a, b, c = numbers(7)
    a, b = ((x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a * 1000, b))
    body = PRODUCT.replace("b0, b1);", "b0, b1, bfloat(0.0f));")
    wide = [(x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b)]
    assert np.allclose(product(a, b, c, body), wide[0] @ wide[1] + c, rtol=1e-5, atol=1e-2)
    assert np.allclose(wide[0], numbers(7)[0].astype(float) * 1000, rtol=2**-7), "the numbers that were meant"


def test_each_number_of_a_product_has_its_place() -> None:
    """Whole numbers that no two places share: exact, so that a single swap shows."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        a, b = (rng.integers(-40, 41, s).astype(np.float16) for s in ((16, 16), (16, 8)))
        c = rng.integers(-1000, 1000, (16, 8)).astype(np.float32)
        assert np.array_equal(product(a, b, c), a.astype(np.float32) @ b.astype(np.float32) + c)


@pytest.mark.parametrize(
    ("old", "new"),
    [("a1, a2", "a2, a1"), ("b0, b1)", "b1, b0)"), ("a[g * 8u + t], a1", "a[g * 8u + (t ^ 1u)], a1"),
     ("= d.y", "= d.z"), ("uint g = lane / 4u", "uint g = lane & 7u"), ("t + 4u], a3", "t], a3")],
)  # fmt: skip
def test_a_wrong_fragment_map_is_seen(old: str, new: str) -> None:
    a, b, c = numbers(1)
    body = PRODUCT.replace("lane = thread_index_in_simdgroup, g = lane / 4u, t",
                           "lane = thread_index_in_simdgroup; const uint g = lane / 4u, t")  # fmt: skip
    assert old in body
    want = a.astype(np.float32) @ b.astype(np.float32) + c
    try:
        got = product(a, b, c, body.replace(old, new))
    except SimulatorError as error:
        assert error.kind in ("written_twice", "unwritten")
    else:
        assert np.abs(got - want).max() > 0.1


def test_small_halves_are_exact() -> None:
    """A code at the last bits of a half is code * 2^-24."""
    codes = np.arange(256, dtype=np.uint16).reshape(16, 16)
    b = np.zeros((16, 8), np.float16)
    b[np.arange(8), np.arange(8)] = 1
    c = np.zeros((16, 8), np.float32)
    assert np.array_equal(product(codes.view(np.float16), b, c), codes[:, :8] * np.float32(2.0**-24))
    assert np.array_equal(product((codes << 2).view(np.float16), b, c), codes[:, :8] * np.float32(2.0**-22))


def test_nan_stays_in_its_row_and_column() -> None:
    a, b, c = numbers(2)
    a[3, 5] = np.nan
    got = product(a, b, c)
    assert np.isnan(got[3]).all() and np.isfinite(np.delete(got, 3, 0)).all()
    a, b, c = numbers(2)
    b[9, 6] = np.inf
    got = product(a, b, c)
    assert not np.isfinite(got[:, 6]).any() and np.isfinite(np.delete(got, 6, 1)).all()


def test_a_tile_is_turned() -> None:
    body = "const uint lane = thread_index_in_simdgroup;\ny[lane] = vq_transpose_8x8(x[lane]);"
    tile = np.random.default_rng(0).integers(0, 2**16, (8, 8)).astype(np.uint16)
    program = Program("turn", body, {"x": "uint32"}, {"y": "uint32"})
    got = run(program, {}, {"x": tile.view(np.uint32).reshape(32)}, {"y": ((32,), "uint32")}, **ONE)["y"]
    assert np.array_equal(got.view(np.uint16).reshape(8, 8), tile.T)


def test_pairs_of_halves_and_powers_of_two() -> None:
    body = """
const uint lane = thread_index_in_simdgroup;
y[lane] = vq_half_pair(x[2u * lane], x[2u * lane + 1u]);
z[lane] = vq_exp2_fast(x[lane]);
w[lane] = vq_bfloat_pair(x[2u * lane], x[2u * lane + 1u]);
"""
    x = (np.random.default_rng(0).standard_normal(64) * 20).astype(np.float32)
    x[:5] = [-200, -np.inf, 0, 1, -125]
    program = Program("pairs", body, {"x": "float32"}, {"y": "uint32", "z": "float32", "w": "uint32"})
    wanted = {"y": ((32,), "uint32"), "z": ((32,), "float32"), "w": ((32,), "uint32")}
    got = run(program, {}, {"x": x}, wanted, **ONE)
    assert np.array_equal(got["w"].view(np.uint16), np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16)))
    assert np.array_equal(got["y"].view(np.float16), x.astype(np.float16))
    assert np.array_equal(got["z"][:3], [0, 0, 1]) and np.allclose(got["z"], np.exp2(x[:32]), rtol=1e-6, atol=2e-38)


@pytest.mark.parametrize("contract", ["off", "fast"])
def test_bytes_are_looked_up(contract: Any) -> None:
    """Each nibble of the selector by itself; what lies above the last four is not looked at."""
    body = "const uint lane = thread_index_in_simdgroup;\ny[lane] = vq_permute(x[lane], x[32u + lane], x[64u + lane]);"
    x = np.random.default_rng(1).integers(0, 2**32, 96, dtype=np.uint64).astype(np.uint32)
    x[64:80] = np.arange(16) * 0x1111
    program = Program("permute", body, {"x": "uint32"}, {"y": "uint32"})
    got = run(program, {}, {"x": x}, {"y": ((32,), "uint32")}, contract=contract, **ONE)["y"]
    for lane, found in enumerate(got.tolist()):
        bytes_ = [*int(x[lane]).to_bytes(4, "little"), *int(x[32 + lane]).to_bytes(4, "little")]
        nibbles = [int(x[64 + lane]) >> 4 * i & 15 for i in range(4)]
        want = [bytes_[n] if n < 8 else 255 * (bytes_[n - 8] >> 7) for n in nibbles]
        assert list(found.to_bytes(4, "little")) == want


# ---- the rules hold through them


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        ("if (lane < 16u) a = vq_mma_m16n8k16(vq_float4(a, a, a, a), 0u, 0u, 0u, 0u, 0u, 0u).x;", "divergence",
         "vq_mma_m16n8k16"),
        ("if (lane != 3u) n = vq_transpose_8x8(n);", "divergence", "vq_transpose_8x8"),
        ("for (uint k = 0; k < 4u; ++k) { if ((lane ^ k) & 1u) n = vq_transpose_8x8(n); }", "divergence",
         "in another round of a loop"),
        ("for (uint k = 0; k < 4u; ++k) { if ((lane ^ k) & 1u) a += turned(n); }", "divergence", "another"),
    ],
)  # fmt: skip
def test_all_lanes_come(lines: str, kind: str, said: str) -> None:
    before = "const uint lane = thread_index_in_simdgroup;\nuint n = lane;\nfloat a = 0.0f;\n"
    body = f"{before}{lines}\ny[lane] = a + float(n);"
    header = "VQ_FN float turned(uint n) { return float(vq_transpose_8x8(n)); }"
    program = Program("together", body, {"x": "float32"}, {"y": "float32"}, {}, header)
    for seed in range(3):
        with pytest.raises(SimulatorError, match=said) as caught:
            run(program, {}, {"x": np.zeros(8, np.float32)}, {"y": ((32,), "float32")}, **ONE, seed=seed)
        assert caught.value.kind == kind


COPY = f"""
VQ_SHARED(uint, s, 512);
const uint lane = thread_index_in_simdgroup, t = thread_index_in_threadgroup;
vq_copy_async(vq_view<uint4>(s) + t, vq_view<uint4>(x) + t);
vq_copy_commit();
vq_copy_async(vq_view<uint4>(s) + t, vq_view<uint4>(x) + t, 64);
vq_copy_commit();
vq_copy_wait<1>();
{BARRIER}
y[t] = s[4u * (t ^ 9u)];
vq_copy_wait<0>();
{BARRIER}
y[t + 64u] = s[256u + 4u * (t ^ 9u)];
"""


def copied(body: str, seed: int = 0, count: int = 512) -> Any:
    program = Program("copy", body, {"x": "uint32"}, {"y": "uint32"})
    x = np.arange(count, dtype=np.uint32)
    one: dict[str, Any] = {"threadgroups": (1, 1, 1), "threads": (64, 1, 1), "seed": seed}
    return run(program, {}, {"x": x}, {"y": ((128,), "uint32")}, **one)["y"]


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_is_there_after_wait_and_barrier(seed: int) -> None:
    place = 4 * (np.arange(64) ^ 9)
    assert np.array_equal(copied(COPY, seed), np.concatenate([place, 256 + place]))


@pytest.mark.parametrize(
    ("old", "new", "kind", "said"),
    [
        ("vq_copy_wait<1>();", "", "copy_unfinished", "that it has not waited for"),
        ("vq_copy_wait<1>();", "vq_copy_wait<2>();", "copy_unfinished", "vq_copy_wait"),
        ("vq_copy_wait<0>();", "vq_copy_wait<1>();", "copy_unfinished", "s[2"),
        ("vq_copy_commit();\nvq_copy_wait<1>();", "vq_copy_wait<0>();", "copy_unfinished", "vq_copy_commit"),
        (f"vq_copy_wait<1>();\n{BARRIER}", "vq_copy_wait<1>();", "(race|shared_unwritten)", "barrier"),
        (f"vq_copy_wait<0>();\n{BARRIER}", "vq_copy_wait<0>();", "(race|copy_unfinished)", "barrier"),
        (f"vq_copy_wait<0>();\n{BARRIER}", f"{BARRIER}\nvq_copy_wait<0>();", "(race|copy_unfinished)", "barrier"),
        ("vq_copy_wait<1>();", "s[4u * t] = 1u;\nvq_copy_wait<1>();", "copy_unfinished", "has not waited"),
        (
            "(s) + t, vq_view<uint4>(x) + t, 64",
            "(s) + (t + 1u), vq_view<uint4>(x) + t, 64",
            "shared_outside",
            "which has 512 elements",
        ),
        ("(x) + t, 64", "(x) + t + 1, 64", "read_outside", "Missing bound check"),
        (
            "(s) + t, vq_view<uint4>(x) + t, 64",
            "(s) + t / 2u, vq_view<uint4>(x) + t, 64",
            "(race|copy_unfinished)",
            "threadgroup memory s",
        ),
    ],
)
def test_a_copy_not_waited_for_is_seen(old: str, new: str, kind: str, said: str) -> None:
    assert old in COPY
    for seed in range(4):
        with pytest.raises(SimulatorError) as caught:
            copied(COPY.replace(old, new, 1), seed)
        assert re.fullmatch(kind, caught.value.kind) and said in str(caught.value), caught.value


def test_too_many_copies_are_told() -> None:
    body = COPY.replace("vq_copy_commit();", "for (uint k = 0u; k < 300u; ++k) vq_copy_async(vq_view<uint4>(s) + t, "
                        "vq_view<uint4>(x) + t);", 1)  # fmt: skip
    with pytest.raises(SimulatorError) as caught:
        copied(body)
    assert caught.value.kind in ("copies_many", "copy_unfinished")


# ---- kernels that Metal does not have

LARGE = """
VQ_DYNAMIC(uint, ring);
const uint t = thread_index_in_threadgroup;
for (uint i = t; i < 24576u; i += 64u) ring[i] = x[i & 63u];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[t] = ring[24575u - t];
"""


def large(**changes: Any) -> Kernel:
    declared: dict[str, Any] = {
        "name": "large", "body": LARGE, "inputs": {"x": "uint32"},
        "outputs": {"y": Output("uint32", lambda call: (64,))},
        "threads": lambda call: (64, 1, 1), "threadgroups": lambda call: (1, 1, 1),
        "equals": lambda x, **rest: (x[::-1],), "cases": lambda: [],
        "backends": ("cuda", "simulator"), "dynamic_bytes": 98304,
    }  # fmt: skip
    return Kernel(**declared | changes)


def test_more_threadgroup_memory_than_every_device_has() -> None:
    x = mx.arange(64, dtype=mx.uint32)
    assert large()(x, backend="simulator")[0].tolist() == list(range(63, -1, -1))
    with pytest.raises(Exception, match=r"ring\[\d+\], which has 24572 elements"):
        large(dynamic_bytes=98288)(x, backend="simulator")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"backends": ("metal", "cuda")}, "VQ_DYNAMIC, which Metal has not: give backends="),
        ({"backends": ()}, "give one or more of metal, cuda, simulator"),
        ({"backends": ("rocm",)}, "give one or more of metal, cuda, simulator"),
        ({"dynamic_bytes": 0}, "names VQ_DYNAMIC 1 times and dynamic_bytes is 0"),
        ({"dynamic_bytes": 100}, "a multiple of 16"),
        ({"dynamic_bytes": 1 << 20}, "up to 163840"),
        (
            {"body": LARGE.replace("ring[24575u - t]", "vq_half_pair(0.0f, 1.0f)"), "backends": ("metal",)},
            "Metal has not",
        ),
    ],
)
def test_a_declaration_that_no_device_takes(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        large(**changes)


def test_another_backend_is_refused(tmp_path: Any) -> None:
    class Metal:
        backend = "metal"

        def run(self, *args: Any) -> Any:
            raise AssertionError("it was launched")

    with pytest.raises(UnsupportedShapeError, match="large runs on cuda, simulator, not on metal"):
        large().run_on(Metal(), mx.arange(64, dtype=mx.uint32))
    with pytest.raises(UnsupportedShapeError, match="times runs on metal, not on simulator"):
        times(backends=("metal",))(mx.zeros(8), count=8, by=1, backend="simulator")
    write([large()], tmp_path)
    assert list(tmp_path.iterdir()) == [] and differences([large()], tmp_path) == []
