"""Decode attention of one layer: ours by method and tier, MLX's own on a dense cache, mlx-lm's on a quantized one.

All arms attend to the same tokens in one process and in turn, on three clocks: ``queued`` (calls that are forced
together), ``single`` (one call and waiting for it) and, where CUPTI can be read, the sum of the GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.api.settings import parse_choice
from vq_core.bench import gpu_time
from vq_core.bench.attention_arms import Arm, Dense, Item, Packed, Quantized, Shape, build_pool, relative_error
from vq_core.bench.busy import Machine, look
from vq_core.bench.clock import POOL, compare, environment, queue_length
from vq_core.bench.figures import against
from vq_core.bench.filling import CHUNK
from vq_core.bench.gpu_time import KernelTimes
from vq_core.bench.inputs import noise
from vq_core.cache.policy import ATTENTION, LayerPolicy
from vq_core.calibration.stand_in import SAID, completed
from vq_core.errors import SettingsError, VQError
from vq_core.evaluate.arms import paired
from vq_core.hosts.mlx_lm import rivals

METHODS = ("kivi:bits=2", "kivi:bits=4")
DTYPES = ("float16", "bfloat16", "float32")
EVERY_TIER = "all"
"""Stands for every tier that the policy knows; those that cannot be had are left out and named."""
COPIED_GPU, COPIED_CPU = 512 << 20, 16 << 20
BEYOND_L2 = 192 << 20
"""Bytes that the packed codes of a pool exceed: three times the largest second-level cache there is."""


@attrs.frozen
class Wanted:
    """What to measure.

    Attributes:
        methods: Texts such as ``"kivi:bits=2"``, for keys and values both; one that holds one side only goes with
            ``PARTNER`` on the other.
        tokens: S, the lengths of the cache, window included.
        batch, heads, kv_heads, head_dim: B, query heads, KV heads, D.
        dtype: Of queries, keys and values.
        residual: Tokens of the exact window.
        tiers: ``attention=`` of the policy, or ``"all"``.
        rounds: Turns of the queued comparison, at least; four times as many of the single one.
        calls: Calls queued before one evaluation, at least.
        beyond: Bytes that the packed codes of a pool exceed.
        copied: Bytes of one array of the plain copy; ``None``: 512 MiB on a GPU, 16 MiB on a CPU.
        chunk: Tokens of one update when caches are filled.

    Raises:
        SettingsError: what is not accepted, before anything is made.
    """

    methods: tuple[str, ...] = METHODS
    tokens: tuple[int, ...] = (4096, 32768)
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "float16"
    residual: int = 128
    tiers: tuple[str, ...] = ("auto",)
    rounds: int = 12
    calls: int = 20
    beyond: int = BEYOND_L2
    copied: int | None = None
    chunk: int = CHUNK

    def __attrs_post_init__(self) -> None:
        counts = {
            name: getattr(self, name) for name in ("batch", "heads", "kv_heads", "head_dim", "rounds", "calls", "chunk")
        } | {f"tokens {n}": n for n in self.tokens}
        counts |= {} if self.copied is None else {"copied": self.copied}
        wrong = [f"{name} {value!r}" for name, value in counts.items() if value < 1]
        if wrong:
            raise SettingsError(f"{', '.join(wrong)}: whole numbers of 1 or more are needed")
        if not (self.methods and self.tokens and self.tiers) or self.beyond < 0:
            raise SettingsError("methods, tokens and tiers need at least one entry each, beyond 0 or more bytes")
        if self.heads % self.kv_heads:
            raise SettingsError(
                f"{self.heads} query heads and {self.kv_heads} KV heads: the first must be a multiple of the second"
            )
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype {self.dtype!r}: accepted are {', '.join(DTYPES)}")
        self.policies()

    def policies(self) -> list[tuple[str, LayerPolicy, bool]]:
        """Method, policy, and whether its tier was asked for by name."""
        every = [t for t in ATTENTION if t != "auto"]
        tiers = {t: True for t in self.tiers if t != EVERY_TIER}
        tiers |= {t: False for t in every if EVERY_TIER in self.tiers and t not in tiers}
        shape = [(self.kv_heads, self.head_dim)]
        made = {name: [completed(text, shape) for text in both] for name, both in map(paired, self.methods)}
        return [
            (name, LayerPolicy.make(keys=keys, values=values, attention=tier, residual=self.residual), named)
            for name, (keys, values) in made.items()
            for tier, named in tiers.items()
        ]


def measure(
    wanted: Wanted, *, tell: Callable[[str], None] = lambda line: None, machine: Callable[[], Machine] = look
) -> dict[str, Any]:
    """Measure and return the record, as JSON can hold it.

    Args:
        wanted: What.
        tell: Gets a line about what is done next.
        machine: For tests.

    Raises:
        SettingsError, UnsupportedShapeError, PluginError: a method or a tier that was asked for by name and cannot do
            this shape.
    """
    facts = environment()
    why_not = gpu_time.unavailable()
    copied = wanted.copied or (COPIED_CPU if mx.default_device() == mx.cpu else COPIED_GPU)
    tell(f"copy of {copied} bytes")
    copy = _copy(copied, why_not, machine)
    left_out: list[dict[str, Any]] = []
    rows = [_row(wanted, tokens, why_not, copy, left_out, tell, machine) for tokens in wanted.tokens]
    return {
        "benchmark": "attention",
        "environment": facts,
        "wanted": attrs.asdict(wanted),
        "gpu_clock": {"available": not why_not, "reason": why_not},
        "copy": copy,
        "rows": rows,
        "left_out": left_out,
    }


def _arms(wanted: Wanted, shape: Shape, left_out: list[dict[str, Any]]) -> list[Arm]:
    """MLX's own first: it is the base."""
    ours: list[Arm] = []
    bits: dict[int, None] = {}
    for text, policy, named in wanted.policies():
        arm = Packed(shape, policy, text, SAID if _learnt_here(text, policy) else "")
        reason = _tried(arm, shape, wanted, named)
        if reason:
            left_out.append({"tokens": shape.tokens, "arm": arm.name, "reason": reason})
            continue
        ours.append(arm)
        width = _whole(getattr(policy.keys.settings, "bits", None))
        refused = rivals.quantized_refuses(width, shape.head_dim)
        if refused:
            entry = {"tokens": shape.tokens, "arm": f"mlx-lm quantized, as {text}", "reason": refused}
            left_out += [entry] if entry not in left_out else []
        elif width is not None:
            bits[width] = None
    return [Dense(shape), *ours, *(Quantized(shape, width) for width in bits)]


