"""Whole decode steps of a model geometry with random weights, by length of the context.

mlx-lm's plain cache, its quantized caches and ours take turns in one process.  Caches are filled with random keys and
values, not by the model; every arm's context grows by the steps that are timed, alike for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.bench.attention import METHODS
from vq_core.bench.busy import Machine, look
from vq_core.bench.clock import POOL, Comparison, compare, environment
from vq_core.bench.decode_arms import Arm, filled, lost, make_arms
from vq_core.bench.decode_limits import longest, prefills, stability
from vq_core.bench.figures import against, per_second
from vq_core.bench.geometry import Geometry
from vq_core.cache.policy import LayerPolicy
from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm import rivals

DTYPES = ("float16", "bfloat16", "float32")
CONTEXTS = (1024, 32768)


@attrs.frozen
class Wanted:
    """What to measure.

    Attributes:
        geometry: Of the model.
        methods: Texts such as ``"kivi:bits=2"``, for keys and values both.
        tiers: ``attention=`` of the policy.
        residual: Tokens of the exact window.
        contexts: Tokens held before the timed steps.
        dtype: Of weights, keys and values.
        steps: Steps of one sample, at least 2; 32 have one flush of a block in each sample of KIVI.
        rounds: Turns of the comparisons, at least.
        host_steps: Steps whose graph is built for the host's clock.
        fits: Bytes of a cache budget to fill; ``None``: leave that out.
        fill_chunk: Tokens by which the budget is filled.
        prefill: Tokens of a prefill to time; ``None``: leave that out.
        prefill_rounds: Turns of it.
        stable_steps: Steps over which memory and compiled kernels are watched; ``None``: leave that out.

    Raises:
        SettingsError: what is not accepted, before anything is made.
    """

    geometry: Geometry = attrs.field(factory=Geometry)
    methods: tuple[str, ...] = METHODS
    tiers: tuple[str, ...] = ("auto",)
    residual: int = 128
    contexts: tuple[int, ...] = CONTEXTS
    dtype: str = "float16"
    steps: int = 32
    rounds: int = 6
    host_steps: int = 40
    fits: int | None = None
    fill_chunk: int = 2048
    prefill: int | None = None
    prefill_rounds: int = 2
    stable_steps: int | None = None

    def __attrs_post_init__(self) -> None:
        counts = {n: getattr(self, n) for n in ("rounds", "host_steps", "fill_chunk", "prefill_rounds")}
        counts |= {f"context {n}": n for n in self.contexts}
        counts |= {n: getattr(self, n) for n in ("fits", "prefill") if getattr(self, n) is not None}
        wrong = [f"{name} {value!r}" for name, value in counts.items() if value < 1]
        if wrong:
            raise SettingsError(f"{', '.join(wrong)}: whole numbers of 1 or more are needed")
        if self.steps < 2:
            raise SettingsError(f"{self.steps} steps a sample: 2 or more are needed, for the next is built meanwhile")
        if self.stable_steps is not None and self.stable_steps < 4:
            raise SettingsError(f"{self.stable_steps} steps to watch: 4 or more are needed, the first 3 may compile")
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype {self.dtype!r}: accepted are {', '.join(DTYPES)}")
        if not self.methods or not self.tiers:
            raise SettingsError("methods and tiers need at least one entry each")
        for text in self.methods:
            for tier in self.tiers:
                LayerPolicy.make(method=text, attention=tier, residual=self.residual)


def measure(
    wanted: Wanted, *, tell: Callable[[str], None] = lambda line: None, machine: Callable[[], Machine] = look
) -> dict[str, Any]:
    """Measure and return the record, as JSON can hold it.

    Args:
        wanted: What.
        tell: Gets a line about what is done next.
        machine: For tests.

    Raises:
        SettingsError, UnsupportedShapeError, PluginError: a method or tier that cannot do this geometry.
    """
    facts, geometry = environment(), wanted.geometry
    tell(f"weights of {geometry}")
    model = rivals.build_llama(geometry.config, wanted.dtype)
    left_out: list[dict[str, Any]] = []
    arms = make_arms(
        model, geometry, wanted.dtype, wanted.methods, wanted.tiers, wanted.residual, left_out
    )  # fmt: skip
    record: dict[str, Any] = {
        "benchmark": "decode",
        "environment": facts,
        "wanted": attrs.asdict(wanted),
        "config": geometry.config,
        "arms": [{"name": arm.name, "kind": arm.kind} for arm in arms],
        "contexts": [_context(wanted, model, arms, context, tell, machine) for context in wanted.contexts],
        "fits": None,
        "prefill": None,
        "stability": None,
        "left_out": left_out,
    }
    plain_and_ours = [arm for arm in arms if arm.kind != "mlx-lm quantized"]
    if wanted.fits is not None:
        record["fits"] = longest(plain_and_ours, geometry, wanted.dtype, wanted.fits, wanted.fill_chunk, tell)
    if wanted.prefill is not None:
        record["prefill"] = prefills(
            plain_and_ours, model, geometry, wanted.prefill, wanted.prefill_rounds, tell, machine
        )  # fmt: skip
    if wanted.stable_steps is not None:
        start = min(wanted.contexts, default=CONTEXTS[0])
        ours = [arm for arm in arms if arm.kind == "vq"]
        record["stability"] = stability(ours, model, geometry, wanted.dtype, start, wanted.stable_steps, tell)
    return record


def _context(
    wanted: Wanted, model: Any, arms: Sequence[Arm], context: int, tell: Callable[[str], None],
    machine: Callable[[], Machine],
) -> dict[str, Any]:  # fmt: skip
    caches: dict[str, list[Any]] = {}
    facts: dict[str, dict[str, Any]] = {}

    def refill() -> None:
        """Every arm's caches as they were before the steps: what is timed next begins at the same context."""
        caches.clear()
        for arm in arms:
            tell(f"{context} tokens: filling {arm.name}")
            caches[arm.name], memory = filled(arm, wanted.geometry, wanted.dtype, context)
            facts.setdefault(arm.name, arm.facts(caches[arm.name]) | memory | {"updates_read_densely": 0})
            facts[arm.name]["updates_read_densely"] -= lost(caches[arm.name])

    def grown() -> int:
        """The context that the steps have made, after their dense reads are counted."""
        for name, held in caches.items():
            facts[name]["updates_read_densely"] += lost(held)
        return int(caches[arms[0].name][0].offset)

    def timed(way: Callable[..., mx.array]) -> Comparison:
        def of(arm: Arm) -> Callable[[mx.array], mx.array]:
            def run(token: mx.array) -> mx.array:
                with arm.running():
                    return way(model, caches[arm.name], token, wanted.steps)

            return run

        tell(f"{context} tokens: {way.__name__} steps of {len(arms)} arms")
        return compare({arm.name: of(arm) for arm in arms}, tokens, rounds=wanted.rounds, warm=1, machine=machine)

    tokens = [mx.array([(7 * i + 1) % wanted.geometry.vocab]) for i in range(POOL)]
    refill()
    pipelined = timed(rivals.pipelined)
    grown_to = {"pipelined": grown()}
    refill()
    for arm in arms:
        facts[arm.name]["peak_of_a_step_bytes"] = _peak(model, arm, caches[arm.name], tokens[0])
    host = _host(wanted, model, arms, caches, tokens[0])
    synchronous = timed(rivals.synchronous)
    grown_to["synchronous"] = grown()
    base = arms[0].name
    found = {}
    for arm in arms:
        entry: dict[str, Any] = facts[arm.name] | {"host": host[arm.name]}
        for name, clock in (("pipelined", pipelined), ("synchronous", synchronous)):
            entry[name] = {
                "tokens_per_second": per_second(clock.arms[arm.name], wanted.steps),
                "step_seconds": clock.arms[arm.name].median / wanted.steps,
                "noise_floor": round(clock.floor(arm.name), 4),
                "against": None if arm.name == base else against(clock, arm.name, base),
            }
        entry["plain_cache_bytes_over_own"] = round(
            facts[base]["cache_bytes"] / max(1, facts[arm.name]["cache_bytes"]), 4
        )  # fmt: skip
        found[arm.name] = entry
    caches.clear()
    mx.clear_cache()
    return {
        "context": context,
        "grown_to": grown_to,
        "steps_a_sample": wanted.steps,
        "dense_bytes": wanted.geometry.dense_bytes(getattr(mx, wanted.dtype).size) * context,
        "arms": found,
        "pipelined": pipelined.as_dict(),
        "synchronous": synchronous.as_dict(),
    }


