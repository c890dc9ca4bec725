"""Kernels that are wrong in one way each: the kit, or the binding, says which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import Capabilities, Field, Layout, MethodFacts, hookimpl
from vq_core.errors import PluginError
from vq_core.kernels import Case, Kernel, KernelOffer, Output
from vq_core.testing import KernelConformance

BODY = """
const uint i = thread_position_in_grid.x;
if (i < count) y[i] = vq_add(vq_mul(float(x[i]), 3.0f), 1.0f);
"""


@attrs.frozen
class Settings:
    """None."""


def reference(x: mx.array, **rest: Any) -> tuple[mx.array, ...]:
    return (x.astype(mx.float32) * 3 + 1,)


def cases() -> Iterator[Case]:
    for i in range(60):
        x = mx.array(np.random.default_rng(i).standard_normal((1, 2, i + 1, 16), np.float32))
        yield Case((x.astype((mx.float32, mx.float16, mx.bfloat16)[i % 3]),), {"count": x.size}, f"{x.shape}")


def kernel(**changes: Any) -> Kernel:
    declared: dict[str, Any] = {
        "name": "triple", "body": BODY, "inputs": {"x": "T"}, "numbers": ("count",),
        "equals": reference, "cases": cases,
        "outputs": {"y": Output("float32", lambda call: call.shapes["x"])},
        "parameters": {"T": ("float32", "float16", "bfloat16")}, "threads": lambda call: (64, 1, 1),
        "threadgroups": lambda call: (-(-call.numbers["count"] // 64), 1, 1),
    }  # fmt: skip
    return Kernel(**declared | changes)


def tripled(used: Kernel, run: Callable[..., Any] | None = None, **offer: Any) -> SimpleNamespace:
    """A method that keeps three times its input plus one, with one kernel for it."""

    def packed(x: mx.array, backend: Any, **rest: Any) -> dict[str, mx.array]:
        return {"x": used(x, count=x.size, backend=backend)[0]}

    def vq_method():
        return MethodFacts("tripled", "for tests", Settings, capabilities=Capabilities())

    def vq_prepare(ctx):
        return ctx.head_dim

    def vq_layout(state):
        return Layout(1, (Field("x", "float32", (128, state), codes=True),))

    def vq_encode(x):
        return reference(x)[0]

    def vq_pack(codes):
        return {"x": codes}

    def vq_decode(packed):
        return (packed["x"] - 1) / 3

    def vq_kernels():
        return [KernelOffer("encode+pack", [used], run or packed, **offer)]

    hooks = (vq_method, vq_prepare, vq_layout, vq_encode, vq_pack, vq_decode, vq_kernels)
    return SimpleNamespace(**{hook.__name__: hookimpl(hook) for hook in hooks})


def kit(plugin: Any) -> KernelConformance:
    made: KernelConformance = type("Broken", (KernelConformance,), {"method": "tripled", "plugin": plugin})()
    return made


def failure(plugin: Any, test: str, *args: Any) -> str:
    made = kit(plugin)
    with made._registered(), pytest.raises(AssertionError) as caught:
        getattr(made, test)(*args)
    return str(caught.value)


class TestTheKernelTheyAreMadeFrom(KernelConformance):
    """Unbroken, so that what fails below fails for its one change."""

    method = "tripled"
    plugin = tripled(kernel())


def test_a_kernel_that_contraction_changes() -> None:
    body = BODY.replace("vq_add(vq_mul(float(x[i]), 3.0f), 1.0f)", "v * 3.0f + 1.0f").replace(
        "if (i", "const float v = x[min(i, count - 1u)];\nif (i"
    )
    said = failure(tripled(kernel(body=body)), "test_kernels_equal_their_references", "fast", 1)
    assert "kernel triple, contraction fast, seed 1: " in said and "y differs by" in said


def test_a_kernel_that_breaks_a_rule() -> None:
    broken = kernel(body=BODY.replace("if (i < count) ", ""))
    assert "Missing bound check" in failure(tripled(broken), "test_kernels_equal_their_references", "off", 0)


def test_a_kernel_without_cases() -> None:
    said = failure(tripled(kernel(cases=lambda: iter([]))), "test_kernels_equal_their_references", "off", 0)
    assert "nothing was compared" in said


def test_a_kernel_that_grows() -> None:
    def grown() -> Iterator[Case]:
        for case in cases():
            n = case.inputs[0].shape[2]
            if n in (8, 16, 32):
                yield Case(case.inputs, {**case.parameters, "n": n})

    # One dtype: a case each.
    baked = kernel(parameters={"T": ("float32", "float16", "bfloat16"), "n": (8, 16, 32)}, cases=grown)
    said = failure(tripled(baked, run=lambda **rest: {}), "test_kernel_text_does_not_grow")
    assert "kernel triple: compile-time parameter n follows axis 2 of x" in said


def test_a_run_that_differs_where_the_probe_does_not_look() -> None:
    """The binding's probe is a page of N(0, 1); the kit looks at fewer tokens and larger numbers too."""
    used = kernel()

    def run(x: mx.array, backend: Any, **rest: Any) -> dict[str, mx.array]:
        if x.shape[2] < 100:
            x = x + 1
        return {"x": used(x, count=x.size, backend=backend)[0]}

    said = failure(tripled(used, run=run), "test_kernels_serve_what_hooks_give", "keys", "float32")
    assert "keys, float32, 70 tokens packed: x differs from the hooks' by" in said


def test_a_run_that_the_probe_sees() -> None:
    made = kit(tripled(kernel(), run=lambda x, **rest: {"x": x.astype(mx.float32)}))
    with made._registered(), pytest.raises(PluginError, match="kernel triple on simulator: x differs"):
        made.test_kernels_serve_what_hooks_give("keys", "float32")


def test_a_kernel_within_its_tolerance() -> None:
    """A kernel that does not promise bits is held to what it states."""
    body = BODY.replace("1.0f)", "1.0001f)")
    loose = kernel(body=body, exact=False, tolerance=1e-3)
    made = kit(tripled(loose))
    with made._registered():
        made.test_kernels_equal_their_references("off", 0)
        made.test_kernels_serve_what_hooks_give("values", "float16")
    tight = kernel(body=body, exact=False, tolerance=1e-6)
    assert "cases differ" in failure(tripled(tight), "test_kernels_equal_their_references", "off", 0)


def test_a_declined_side_need_not_be_served() -> None:
    made = kit(tripled(kernel(), declines=lambda state: "another time"))
    with made._registered():
        made.test_kernels_serve_what_hooks_give("keys", "float32")


def test_it_is_skipped_for_methods_without_kernels_only() -> None:
    plugin = tripled(kernel())
    del plugin.vq_kernels
    made = kit(plugin)
    with made._registered():
        for test, args in (
            ("test_kernels_equal_their_references", ("off", 0)),
            ("test_kernel_text_does_not_grow", ()),
            ("test_kernels_serve_what_hooks_give", ("keys", "float32")),
        ):
            with pytest.raises(pytest.skip.Exception, match="vq_kernels: tripled offers no kernels"):
                getattr(made, test)(*args)
