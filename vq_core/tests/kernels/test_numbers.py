"""Numbers of the dialect against numpy: half and bfloat, rounding, bits, elementary functions, private arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vq_core.kernels.simulator import Program, build, run

from .demonstration import carried, to_bfloat, widened

Array = np.ndarray[Any, Any]
ONE_TO_ONE = "const uint i = thread_position_in_grid.x, n = uint(x_shape[0]);\n"


def mapped_program(expression: str, dtypes: dict[str, str], out: str) -> Program:
    body = f"{ONE_TO_ONE}if (i < n) {{ y[i] = {expression}; }}"
    return Program("mapped", body, dtypes, {"y": out})


def mapped(expression: str, inputs: dict[str, Array], dtypes: dict[str, str], out: str, **options: Any) -> Array:
    """``expression`` of ``x[i]`` and the other inputs, at each i."""
    program = mapped_program(expression, dtypes, out)
    n = len(inputs["x"])
    grid = {"threadgroups": (-(-n // 256), 1, 1), "threads": (256, 1, 1)}
    return run(program, {}, inputs, {"y": ((n,), out)}, **grid, **options)["y"]


def mapped_one(expression: str, x: Array, dtype: str = "float32", out: str = "float32", **options: Any) -> Array:
    return mapped(expression, {"x": x}, {"x": dtype}, out, **options)


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.fixture(scope="module")
def floats() -> Array:
    """All magnitudes, ties of both short formats, both zeros, infinities, subnormals."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    random = bits.view(np.float32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:31744:7].view(np.uint32) + np.uint32(0x1000)).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 2**-24, 2**-25, 1e-45], np.float32)
    every = np.concatenate([random, ties, -ties, special])
    return every[~np.isnan(every)]


def test_half_both_ways(floats: Array) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert same_bits(mapped_one("float(x[i])", every, "float16"), every.astype(np.float32))
    with np.errstate(over="ignore"):
        assert same_bits(mapped_one("half(x[i])", floats, out="float16"), floats.astype(np.float16))


def test_bfloat_both_ways(floats: Array) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    assert same_bits(mapped_one("float(x[i])", every, "bfloat16"), widened(every))
    assert same_bits(mapped_one("bfloat(x[i])", floats, out="bfloat16"), to_bfloat(floats))
    nan = np.array([np.nan, -np.nan], np.float32)
    assert np.isnan(widened(mapped_one("bfloat(x[i])", nan, out="bfloat16"))).all()
    assert np.isnan(mapped_one("half(x[i])", nan, out="float16")).all()


