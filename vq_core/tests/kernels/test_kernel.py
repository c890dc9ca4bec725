"""Kernel: what its declaration and its calls refuse, and what every call gives."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vq_core.errors import KernelError, PluginError, UnsupportedShapeError
from vq_core.kernels import Output, device_backend
from vq_core.kernels.rules import ATTRIBUTES, stripped

from .toys import BODY, DTYPES, reference, run, times

LIKE_X = Output("T", lambda call: call.shapes["x"])
DECLARATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": ""}, "letters, digits and underscores"),
    "a name with a dash": ({"name": "my-kernel"}, "letters, digits and underscores"),
    "a name with an umlaut": ({"name": "käse"}, "letters, digits and underscores"),
    "a name that is no text": ({"name": 3}, "letters, digits and underscores"),
    "an input's name": ({"inputs": {"x y": "T"}}, "'x y' is no name in C"),
    "a number's name": ({"numbers": ("count", "1by")}, "'1by' is no name in C"),
    "a grid attribute's name": ({"numbers": (ATTRIBUTES[0],)}, "taken by the dialect"),
    "the run-time numbers' name": ({"inputs": {"x": "T", "run_numbers": "uint32"}}, "taken by the dialect"),
    "a name of the dialect": ({"numbers": ("vq_mul",)}, "taken by the dialect"),
    "the call's own argument": ({"parameters": {"T": DTYPES, "backend": (1, 2)}}, "'backend' is taken"),
    "input and output of one name": ({"outputs": {"x": LIKE_X}}, "have one name: x"),
    "parameter and number of one name": ({"parameters": {"T": DTYPES, "by": (1, 2)}}, "have one name: by"),
    "one number twice": ({"numbers": ("count", "by", "by")}, "have one name: by"),
    "no output": ({"outputs": {}}, "no outputs"),
    "an unknown dtype of an input": ({"inputs": {"x": "float8"}}, "x is 'float8', which is neither a dtype nor"),
    "an unknown dtype of an output": ({"outputs": {"y": Output("double", lambda c: (1,))}}, "y is 'double'"),
    "a parameter of numbers as dtype": ({"parameters": {"T": (1, 2)}}, "x is 'T', which is neither a dtype nor"),
    "an unknown dtype parameter": ({"parameters": {"T": ("float32", "float64")}}, "parameter T must have accepted"),
    "a parameter without values": ({"parameters": {"T": DTYPES, "n": ()}}, "parameter n must have accepted"),
    "values of two kinds": ({"parameters": {"T": DTYPES, "n": (1, True)}}, "parameter n must have accepted"),
    "a fraction": ({"parameters": {"T": DTYPES, "n": (0.5,)}}, "parameter n must have accepted"),
    "a number beyond 32 bits": ({"parameters": {"T": DTYPES, "n": (2**31,)}}, "parameter n must have accepted"),
    "a value twice": ({"parameters": {"T": DTYPES, "n": (4, 4)}}, "parameter n accepts a value twice"),
    "25 variants": ({"inputs": {"x": "float32"}, "outputs": {"y": Output("float32", lambda c: (1,))},
                     "parameters": {"n": tuple(range(25))}}, "25 variants; at most 24: make a parameter a run-time"),
    "no grid attribute": ({"body": "y[0] = x[0];"}, "names no attribute of the grid"),
    "a grid attribute in a comment": ({"body": "// thread_position_in_grid\ny[0] = x[0];"}, "names no attribute"),
    "a grid attribute in a long comment": ({"body": "/* thread_position_in_grid */ y[0] = x[0];"}, "no attribute"),
    "an input that ends another's": (
        {"inputs": {"k": "T", "mask": "T"}, "body": "const uint i = thread_position_in_grid.x + mask_shape[0];"},
        "the name of input 'k' ends another's, in k_shape",
    ),
    "an unknown fixed parameter": ({"fixed": ("D",)}, "fixed names D, which is no parameter"),
}  # fmt: skip


@pytest.mark.parametrize("what", DECLARATIONS)
def test_a_wrong_declaration_is_refused(what: str) -> None:
    changes, said = DECLARATIONS[what]
    with pytest.raises(PluginError, match=said.replace("(", "\\(")) as caught:
        times(**changes)
    assert str(caught.value).startswith("kernel ")


def test_24_variants_and_both_shapes_by_whole_names_are_fine() -> None:
    assert len(times(parameters={"T": DTYPES, "n": tuple(range(8))}).variants) == 24
    body = "const uint i = thread_position_in_grid.x + mask_shape[0] + k_shape[0];"
    times(inputs={"k": "T", "mask": "T"}, body=body)


X = mx.array([1.0, 2.0, 3.0] * 5)
GIVEN: dict[str, Any] = {"count": 15, "by": 2, "backend": "simulator"}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no array": ((), {}, "takes x: got 0 arrays"),
    "an array too many": ((X, X), {}, "takes x: got 2 arrays"),
    "no MLX array": ((np.zeros(15, np.float32),), {}, "x must be an MLX array, got ndarray"),
    "a list": (([1.0],), {}, "x must be an MLX array, got list"),
    "a dtype that is not accepted": ((X.astype(mx.int32),), {}, "T 'int32' is not accepted; accepted are float32"),
    "bool": ((X > 1,), {}, "T 'bool_' is not accepted"),
    "a dtype that is not the array's": ((X,), {"T": "float16"}, "x is float32, T is float16"),
    "a parameter that it has not": ((X,), {"size": 3}, "has no parameter size"),
    "no number": ((X,), {"by": None}, r"needs by=, a whole number below 2\*\*32: got None"),
    "a negative number": ((X,), {"by": -1}, "needs by=.*got -1"),
    "a number too large": ((X,), {"by": 2**32}, "needs by=.*got 4294967296"),
    "a fraction": ((X,), {"by": 2.0}, "needs by=.*got 2.0"),
    "a bool": ((X,), {"by": True}, "needs by=.*got True"),
    "an array as number": ((X,), {"by": mx.array(2)}, "needs by="),
    "an unknown backend": ((X,), {"backend": "vulkan"}, "backend 'vulkan': accepted are metal, cuda, simulator"),
    "an empty backend": ((X,), {"backend": ""}, "backend '': accepted are"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_call_is_refused_before_anything_runs(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vq_core.kernels.simulated import Simulated

    def never(*args: Any) -> Any:
        raise AssertionError("it was launched")

    monkeypatch.setattr(Simulated, "run", never)
    arrays, changes, said = CALLS[what]
    kernel = times()
    with pytest.raises(UnsupportedShapeError, match=said):
        kernel(*arrays, **GIVEN | changes)
    assert kernel.variants == times().variants


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs bits=, one of 2, 4"),
        ({"bits": 3}, "bits 3 is not accepted; accepted are 2, 4"),
        ({"bits": 4.0}, "bits 4.0 is not accepted"),
        ({"bits": True}, "bits True is not accepted"),
        ({"bits": "4"}, "bits '4' is not accepted"),
        ({"bits": [4]}, "is not accepted"),
        ({"bits": np.int64(4)}, "is not accepted"),
        ({"bits": mx.array(4)}, "is not accepted"),
        ({"bits": 2, "wide": 1}, "wide 1 is not accepted; accepted are False, True"),
    ],
)
def test_values_of_parameters_are_of_their_kind(given: dict[str, Any], said: str) -> None:
    kernel = times(parameters={"T": DTYPES, "bits": (2, 4), "wide": (False, True)})
    with pytest.raises(UnsupportedShapeError, match=said):
        kernel(X, **GIVEN | {"wide": False} | given)


def test_a_fixed_dtype_is_the_only_one() -> None:
    kernel = times(inputs={"x": "float16"}, outputs={"y": Output("float16", lambda c: c.shapes["x"])}, parameters={})
    with pytest.raises(UnsupportedShapeError, match="x is float32; accepted is float16"):
        kernel(X, **GIVEN)


@pytest.mark.skipif(device_backend() is not None, reason="this device has a backend")
def test_a_device_without_a_backend_says_the_way_out() -> None:
    given = GIVEN | {"backend": None}
    with pytest.raises(UnsupportedShapeError, match="on a CPU give backend='simulator'"):
        times()(X, **given)
    for backend in ("metal", "cuda"):
        with pytest.raises(UnsupportedShapeError, match=f"backend '{backend}'.*default device.*simulator"):
            times()(X, **given | {"backend": backend})


def test_the_kernel_s_own_check_speaks() -> None:
    kernel = times(check=lambda call: f"{call.numbers['by']} is odd" if call.numbers["by"] % 2 else "")
    with pytest.raises(UnsupportedShapeError, match="kernel times: 3 is odd"):
        run(kernel, X, 3)
    assert mx.array_equal(run(kernel, X, 4), X * 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"threads": lambda c: (48, 1, 1)}, "multiple of 32"),
        ({"threads": lambda c: (2048, 1, 1)}, "at most 1024"),
        ({"threads": lambda c: (0, 1, 1)}, "multiple of 32"),
        ({"threadgroups": lambda c: (0, 1, 1)}, "each number must be 1 or more"),
        ({"threadgroups": lambda c: (2**20, 2**20, 1)}, "fewer than 2\\*\\*32 threads"),
    ],
)
def test_a_wrong_grid_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        run(times(**changes), X)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_size(dtype: str) -> None:
    """0-d, empty, fewer than 8 elements, and larger; shape and dtype kept, one compiled variant."""
    kernel = times()
    for shape in ((), (1,), (7,), (2, 3), (8,), (129,), (2, 3, 4, 5)):
        x = mx.array(np.random.default_rng(0).standard_normal(shape).astype(np.float32)).astype(getattr(mx, dtype))
        y = run(kernel, x, 3)
        assert y.shape == (shape or (1,)) and y.dtype == x.dtype
        assert mx.array_equal(y, reference(x.reshape(y.shape), by=3)[0])
    for shape in ((0,), (3, 0, 5)):
        y = run(kernel, mx.zeros(shape, getattr(mx, dtype)))
        assert y.shape == shape and y.dtype == getattr(mx, dtype)


def test_an_empty_input_beside_outputs_that_are_not() -> None:
    body = "const uint i = thread_position_in_grid.x;\nif (i < 3u) y[i] = float(x_shape[0]) + float(by);"
    shape = Output("float32", lambda call: (3,))
    kernel = times(body=body, outputs={"y": shape}, threadgroups=lambda call: (1, 1, 1))
    assert run(kernel, mx.zeros((0,)), 5).tolist() == [5, 5, 5]
    assert run(kernel, mx.zeros((4,)), 5).tolist() == [9, 9, 9]


def test_one_output_of_several_may_be_empty() -> None:
    body = BODY.replace("y[i] =", "z[i] = 1u;\nif (i < count && by > 0u) y[i] =").replace(
        "if (i < count) z", "if (i < 4u) z"
    )
    outputs = {"y": Output("T", lambda c: (c.numbers["count"],)), "z": Output("uint32", lambda c: (4,))}
    kernel = times(body=body, outputs=outputs, threadgroups=lambda call: (1, 1, 1))
    y, z = kernel(X, count=0, by=1, backend="simulator")
    assert y.shape == (0,) and z.tolist() == [1, 1, 1, 1]
    y, z = kernel(X, count=15, by=1, backend="simulator")
    assert mx.array_equal(y, X) and z.tolist() == [1, 1, 1, 1]


def test_run_time_numbers_do_not_compile() -> None:
    """Many numbers, one variant: the extremes and more than eight of them."""
    names = tuple(f"n{i}" for i in range(11))
    total = " + ".join(names)
    body = f"const uint i = thread_position_in_grid.x;\nif (i == 0u) y[0] = {total};"
    output = {"y": Output("uint32", lambda call: (1,))}
    kernel = times(body=body, numbers=names, outputs=output, threadgroups=lambda call: (1, 1, 1))
    for values in ([0] * 11, list(range(11)), [2**32 - 1] + [0] * 10):
        (y,) = kernel(X, backend="simulator", **dict(zip(names, values, strict=True)))
        assert y.item() == sum(values)
    assert len(kernel.variants) == 3


def test_lines_keep_their_numbers() -> None:
    """The names of run-time numbers share the body's first line; a directive there keeps a line of its own."""
    body = "const uint i = thread_position_in_grid.x;\nif (i < count)\n  y[i] = x[i + by];"
    with pytest.raises(KernelError, match="kernel 'times', line 3") as caught:
        run(times(body=body), X, 1)
    assert "y[i] = x[i + by];" in str(caught.value)
    directive = times(
        body="#define TWICE(a) vq_add(a, a)\n" + BODY.replace("vq_mul(float(x[i]), float(by))", "TWICE(float(x[i]))")
    )
    assert mx.array_equal(run(directive, X), X * 2)


