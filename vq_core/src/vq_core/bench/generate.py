"""Whole generations on a real model, as users run them: mlx-lm's caches and ours take turns in one process.

Texts that must agree are compared byte for byte: every run of one arm with its first, and arms that differ in nothing
but the kernels that encode and pack, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.bench.attention import METHODS
from vq_core.bench.busy import Machine, look
from vq_core.bench.clock import Comparison, environment
from vq_core.bench.figures import against
from vq_core.bench.turns import take_turns
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.report import Bytes
from vq_core.errors import HostError, SettingsError
from vq_core.hosts.mlx_lm import compressed, load_with_config, rivals, stream
from vq_core.hosts.mlx_lm.chat import encode
from vq_core.hosts.mlx_lm.context import context_length, room
from vq_core.hosts.mlx_lm.generate import Run
from vq_core.kernels.backends import device_backend

PLAIN = "mlx-lm"
"""Name of the base: the model's own caches."""
REPEATED, KERNELS = "repeated runs", "kernels on and off"


@attrs.frozen
class Wanted:
    """What to measure.

    Attributes:
        methods: Texts such as ``"kivi:bits=2"``, for keys and values both.
        max_tokens: New tokens of a generation.
        residual: Tokens of the exact window.
        rounds: Turns; each arm runs twice in each.

    Raises:
        SettingsError: what is not accepted, before a model is loaded.
    """

    methods: tuple[str, ...] = METHODS
    max_tokens: int = 128
    residual: int = 128
    rounds: int = 3

    def __attrs_post_init__(self) -> None:
        if self.max_tokens < 2 or self.rounds < 1:
            raise SettingsError(
                f"max_tokens {self.max_tokens}, rounds {self.rounds}: 2 new tokens and 1 round or more are needed"
            )
        if not self.methods:
            raise SettingsError("methods need at least one entry")
        for text in self.methods:
            LayerPolicy.make(method=text, residual=self.residual)


@attrs.frozen(eq=False)
class Arm:
    """One way to generate.

    Attributes:
        name: For the record.
        kind: ``"plain"``, ``"mlx-lm quantized"`` or ``"vq"``.
        run: One generation.
        options: Of ``compress``, for ours.
    """

    name: str
    kind: str
    run: Callable[[], Run]
    options: Mapping[str, Any] = attrs.field(factory=dict)


def measure(
    model_path: str, prompt: str, wanted: Wanted, *, name: str = "", tell: Callable[[str], None] = lambda line: None,
    machine: Callable[[], Machine] = look,
) -> dict[str, Any]:  # fmt: skip
    """Measure and return the record, as JSON can hold it.

    Args:
        model_path: What mlx-lm loads.
        prompt: The text to continue, as it is, without a chat template.
        wanted: What.
        name: Of the model, for the record.
        tell: Gets a line about what is done next.
        machine: For tests.

    Raises:
        HostError: a model that mlx-lm cannot load.
        SettingsError, UnsupportedShapeError, PluginError: a prompt that does not fit, a method that does not.
    """
    facts = environment()
    tell(f"loading {name or model_path}")
    model, tokenizer, config = load_with_config(model_path)
    tokens, _ = encode(tokenizer, prompt, None, None, answer=True)
    count = room(context_length(config), 0, len(tokens), wanted.max_tokens)
    left_out: list[dict[str, Any]] = []
    arms = _arms(wanted, model, tokenizer, config, tokens, count, left_out)
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}

    def of(arm: Arm) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            tell(f"{arm.name}, run {len(runs[arm.name]) + 1}")
            mx.clear_cache()
            done = arm.run()
            done.continuation = None  # it holds the caches
            runs[arm.name].append(done)
            return {"prefill": 1 / done.prompt_tps, "decode": 1 / done.generation_tps}

        return run

    found = take_turns({arm.name: of(arm) for arm in arms}, rounds=wanted.rounds, machine=machine)
    agreements = _agreements(arms, runs)
    return {
        "benchmark": "generate",
        "environment": facts,
        "model": name or model_path,
        "config": {k: v for k, v in config.items() if isinstance(v, int | float | str)},
        "wanted": attrs.asdict(wanted),
        "prompt_tokens": len(tokens),
        "max_tokens": count,
        "arms": {arm.name: _entry(arm, runs, found) for arm in arms},
        "prefill": found["prefill"].as_dict(),
        "decode": found["decode"].as_dict(),
        "agreements": agreements,
        "agree": all(entry["agree"] for entry in agreements if entry["must"]),
        "left_out": left_out,
    }


