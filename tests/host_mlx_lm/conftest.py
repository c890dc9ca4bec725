"""A method that stores what it is given, ``compress`` that is undone after each test, and plain generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import vq_core
from vq_core.attention.packed import stock_attention
from vq_core.hosts.mlx_lm import hook
from vq_core.testing import load_plugin, registered

IDENTITY = load_plugin(Path(__file__).parent.parent / "methods" / "identity.py")

Generate = Callable[..., tuple[list[int], mx.array]]


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with registered(IDENTITY):
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """A test that fails on the way leaves the others alone."""
    assert mx.fast.scaled_dot_product_attention is stock_attention and not hook._users
    yield
    left, users = mx.fast.scaled_dot_product_attention, hook._users
    mx.fast.scaled_dot_product_attention, hook._users = stock_attention, 0
    assert left is stock_attention and not users


@pytest.fixture
def compress(_nothing_is_left_behind: None) -> Iterator[Callable[..., Any]]:
    """``compress(model, **options)``: :func:`vq_core.compress`, undone when the test ends."""
    handles = []

    def run(model: Any, method: str | None = "identity", **options: Any) -> Any:
        handles.append(vq_core.compress(model, method=method, **options))
        return handles[-1]

    yield run
    for handle in handles:
        handle.undo()


@pytest.fixture
def generate() -> Generate:
    """``generate(model, prompt, steps=60)``: tokens and their log-probabilities, by mlx-lm's generate_step."""
    from mlx_lm.generate import generate_step

    def run(model: Any, prompt: mx.array, steps: int = 60, **options: Any) -> tuple[list[int], mx.array]:
        options.setdefault("prefill_step_size", 32)
        found = list(generate_step(prompt, model, max_tokens=steps, **options))
        return [token for token, _ in found], mx.stack([row for _, row in found])

    return run
