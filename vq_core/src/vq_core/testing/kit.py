"""What all parts of the kit share: which method, which partner, which data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from vq_core.api.facts import SIDES, Capabilities, MethodFacts, PrepareContext, Side
from vq_core.api.settings import parse_choice
from vq_core.cache.shell import PackedKVCache
from vq_core.calibration.stand_in import NUMBERS, completed
from vq_core.errors import VQError
from vq_core.plugins import binding, partner
from vq_core.plugins.binding import BoundSide
from vq_core.plugins.choice import choose
from vq_core.plugins.registry import resolve
from vq_core.testing.observe import gaussian
from vq_core.testing.registering import registered

HEADS, SIZES = (1, 2, 3, 4, 8), (64, 80, 96, 128, 192, 256)
"""KV heads and head sizes of tests that choose their own."""
HEAD_DIMS = (16, 64, 80, 96, 100, 112, 120, 128, 192, 256)

few = hypothesis_settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    # A test of the kit runs in one subclass after another, and its autouse fixture changes nothing between examples.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Kit:
    """Base of the kit's classes.

    Attributes:
        method: The method under test in text form, such as ``"mine:bits=4"``.
        variants: Further texts of it; codec and numbers are tested for each, the cache with ``method`` only.
        plugin: The plugin object, where no installed distribution offers the method.
        keys, values: Partner for the side that the method cannot hold; by default one that keeps its input.
        head_dims: Head sizes tried. Each is accepted, or refused in the way the contract asks for.
        head_dim: Head size of all other tests, 64 or else the first that the method accepts.
        kv_heads: Number of KV heads of all other tests.
        tolerance: Relative error allowed between attention on packed codes and dense attention, by dtype.
        ladder: Texts of the method whose error must fall strictly, such as 2, 3 and 4 bits.
        stand_in_numbers: Random numbers from which a method that needs calibration learns what the tests run with,
            where a text names no artifact, for each shape.
    """

    method: ClassVar[str] = ""
    variants: ClassVar[Sequence[str]] = ()
    plugin: ClassVar[Any] = None
    keys: ClassVar[str | None] = None
    values: ClassVar[str | None] = None
    head_dims: ClassVar[Sequence[int]] = HEAD_DIMS
    head_dim: ClassVar[int | None] = None
    kv_heads: ClassVar[int] = 2
    tolerance: ClassVar[Mapping[str, float]] = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5}
    ladder: ClassVar[Sequence[str]] = ()
    stand_in_numbers: ClassVar[int] = NUMBERS

    # ---- pytest

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Spread the arguments ``text`` and ``side``, ``side`` and ``head_size`` over what the class asks for."""
        names = metafunc.fixturenames
        if "side" in names:
            try:
                with self._registered():
                    sides: Sequence[Side] = self.facts().sides
            except VQError as error:
                if not any(metafunc.definition.iter_markers(name) for name in ("skip", "skipif")):
                    # One error that says it, instead of one a test.
                    raise pytest.Collector.CollectError(f"{type(self).__name__}.method: {error}") from error
                sides = SIDES
            if "text" in names:
                texts = [self.method, *self.variants]
                pairs = [(text, side) for text in texts for side in sides]
                metafunc.parametrize(("text", "side"), pairs, indirect=["text"])
            else:
                metafunc.parametrize("side", sides)
        if "head_size" in names:
            metafunc.parametrize("head_size", self.head_dims)

    @pytest.fixture(autouse=True)
    def _methods(self) -> Iterator[None]:
        with self._registered():
            resolve(parse_choice(self.method).label)
            if self.capabilities().needs_calibration:
                lists = {name: tuple(map(self.calibrated, getattr(self, name))) for name in ("variants", "ladder")}
                vars(self).update(lists, method=self.calibrated(self.method))
            yield

    @pytest.fixture
    def text(self, request: pytest.FixtureRequest, _methods: None) -> str:
        """A text of the method, with an artifact where it needs one."""
        return self.calibrated(request.param)

    def calibrated(self, text: str) -> str:
        """A text of the method with a stand-in for the tests' shapes, where it needs an artifact."""
        return completed(text, self.shapes(), self.stand_in_numbers)

    def shapes(self) -> set[tuple[int, int]]:
        """KV heads and head size of what the tests run; a subclass of few tests may name fewer."""
        accepted = self.capabilities().head_dims
        sizes = {*self.head_dims, *SIZES, self.dim()}
        found = {(self.kv_heads, size) for size in sizes if accepted is None or size in accepted}
        return found | {(heads, self.dim()) for heads in HEADS}

    def _registered(self) -> ExitStack:
        stack = ExitStack()
        with ExitStack() as opened:
            for plugin in filter(None, (self.plugin, partner)):
                opened.enter_context(registered(plugin))
            stack = opened.pop_all()
        return stack

    # ---- the method

    def facts(self) -> MethodFacts:
        """What the method declares."""
        facts = resolve(parse_choice(self.method).label).facts
        assert facts is not None
        return facts

    def capabilities(self) -> Capabilities:
        """What the method declares it can do."""
        return self.facts().capabilities

    def dim(self) -> int:
        """Head size of the tests that try only one."""
        accepted = self.capabilities().head_dims
        if self.head_dim is not None:
            return self.head_dim
        return 64 if accepted is None or 64 in accepted else accepted[0]

    def context(self, side: Side, heads: int | None = None, dim: int | None = None, dtype: str = "float16") -> Any:
        """A layer side."""
        size = dim or self.dim()
        return PrepareContext(side=side, kv_heads=heads or self.kv_heads, key_dim=size, value_dim=size, dtype=dtype)

    def bind(self, text: str, side: Side, **of: Any) -> BoundSide:
        """The method bound to a layer side; the arguments are those of :meth:`context`."""
        return binding.bind(text, self.context(side, **of))

    def bind_anew(self, text: str, side: Side, **of: Any) -> BoundSide:
        """The method bound as another process would bind it, constants made again."""
        ctx, choice = self.context(side, **of), choose(text, side)
        return binding._bind(resolve(choice.label), choice, ctx, "error", "auto")

    # ---- caches

    def policy(self, text: str | None = None) -> dict[str, str]:
        """Keyword arguments that give a cache the method, and its partner on a side that it cannot hold."""
        sides = self.facts().sides
        return {side: text or self.method if side in sides else getattr(self, side) or partner.NAME for side in SIDES}

    def cache(self, text: str | None = None, *, residual: int = 64, **options: Any) -> PackedKVCache:
        """An empty cache of the method."""
        given: dict[str, Any] = {**self.policy(text), "residual": residual, **options}
        return PackedKVCache(**given)

    def tokens(self, n: int, *, rows: int = 1, dtype: str = "float16", seed: int = 0) -> tuple[mx.array, mx.array]:
        """Keys and values of n tokens of the tests' shape."""
        shape = (rows, self.kv_heads, n, self.dim())
        return gaussian(shape, dtype, 2 * seed), gaussian(shape, dtype, 2 * seed + 1)

    def filled(self, n: int, **options: Any) -> PackedKVCache:
        """A cache that was given n tokens at once."""
        cache = self.cache(**options)
        cache.update_and_fetch(*self.tokens(n))
        return cache