def _arms(
    wanted: Wanted, model: Any, tokenizer: Any, config: Mapping[str, Any], tokens: Sequence[int], count: int,
    left_out: list[dict[str, Any]],
) -> list[Arm]:  # fmt: skip
    backend = device_backend()

    def ours(**options: Any) -> Callable[[], Run]:
        def run() -> Run:
            with compressed(model, residual=wanted.residual, **options) as handle:
                return _last(stream(model, tokenizer, tokens, handle=handle, max_tokens=count, config=config))

        return run

    def plain() -> Run:
        return _last(stream(model, tokenizer, tokens, max_tokens=count, config=config))

    arms = [Arm(PLAIN, "plain", plain)]
    packed: list[Arm] = []
    bits: dict[int, None] = {}
    for text in dict.fromkeys(wanted.methods):
        ways: dict[str, dict[str, Any]] = {text: {}}
        if backend is None:
            left_out.append({"arm": f"{text}, kernels off", "reason": "no kernels on this device: they are off anyway"})
        else:
            # Packing kernels are exact, kernels of attention round otherwise: what differs in the first alone agrees.
            ways[f"{text}, kernels off"] = {"kernels": "off", "attention": "mlx"}
            ways[f"{text}, attention mlx"] = {"attention": "mlx"}
        packed += [
            Arm(name, "vq", ours(method=text, **more), {"method": text, **more}) for name, more in ways.items()
        ]  # fmt: skip
        width = getattr(LayerPolicy.make(method=text).keys.settings, "bits", None)
        refused = rivals.quantized_refuses(width, _head_dim(config))
        if refused:
            left_out.append({"arm": f"mlx-lm quantized, as {text}", "reason": refused})
        elif width is not None:
            bits[width] = None
    for width in bits:
        run = _quantized(model, tokenizer, tokens, count, width)
        try:
            run()
        except HostError as error:
            left_out.append({"arm": f"mlx-lm quantized {width} bits", "reason": str(error)})
            continue
        arms.append(Arm(f"mlx-lm quantized {width} bits", "mlx-lm quantized", run))
    return arms + packed


def _quantized(model: Any, tokenizer: Any, tokens: Sequence[int], count: int, bits: int) -> Callable[[], Run]:
    return lambda: rivals.quantized_run(model, tokenizer, tokens, count, bits)


def _head_dim(config: Mapping[str, Any]) -> int:
    """As the configuration says; 0, which any group divides, where it does not: the trial run decides then."""
    inner = config.get("text_config") or config
    found = inner.get("head_dim") or 0
    heads = inner.get("num_attention_heads") or 0
    return int(found or (inner.get("hidden_size", 0) // heads if heads else 0))


def _last(pieces: Any) -> Run:
    run: Run | None = None
    for _, latest in pieces:
        run = latest
    assert run is not None
    return run


def _entry(arm: Arm, runs: Mapping[str, list[Run]], found: Mapping[str, Comparison]) -> dict[str, Any]:
    first, plain = runs[arm.name][0], runs[PLAIN][0]
    entry: dict[str, Any] = {
        "kind": arm.kind,
        "options": dict(arm.options),
        "text": first.text,
        "generated_tokens": len(first.tokens),
        "prefill_tokens_per_second": _rates(found["prefill"], arm.name),
        "decode_tokens_per_second": _rates(found["decode"], arm.name),
        "peak_bytes": max(run.peak_memory for run in runs[arm.name]),
        "held_bytes": first.held,
        "plain_held_bytes_over_own": round(plain.held / first.held, 4) if first.held else None,
        "same_tokens_as_plain": _same(first.tokens, plain.tokens),
    }
    if first.report is not None:
        held = first.report.bytes
        packed, exact, approximate = first.report.tokens()
        entry |= {
            "attention": list(dict.fromkeys(layer.attention for layer in first.report.packed_layers)),
            "layers_packed": len(first.report.packed_layers),
            "layers_native": len(first.report.layers) - len(first.report.packed_layers),
            "tokens_packed": packed,
            "tokens_exact": exact + approximate,
            "kv_ratio_with_window": round(held.ratio, 4),
            "kv_ratio_without_window": _without_window(held, packed, packed + exact + approximate),
            "notes": list(first.report.notes),
        }
    return entry


def _without_window(held: Bytes, packed: int, tokens: int) -> float | None:
    """fp16 bytes of the packed tokens over those of their codes and metadata."""
    own = held.codes + held.metadata
    return round(held.fp16 * packed / tokens / own, 4) if own and tokens else None


def _rates(found: Comparison, name: str) -> dict[str, Any]:
    timing = found.arms[name]
    return {
        "median": round(1 / timing.median, 2),
        "min": round(1 / timing.high, 2),
        "max": round(1 / timing.low, 2),
        "runs": timing.rounds,
        "noise_floor": round(found.floor(name), 4),
        "against": None if name == found.base else against(found, name, found.base),
    }


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens from the first on that are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _agreements(arms: Sequence[Arm], runs: Mapping[str, list[Run]]) -> list[dict[str, Any]]:
    """Which texts were compared, whether they must agree, and whether they do."""
    found = []
    for arm in arms:
        texts = [run.text.encode() for run in runs[arm.name]]
        found.append(
            {"what": REPEATED, "arms": [arm.name], "runs": len(texts), "must": True,
             "agree": all(text == texts[0] for text in texts)}
        )  # fmt: skip
    for arm in arms:
        off = next((other for other in arms if other.name == f"{arm.options.get('method')}, kernels off"), None)
        if arm.kind != "vq" or off is None or arm is off:
            continue
        mine, theirs = runs[arm.name][0], runs[off.name][0]
        found.append(
            {"what": KERNELS, "arms": [arm.name, off.name], "runs": 2,
             "must": arm.options.get("attention") == "mlx",
             "agree": mine.text.encode() == theirs.text.encode(),
             "same_tokens": _same(mine.tokens, theirs.tokens)}
        )  # fmt: skip
    return found