def _whole(bits: Any) -> int | None:
    """A width that mlx-lm's quantized cache may have; ``None`` for what is no whole number of bits."""
    return int(bits) if isinstance(bits, (int, float)) and bits == int(bits) else None


def _learnt_here(text: str, policy: LayerPolicy) -> bool:
    """Whether a method's file is none that the text names."""
    return bool(getattr(policy.keys.settings, "artifact", "")) and "artifact" not in dict(parse_choice(text).options)


def _tried(arm: Packed, shape: Shape, wanted: Wanted, named: bool) -> str:
    """Why a tier cannot be had for this shape; empty where it can. One that was asked for by name raises."""
    trial = Packed(attrs.evolve(shape, tokens=min(shape.tokens, wanted.residual + 256)), arm.policy, arm.method)
    try:
        build_pool(trial.shape, [trial], 0, tell=lambda line: None)
        query = mx.ones((shape.batch, shape.heads, 1, shape.head_dim), getattr(mx, shape.dtype))
        mx.eval(trial.attend(Item(query, 0)))
    except VQError as error:
        if named:
            raise
        return str(error)
    return ""


def _row(
    wanted: Wanted, tokens: int, why_not: str, copy: dict[str, Any], left_out: list[dict[str, Any]],
    tell: Callable[[str], None], machine: Callable[[], Machine],
) -> dict[str, Any]:  # fmt: skip
    shape = Shape(tokens, wanted.batch, wanted.heads, wanted.kv_heads, wanted.head_dim, wanted.dtype)
    arms = _arms(wanted, shape, left_out)
    items = build_pool(shape, arms, wanted.beyond, chunk=wanted.chunk, tell=tell)
    tell(f"{tokens} tokens: {len(arms)} arms, {len(items)} inputs")
    calls = {arm.name: arm.attend for arm in arms}
    errors = {arm.name: relative_error(arm, items[0]) for arm in arms}
    inner = queue_length(calls, items, least=wanted.calls, most=max(100, wanted.calls))
    queued = compare(calls, items, rounds=wanted.rounds, inner=inner, attempts=3, machine=machine)
    single = compare(calls, items, rounds=4 * wanted.rounds, attempts=3, machine=machine)
    times = {} if why_not else _kernel_times(arms, items, tell)
    base = arms[0].name
    seconds = {
        arm.name: times[arm.name].total if arm.name in times else queued.arms[arm.name].median for arm in arms
    }  # fmt: skip
    rate = max(copy["bytes_per_second"], shape.dense_bytes / seconds[base])
    rivals_of = {f"{arm.bits} bits": arm.name for arm in arms if isinstance(arm, Quantized)}
    found: dict[str, Any] = {}
    for arm in arms:
        bases = [base] + ([n for n in rivals_of.values() if n != arm.name] if isinstance(arm, Packed) else [])
        found[arm.name] = arm.facts() | {
            "relative_error": errors[arm.name],
            "queued": [against(queued, arm.name, other) for other in bases] if arm.name != base else [],
            "single": [against(single, arm.name, other) for other in bases] if arm.name != base else [],
            "gpu": _gpu(times, arm.name, base, why_not),
            "floor": _floor(arm, rate, times, seconds[arm.name]),
        }
    del arms, items, calls
    mx.clear_cache()
    return attrs.asdict(shape) | {
        "residual": wanted.residual,
        "dense_bytes": shape.dense_bytes,
        "best_read_rate": {"bytes_per_second": round(rate), "clock": "queued" if why_not else "gpu"},
        "arms": found,
        "queued": queued.as_dict(),
        "single": single.as_dict(),
    }