@pytest.mark.parametrize("contract", ["off", "fast"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_round_after_every_operator(dtype: str, contract: Any) -> None:
    rng = np.random.default_rng(4)
    a, b, c = (carried(rng.standard_normal(3000) * 8, dtype) for _ in range(3))
    inputs, dtypes = {"x": a, "b": b, "c": c}, {"x": dtype, "b": dtype, "c": dtype}
    wide = [widened(v) for v in (a, b, c)]

    def rounded(v: Array) -> Array:
        return widened(carried(v, dtype))

    cases = {
        "x[i] * b[i] + c[i]": rounded(rounded(wide[0] * wide[1]) + wide[2]),
        "x[i] / b[i] - c[i]": rounded(rounded(wide[0] / wide[1]) - wide[2]),
        "-x[i]": -wide[0],
        "min(x[i], max(b[i], c[i]))": np.minimum(wide[0], np.maximum(wide[1], wide[2])),
    }
    for expression, want in cases.items():
        got = mapped(expression, inputs, dtypes, dtype, contract=contract)
        assert same_bits(got, carried(want, dtype)), expression
    fused = mapped("fma(float(x[i]), float(b[i]), float(c[i]))", inputs, dtypes, "float32")
    assert same_bits(fused, (wide[0].astype(np.float64) * wide[1] + wide[2]).astype(np.float32))


def test_half_fma_rounds_once() -> None:
    rng = np.random.default_rng(5)
    scale = np.exp2(rng.integers(-12, 8, 20000))
    a, b, c = (carried(rng.standard_normal(20000) * scale, "float16") for _ in range(3))
    # Near ties: c is half a unit of the product away from it, give or take a little.
    a[:5000] = np.float16(1) + carried(rng.integers(0, 1024, 5000) / 1024, "float16")
    b[:5000] = np.float16(1) + carried(rng.integers(0, 1024, 5000) / 1024, "float16")
    c[:5000] = carried(rng.choice([-1, 1], 5000) * 2.0 ** rng.integers(-24, -10, 5000), "float16")
    got = mapped("fma(x[i], b[i], c[i])", {"x": a, "b": b, "c": c}, dict.fromkeys("xbc", "float16"), "float16")
    # Products of two halves have 22 bits and c lies within 40 of them: exact in long double.
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    assert np.finfo(np.longdouble).nmant >= 63
    with np.errstate(over="ignore"):
        want, twice = exact.astype(np.float16), exact.astype(np.float32).astype(np.float16)
    assert (got != twice).any()  # the data would show a rounding through float
    wrong = got != want
    # numpy narrows long double through double; ask for the nearest neighbour where the two differ.
    for k in np.flatnonzero(wrong):
        assert abs(np.longdouble(got[k]) - exact[k]) <= abs(np.longdouble(want[k]) - exact[k])


ROUNDING = {
    "rint(x[i])": np.rint,
    "floor(x[i])": np.floor,
    "ceil(x[i])": np.ceil,
    "trunc(x[i])": np.trunc,
    "fabs(x[i])": np.abs,
    "sqrt(fabs(x[i]))": lambda x: np.sqrt(np.abs(x)),
    "round(x[i])": lambda x: np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x).astype(np.float32),
    "clamp(x[i], -2.0f, 3.0f)": lambda x: np.clip(x, np.float32(-2), np.float32(3)),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled_together() -> None:
    """One unit for the functions of one float: faster than one each."""
    expressions = (*ROUNDING, *ELEMENTARY, "float(x[i])", "exp(x[i])", "log(x[i])", "tanh(x[i])", "sin(x[i])")
    build({mapped_program(expression, {"x": "float32"}, "float32"): [()] for expression in expressions})


@pytest.mark.parametrize("expression", ROUNDING)
def test_exact_functions(expression: str, floats: Array) -> None:
    halves = np.arange(-64, 64, dtype=np.float32) / 4
    edges = np.array([0.49999997, -0.49999997, 8388607.5, 8388609, -0.2], np.float32)
    x = np.concatenate([halves, edges, floats])
    assert same_bits(mapped_one(expression, x), ROUNDING[expression](x))


ELEMENTARY = {
    "exp(x[i])": np.exp,
    "exp2(x[i])": np.exp2,
    "log(fabs(x[i]))": lambda x: np.log(np.abs(x)),
    "log2(fabs(x[i]))": lambda x: np.log2(np.abs(x)),
    "sin(x[i])": np.sin,
    "cos(x[i])": np.cos,
    "tanh(x[i])": np.tanh,
    "rsqrt(fabs(x[i]))": lambda x: 1 / np.sqrt(np.abs(x)),
    "pow(fabs(x[i]), 1.5f)": lambda x: np.power(np.abs(x), 1.5),
}


@pytest.mark.parametrize("expression", ELEMENTARY)
def test_elementary_functions_are_right_to_one_unit(expression: str) -> None:
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.standard_normal(4000) * 20, rng.standard_normal(500) * 1e-6]).astype(np.float32)
    want = ELEMENTARY[expression](x.astype(np.float64)).astype(np.float32)
    got = mapped_one(expression, x)
    assert np.all(np.abs(got.astype(np.float64) - want) <= np.spacing(np.abs(want)).astype(np.float64))