def skip(capability: str, why: str = "") -> None:
    """Skip a test for a capability that the method does not declare."""
    pytest.skip(f"capability {capability}" + (f": {why}" if why else ""))


def feed(cache: PackedKVCache, tokens: tuple[mx.array, mx.array], chunks: Sequence[int], begin: int = 0) -> None:
    """Give a cache tokens from ``begin`` on in chunks."""
    keys, values = tokens
    for n in chunks:
        cache.update_and_fetch(keys[:, :, begin : begin + n], values[:, :, begin : begin + n])
        begin += n


def pack(bound: BoundSide, x: mx.array, begin: int = 0, sequence: Mapping[str, mx.array] | None = None) -> Any:
    """Fields of tokens x (B, H, n, D), n whole blocks; those of the sequence from x unless given."""
    positions = mx.broadcast_to(mx.arange(begin, begin + x.shape[2], dtype=mx.int32), (x.shape[0], x.shape[2]))
    block = bound.layout.block
    if sequence is None:
        sequence = bound.start(x[:, :, :block], positions[:, :block])
    return {**bound.pack(x, positions, sequence), **sequence}


def decode(bound: BoundSide, packed: Mapping[str, mx.array], tokens: int, begin: int = 0) -> mx.array:
    """Decode what :func:`pack` gave."""
    rows = next(iter(packed.values())).shape[0]
    positions = mx.broadcast_to(mx.arange(begin, begin + tokens, dtype=mx.int32), (rows, tokens))
    return bound.decode(packed, positions)


def round_trip(bound: BoundSide, x: mx.array) -> mx.array:
    """x after encode, pack and decode, float32."""
    return decode(bound, pack(bound, x), x.shape[2])


def whole(bound: BoundSide, at_least: int) -> int:
    """The fewest tokens that are whole blocks."""
    block = bound.layout.block
    return -(-at_least // block) * block
