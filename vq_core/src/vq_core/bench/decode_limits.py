"""What a model geometry reaches: the longest context of a budget, a long prefill, and thousands of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from vq_core.bench.busy import Machine
from vq_core.bench.decode_arms import Arm, filled
from vq_core.bench.figures import against, per_second
from vq_core.bench.filling import chunks
from vq_core.bench.geometry import Geometry
from vq_core.bench.turns import take_turns
from vq_core.hosts.mlx_lm import rivals
from vq_core.hosts.mlx_lm.report import held_bytes
from vq_core.kernels.backends import compiled, device_backend

FINEST = 256
"""Tokens by which a budget is filled at its end: mlx-lm's caches grow by so many."""
CHECKED = 20
"""Times that memory is looked at while steps run."""


def longest(
    arms: Sequence[Arm], geometry: Geometry, dtype: str, budget: int, chunk: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Fill caches until MLX's active memory has grown beyond a budget; the longest context that was within it."""
    found = {arm.name: _filled_to(arm, geometry, dtype, budget, chunk, tell) for arm in arms}
    base = found[arms[0].name]["tokens"]
    for entry in found.values():
        entry["times_the_base"] = round(entry["tokens"] / base, 4) if base else None
    return {"budget_bytes": budget, "base": arms[0].name, "arms": found}


def _filled_to(
    arm: Arm, geometry: Geometry, dtype: str, budget: int, chunk: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    tell(f"filling {arm.name} up to {budget:,} bytes")
    caches = arm.make()
    sizes = {"batch": 1, "kv_heads": geometry.kv_heads, "head_dim": geometry.head_dim, "dtype": dtype}
    (keys, values), *_ = chunks(chunk, seed=0, chunk=chunk, **sizes)  # type: ignore[arg-type]
    fine = min(FINEST, chunk)
    mx.clear_cache()
    before = mx.get_active_memory()
    tokens, used, within = 0, 0, {"tokens": 0, "resident_bytes": 0, "cache_bytes": 0}
    curve = []
    with arm.running():
        while True:
            # The last part in small pieces: what one chunk costs is known by then.
            cost = chunk * used / tokens if tokens else budget / 8
            count = chunk if used + 2 * cost < budget else fine
            for cache in caches:
                cache.update_and_fetch(keys[:, :, :count] + 0, values[:, :, :count] + 0)
                mx.eval(cache.state)
            tokens += count
            mx.clear_cache()
            used = mx.get_active_memory() - before
            curve.append([tokens, used])
            if used > budget:
                break
            within = {"tokens": tokens, "resident_bytes": used, "cache_bytes": sum(map(held_bytes, caches))}
    thin = max(1, len(curve) // 100)
    return within | {"passed_at_tokens": tokens, "passed_with_bytes": used, "curve": curve[::thin]}


def prefills(
    arms: Sequence[Arm], model: Any, geometry: Geometry, count: int, rounds: int, tell: Callable[[str], None],
    machine: Callable[[], Machine],
) -> dict[str, Any]:  # fmt: skip
    """Time and peak memory of a prompt of ``count`` tokens in mlx-lm's chunks, arms in turn."""
    tell(f"prefill of {count} tokens, {len(arms)} arms")
    prompt = mx.random.randint(0, geometry.vocab, (count,), key=mx.random.key(5))
    mx.eval(prompt)
    memory: dict[str, dict[str, Any]] = {}

    def of(arm: Arm) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            caches = arm.make()
            with arm.running():
                mx.synchronize()
                begin = time.perf_counter()
                rivals.prefill(model, caches, prompt)
                passed = time.perf_counter() - begin
            memory[arm.name] = {
                "peak_bytes": mx.get_peak_memory(),
                "peak_over_weights_bytes": mx.get_peak_memory() - before,
            } | arm.facts(caches)
            return {"prefill": passed}

        return run

    found = take_turns({arm.name: of(arm) for arm in arms}, rounds=rounds, machine=machine)["prefill"]
    base = arms[0].name
    return {
        "tokens": count,
        "chunk": rivals.PREFILL,
        "base": base,
        "arms": {
            arm.name: memory[arm.name]
            | {
                "tokens_per_second": per_second(found.arms[arm.name], count),
                "noise_floor": round(found.floor(arm.name), 4),
                "against": None if arm.name == base else against(found, arm.name, base),
                "peak_over_base_peak": round(memory[arm.name]["peak_bytes"] / memory[base]["peak_bytes"], 4),
            }
            for arm in arms
        },
        "comparison": found.as_dict(),
    }


def stability(
    arms: Sequence[Arm], model: Any, geometry: Geometry, dtype: str, start: int, steps: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Whether kernels are compiled after the third of many steps, and whether memory grows by more than the caches."""
    found = {}
    for arm in arms:
        tell(f"{steps} steps of {arm.name} from {start} tokens on")
        caches, _ = filled(arm, geometry, dtype, start)
        found[arm.name] = _watched(arm, model, caches, steps)
        del caches
        mx.clear_cache()
    return {
        "from_tokens": start,
        "steps": steps,
        "backend": device_backend(),
        "counted": "variants of vq's kernels that were given to MLX, each of which it compiles once",
        "arms": found,
    }


def _watched(arm: Arm, model: Any, caches: list[Any], steps: int) -> dict[str, Any]:
    token = mx.array([1])
    every = max(1, (steps - 3) // CHECKED)
    with arm.running():
        token = rivals.pipelined(model, caches, token, 3)
        third, begin, curve = compiled(), _memory(caches), []
        left = steps - 3
        while left:
            count = min(every, left)
            token = rivals.pipelined(model, caches, token, count)
            left -= count
            curve.append([steps - left, *_memory(caches)])
        end = _memory(caches)
    beyond = [active - held for _, active, held in curve]
    return {
        "compiled_at_the_third_step": third,
        "compiled_at_the_end": compiled(),
        "compiled_after_the_third_step": compiled() - third,
        "active_bytes": {"begin": begin[0], "end": end[0]},
        "cache_bytes": {"begin": begin[1], "end": end[1]},
        "active_beyond_caches_bytes": {"begin": begin[0] - begin[1], "end": end[0] - end[1], "most": max(beyond)},
        "curve": curve,
    }


def _memory(caches: list[Any]) -> tuple[int, int]:
    """Active bytes, and those of them that the caches hold."""
    mx.clear_cache()
    mx.synchronize()
    return mx.get_active_memory(), sum(map(held_bytes, caches))