def _kernel_times(arms: Sequence[Arm], items: Sequence[Item], tell: Callable[[str], None]) -> Mapping[str, KernelTimes]:
    """Of all but mlx-lm's arms, whose kernels are so many that a profile of them takes minutes."""
    tell("kernel by kernel")

    def chained(item: Item, out: mx.array) -> Item:
        count = item.queries.size
        return attrs.evolve(item, queries=gpu_time.marker(item.queries, out, count=count)[0])

    return gpu_time.kernel_times({a.name: a.attend for a in arms if not isinstance(a, Quantized)}, chained, items)


def _gpu(times: Mapping[str, KernelTimes], name: str, base: str, why_not: str) -> dict[str, Any]:
    if name not in times:
        return {"unavailable": why_not or "mlx-lm's quantized path is not profiled: it takes minutes"}
    mine, theirs = times[name], times[base]
    lost = mine.lost or theirs.lost
    return mine.as_dict() | {
        "base": base,
        "times_as_fast": None if lost else round(theirs.total / mine.total, 4),
        "ratio_noise_floor": round(max(mine.noise, theirs.noise), 4),
    }


def _floor(arm: Arm, rate: float, times: Mapping[str, KernelTimes], seconds: float) -> dict[str, Any] | None:
    """The packed bytes at the best rate seen, over what the arm took."""
    packed = arm.facts()["packed_bytes"]
    if not packed or not isinstance(arm, Packed):
        return None
    least = packed / rate
    gpu = times.get(arm.name)
    codes = None if gpu is None else gpu.as_dict()["codes_pass"]
    return {
        "packed_bytes": packed,
        "seconds": least,
        "fraction_of_total": round(least / seconds, 4),
        "fraction_of_codes_pass": None if codes is None else round(least / codes, 4),
        "clock": "queued" if gpu is None else "gpu",
    }


def _copy(copied: int, why_not: str, machine: Callable[[], Machine]) -> dict[str, Any]:
    """A plain copy: bytes read and written a second, on the best clock there is."""
    pool = [noise((max(8, copied // 2),), "float16", i) for i in range(POOL)]
    moved = 2 * pool[0].nbytes
    found = compare({"copy": mx.negative}, pool, rounds=4, inner=4, built=True, machine=machine)
    rates = {"queued": moved / found.arms["copy"].median}
    if not why_not:
        profiles = [gpu_time.record_kernels(lambda x=x: mx.negative(x)) for x in pool]  # type: ignore[misc]
        took = [sum(seconds for _, seconds in events) for events in profiles]
        rates |= {"gpu": moved / min(t for t in took if t)} if any(took) else {}
    return {
        "kernel": "mx.negative of float16: reads an array, writes another",
        "bytes_read_and_written": moved,
        "bytes_per_second": round(max(rates.values())),
        "by_clock": {clock: round(rate) for clock, rate in rates.items()},
        "queued": found.as_dict(),
    }