def _peak(model: Any, arm: Arm, caches: list[Any], token: mx.array) -> int:
    """Bytes that one step takes beyond what is held before it; the step before that compiles."""
    with arm.running():
        mx.eval(rivals.synchronous(model, caches, token, 1))
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(rivals.synchronous(model, caches, token, 1))
    return max(0, mx.get_peak_memory() - before)


def _host(
    wanted: Wanted, model: Any, arms: Sequence[Arm], caches: dict[str, list[Any]], token: mx.array
) -> dict[str, dict[str, float]]:
    """Microseconds a layer of building one step's graph, nothing evaluated inside; arms take turns step by step."""
    took: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(wanted.host_steps + 1):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            with arm.running():
                begin = time.perf_counter()
                made = rivals.step(model, caches[arm.name], token)
                passed = time.perf_counter() - begin
                mx.eval(made)
                del made
            if number:  # the first one compiles, and fills Python's caches
                took[arm.name].append(1e6 * passed / wanted.geometry.layers)
    base = statistics.median(took[arms[0].name])
    return {
        name: {
            "us_a_layer": round(statistics.median(found), 3),
            "us_a_layer_mean": round(statistics.fmean(found), 3),
            "us_a_layer_min": round(min(found), 3),
            "us_a_layer_max": round(max(found), 3),
            "over_plain_us_a_layer": round(statistics.median(found) - base, 3),
        }
        for name, found in took.items()
    }