def test_elementary_functions_at_the_edges() -> None:
    x = np.array([np.inf, -np.inf, 0.0, -1.0, 1000.0, -1000.0], np.float32)
    assert mapped_one("exp(x[i])", x).tolist() == [np.inf, 0, 1, np.float32(np.exp(-1.0)), np.inf, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        want = np.log(x)
    assert np.array_equal(mapped_one("log(x[i])", x), want.astype(np.float32), equal_nan=True)
    assert mapped_one("tanh(x[i])", x).tolist()[:3] == [1, -1, 0]
    assert np.isnan(mapped_one("sin(x[i])", x)[:2]).all()


def test_min_and_max_take_the_number_beside_nan() -> None:
    x = np.array([np.nan, 1.0], np.float32)
    assert mapped_one("min(x[i], 2.0f)", x).tolist() == [2, 1]
    assert mapped_one("max(x[i], 2.0f)", x).tolist() == [2, 2]
    assert mapped_one("isnan(x[i]) ? 1.0f : 0.0f", x).tolist() == [1, 0]


def test_bits() -> None:
    x = np.concatenate(
        [np.array([0, 1, 2**32 - 1], np.uint32), np.random.default_rng(7).integers(0, 2**32, 200, np.uint32)]
    )
    cases = {
        "popcount(x[i])": [f"{v:b}".count("1") for v in x.tolist()],
        "clz(x[i])": [32 - v.bit_length() for v in x.tolist()],
        "ctz(x[i])": [(v & -v).bit_length() - 1 if v else 32 for v in x.tolist()],
        "reverse_bits(x[i])": [int(f"{v:032b}"[::-1], 2) for v in x.tolist()],
        "extract_bits(x[i], 3u, 5u)": [(v >> 3) & 31 for v in x.tolist()],
        "as_type<uint>(as_type<float>(x[i] & 0x7fffffu))": [v & 0x7FFFFF for v in x.tolist()],
    }
    for expression, want in cases.items():
        assert mapped_one(expression, x, "uint32", "uint32").tolist() == want, expression


def test_every_dtype_goes_in_and_out() -> None:
    for dtype in ("float32", "float16", "uint32", "int32", "uint16", "uint8", "int8", "bool"):
        x = (np.arange(5) - (2 if dtype[0] in "fi" else 0)).astype(dtype)
        assert same_bits(mapped_one("x[i]", x, dtype, dtype), x)
    x = to_bfloat(np.arange(5, dtype=np.float32))
    assert same_bits(mapped_one("x[i]", x, "bfloat16", "bfloat16"), x)


def test_vectors() -> None:
    body = """\
const uint i = thread_position_in_grid.x;
if (i < uint(x_shape[0]) / 4u) {
  const float4 v = vq_view<float4>(x)[i];
  vq_view<float4>(y)[i] = vq_float4(v.w, v.z, v.y, v.x);
  const half4 h = vq_view<half4>(z)[i];
  const half2 p = vq_half2(h.x, h.y) * vq_half2(h.z, h.w) + vq_half2(half(1.0f), half(2.0f));
  const half2 q = fma(p, p, p) - p;
  vq_view<half4>(w)[i] = vq_half4(p.x, p.y, q.x, q.y);
  const uint2 u = vq_view<uint2>(x)[2u * i];
  const uint4 all = vq_uint4(u.x, u.y, 1u, 2u);
  const float2 f = vq_float2(as_type<float>(all.x), as_type<float>(all.y));
  vq_view<uint2>(bits)[i] = vq_uint2(as_type<uint>(f.x), all.y + all.z + all.w);
}
"""
    inputs = {"x": "float32", "z": "float16"}
    program = Program("vectors", body, inputs, {"y": "float32", "w": "float16", "bits": "uint32"})
    rng = np.random.default_rng(8)
    x, z = rng.standard_normal(40).astype(np.float32), rng.standard_normal(40).astype(np.float16)
    outputs = {"y": ((40,), "float32"), "w": ((40,), "float16"), "bits": ((20,), "uint32")}
    got = run(program, {}, {"x": x, "z": z}, outputs, threadgroups=(1, 1, 1), threads=(32, 1, 1))
    assert same_bits(got["y"], x.reshape(-1, 4)[:, ::-1].reshape(-1))
    h = z.reshape(-1, 4)
    p = h[:, :2] * h[:, 2:] + np.array([1, 2], np.float16)
    q = (p.astype(np.float64) * p + p).astype(np.float16) - p
    assert same_bits(got["w"], np.concatenate([p, q], 1).reshape(-1))
    words = x.view(np.uint32).reshape(-1, 4)
    assert same_bits(got["bits"], np.stack([words[:, 0], words[:, 1] + 3], 1).reshape(-1))


def test_alignment_is_told_so_that_both_ways_run() -> None:
    """Launches of odd seeds say no; a place that is no multiple is never aligned. A struct of the header is viewed."""
    header = "template <class T> struct alignas(16) run { T v[16 / sizeof(T)]; };\n"
    body = """\
const uint t = thread_position_in_grid.x;
const bool all = vq_aligned<run<T>>(x), odd = vq_aligned<run<T>>(x + 1u), vectors = vq_aligned<float2>(x + 4u);
float last = -1.0f;
if (all) {
  const run<T> second = vq_view<run<T>>(x)[1];
  last = float(second.v[16 / sizeof(T) - 1]);
}
y[t] = last + (odd ? 100.0f : 0.0f) + (vectors ? 0.5f : 0.0f);
"""
    program = Program("aligned", body, {"x": "T"}, {"y": "float32"}, {"T": "dtype"}, header)
    for dtype, last in (("float16", 15), ("float32", 7)):
        x, found = np.arange(32).astype(dtype), []
        for seed in range(4):
            outputs = {"y": ((32,), "float32")}
            how: dict[str, Any] = {"threadgroups": (1, 1, 1), "threads": (32, 1, 1), "seed": seed}
            found.append(set(run(program, {"T": dtype}, {"x": x}, outputs, **how)["y"].tolist()))
        assert found == [{last + 0.5}, {-1.0}] * 2


def test_private_arrays_and_helpers_with_pointers() -> None:
    header = """\
template <class T> VQ_FN float sum_of(VQ_GLOBAL(T) p, uint n) {
  float s = 0.0f;
  for (uint k = 0; k < n; ++k) s = vq_add(s, float(p[k]));
  return s;
}
VQ_FN void put(VQ_GLOBAL_OUT(float) p, VQ_LOCAL_PTR(float) v, VQ_SHARED_PTR(float) s, uint i) { p[i] = v[1] + s[i]; }
"""
    body = """\
VQ_SHARED(float, s, 32);
VQ_LOCAL(float, v, 2);
const uint i = thread_index_in_threadgroup;
s[i] = float(i);
v[1] = sum_of(x + 2, uint(x_shape[0]) - 2u);
put(y, v, s, i);
"""
    program = Program("pointers", body, {"x": "T"}, {"y": "float32"}, {"T": "dtype"}, header)
    x = np.arange(5, dtype=np.float16)
    grid = {"threadgroups": (1, 1, 1), "threads": (32, 1, 1)}
    got = run(program, {"T": "float16"}, {"x": x}, {"y": ((32,), "float32")}, **grid)["y"]
    assert got.tolist() == [9.0 + i for i in range(32)]
    unset = Program("unset", "VQ_LOCAL(float, v, 2);\ny[thread_position_in_grid.x] = v[1];", {}, {"y": "float32"})
    assert np.isnan(run(unset, {}, {}, {"y": ((32,), "float32")}, **grid)["y"]).all()


@pytest.mark.parametrize("contract", ["off", "fast"])
def test_fractions_of_whole_numbers_are_exact(contract: Any) -> None:
    bits = np.concatenate([np.arange(4096), 3 << np.arange(22), np.arange(2**23 - 999, 2**23)]).astype(np.uint32)
    got = mapped_one("vq_fraction(x[i])", bits, "uint32", contract=contract)
    assert same_bits(got, bits.astype(np.float32) * np.float32(2.0**-23))