def test_arrays_that_are_not_contiguous() -> None:
    x = mx.arange(24, dtype=mx.float32).reshape(4, 6)
    for view in (x.T, x[:, ::2], x[1:, 1:], mx.broadcast_to(x[:1], (4, 6))):
        assert mx.array_equal(run(times(), view), view * 2)


def test_helpers_that_name_an_address_space_take_no_tiny_arrays() -> None:
    """Metal keeps an array of fewer than 8 elements in another one, so the helper would not compile there."""
    kernel = times(
        header="VQ_FN float at(VQ_GLOBAL(float) p, uint i) { return p[i]; }",
        body=BODY.replace("float(x[i])", "at(x, i)"), parameters={"T": ("float32",)},
    )  # fmt: skip
    assert mx.array_equal(run(kernel, mx.ones(8)), mx.ones(8) * 2)
    with pytest.raises(UnsupportedShapeError, match=r"x \(7,\) has 7 elements; at least 8 are accepted"):
        run(kernel, mx.ones(7))
    assert run(times(), mx.ones(7)).shape == (7,)


def test_a_copy_is_the_kernel_itself() -> None:
    """mlx-lm deep-copies caches, and what is compiled is kept by the kernel."""
    kernel = times()
    assert copy.deepcopy([kernel])[0] is kernel
    assert {kernel: 1}[kernel] == 1 and times() != kernel


def test_variants_are_the_product() -> None:
    kernel = times(parameters={"T": DTYPES, "bits": (2, 4)})
    assert len(kernel.variants) == 6 and {"T": "bfloat16", "bits": 4} in kernel.variants
    assert times(parameters={}, inputs={"x": "float32"}, outputs={"y": Output("float32", lambda c: (1,))}).variants == [
        {}
    ]


def test_comments_are_stripped_and_nothing_else() -> None:
    text = "  a = b / c; // no /* block\n/* two\nlines */ d = e;\n\n#define F(x) \\\n  x\nf = g * /* h */ i; // */ j"
    assert stripped(text) == "a = b / c;\nd = e;\n#define F(x) \\\nx\nf = g *   i;"
