"""What packing does to a model's predictions: KL, top-1 agreement and perplexity, with the bytes that it saves.

Teacher-forced: the text is fed one token a step after a prefill, to the model's own cache and to every packed one, so
that every scored token reads packed history (:mod:`vq_core.evaluate.divergence`).  A method that needs calibration and
names no artifact learns from the rest of the text, behind what is scored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from vq_core.api.facts import SIDES
from vq_core.bench.environment import environment
from vq_core.cache.shell import PackedKVCache
from vq_core.demo import MODEL_PATH, heldout_text
from vq_core.errors import SettingsError, VQError
from vq_core.evaluate.arms import PARTNER, Pair, by_bits, order_of, pairs
from vq_core.evaluate.divergence import PREFILL, Divergence, divergences
from vq_core.evaluate.learnt import Learning, needs
from vq_core.hosts.mlx_lm import compress
from vq_core.hosts.mlx_lm.context import context_length
from vq_core.hosts.mlx_lm.generate import load_with_config
from vq_core.hosts.mlx_lm.handle import CompressedModel
from vq_core.hosts.mlx_lm.report import held_bytes
from vq_core.plugins.choice import choose

OWN = "the model's own cache"


@attrs.frozen
class Wanted:
    """What is measured.

    Attributes:
        model: Folder or name, as mlx-lm takes it.
        methods, keys, values, partner: See :func:`vq_core.evaluate.arms.pairs`.
        text: A file of UTF-8 text; ``None``: the held-out text that ships, which other models may have been
            trained on.
        prefill: Tokens fed at once before scoring begins.
        scored: Tokens scored.
        residual, sink_tokens: Tokens that stay exact.
    """

    model: str
    methods: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    partner: str = PARTNER
    text: Path | None = None
    prefill: int = PREFILL
    scored: int = 600
    residual: int = 128
    sink_tokens: int = 0


@attrs.define(eq=False)
class _Arm:
    pair: Pair
    handle: CompressedModel
    caches: list[Any]


def measure(wanted: Wanted, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """One row a pair of methods.

    Raises:
        SettingsError: a text too short, longer than the model's context, or one in which nothing is packed.
        VQError: a model that cannot be loaded, a method that was asked for and refuses.
    """
    found, left_out = pairs(wanted.methods, wanted.keys, wanted.values, wanted.partner)
    text = _text(wanted.text)
    tell(f"loading {wanted.model}")
    model, tokenizer, config = load_with_config(wanted.model)
    context = context_length(config)
    ids, rest = _tokens(tokenizer.encode(text), wanted, context)
    arms: list[_Arm] = []
    with contextlib.ExitStack() as stack:
        learning = stack.enter_context(Learning())
        for pair in found:
            try:
                both = {"keys": pair.keys, "values": pair.values}
                for side, one in both.items():
                    if needs(one):
                        both[side] = learning.from_model(one, model, rest, context, tell)
                handle = compress(
                    model, keys=both["keys"], values=both["values"],
                    residual=wanted.residual, sink_tokens=wanted.sink_tokens,
                )  # fmt: skip
                stack.callback(handle.undo)
                arms.append(_Arm(pair, handle, handle.make_cache()))
            except VQError as error:
                if pair.asked:
                    raise
                left_out.append({"arm": pair.name, "reason": str(error)})
        if not arms:
            raise SettingsError("every method refuses this model: " + _said(left_out))
        native = arms[0].handle.report(arms[0].caches)
        if not native.packed_layers:
            reasons = dict.fromkeys(entry.reason for entry in native.layers)
            raise SettingsError(f"no layer of this model can be packed: {'; '.join(reasons)}")
        tell(f"scoring {wanted.scored} tokens with {len(arms)} caches and the model's own")
        own = arms[0].handle.plain_cache()
        results = divergences(
            model, ids, own, [arm.caches for arm in arms], prefill=wanted.prefill, tell=_every(100, wanted.scored, tell)
        )
        rows = [_row(arm, result) for arm, result in zip(arms, results, strict=True)]
    rows = by_bits(rows, "family", lambda row: 0 if not row["family"] else float(row["bits"]))
    numbers = rows[0]["numbers"]
    for row in rows:
        del row["numbers"]
    return {
        "environment": environment(),
        "conditions": attrs.asdict(wanted)
        | {"model": "demo" if wanted.model == str(MODEL_PATH) else wanted.model}
        | {"text": str(wanted.text or "vq_core/demo/heldout.txt")}
        | {"calibration_tokens": len(rest), "about": "vq_core.evaluate.on_model, docs/evaluation.md"},
        "own": _own(own, results[0], numbers),
        "rows": rows,
        "kl_falls_as_bits_rise": order_of([(r["family"], r["name"], r["bits"], r["kl"]) for r in rows]),
        "left_out": left_out,
    }  # fmt: skip


def _text(file: Path | None) -> str:
    if file is None:
        return heldout_text()
    try:
        return file.expanduser().read_bytes().decode()
    except UnicodeError as error:
        raise SettingsError(f"the text in {file} is not UTF-8: {error}") from None
    except OSError as error:
        raise SettingsError(f"the text cannot be read from {file}: {error.strerror or error}") from error


def _tokens(ids: list[int], wanted: Wanted, context: int | None) -> tuple[list[int], list[int]]:
    """The tokens of the evaluation, and those behind them."""
    if wanted.prefill < 1 or wanted.scored < 1:
        raise SettingsError(f"prefill and scored must be 1 or more, got {wanted.prefill} and {wanted.scored}")
    need = wanted.prefill + wanted.scored + 1
    for most, what in ((len(ids), "the text has"), (context, "the model's context holds")):
        if most is not None and most < need:
            raise SettingsError(
                f"a prefill of {wanted.prefill} and {wanted.scored} scored tokens need {need}; {what} {most}: "
                f"score at most {max(most - wanted.prefill - 1, 0)}, or take another --text"
            )
    return list(ids[:need]), list(ids[need:])


def _every(step: int, total: int, tell: Callable[[str], None]) -> Callable[[int], None]:
    return lambda done: tell(f"{done} of {total}") if done % step == 0 else None


def _said(left_out: list[dict[str, str]]) -> str:
    return "; ".join(f"{one['arm']}: {one['reason']}" for one in left_out)


def _row(arm: _Arm, found: Divergence) -> dict[str, Any]:
    report = arm.handle.report(arm.caches)
    held, layers = report.bytes, report.packed_layers
    caches = [c for cache in arm.caches for c in getattr(cache, "caches", (cache,)) if isinstance(c, PackedKVCache)]
    bound = caches[0]._history.bound  # type: ignore[union-attr]
    bits = {side: bound[side].layout.bits_per_element(bound[side].ctx.head_dim) for side in SIDES}
    sizes = [bound[side].ctx.head_dim for side in SIDES]
    # Numbers that a plain cache of the packed layers would hold; fp16 takes two bytes for each.
    numbers, tokens = held.fp16 / 2, max(layer.tokens for layer in layers)
    parts = {name: getattr(held, name) / tokens for name in ("codes", "metadata", "window", "spare", "held", "fp16")}
    return {
        "name": arm.pair.name, "family": arm.pair.family,
        "keys": choose(arm.pair.keys, "keys").text, "values": choose(arm.pair.values, "values").text,
        "learnt": [one for one in dict.fromkeys((arm.pair.keys, arm.pair.values)) if needs(one)],
        "bits": sum(sum(bits[side]) * n for side, n in zip(SIDES, sizes, strict=True)) / sum(sizes),
        "layout_bits": {side: dict(zip(("codes", "metadata"), bits[side], strict=True)) for side in SIDES},
        "kl": found.kl, "top1": found.top1, "perplexity": found.perplexity, "scored": found.tokens,
        "packed_share": found.packed_share, "tokens": tokens, "packed_layers": len(layers),
        "packed": max(layer.packed for layer in layers),
        "bytes": attrs.asdict(held) | {"held": held.held, "ratio": held.ratio, "native_layers": report.native_bytes},
        "bytes_per_token": parts, "all_in_bits": held.held * 8 / numbers, "numbers": numbers,
        "notes": list(report.notes),
    }  # fmt: skip


def _own(caches: list[Any], found: Divergence, numbers: float) -> dict[str, Any]:
    held = sum(map(held_bytes, caches))
    return {"name": OWN, "perplexity": found.reference_perplexity, "held": held, "all_in_bits": held * 8 / numbers}
