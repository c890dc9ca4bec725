"""How many tokens a model can attend to, and how many it knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from vq_core.errors import HostError, SettingsError

NAMES = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "max_context_length", "context_length", "model_max_length", "block_size",
)  # fmt: skip
"""Names that configurations use for the length of the context."""
WRAPPED = ("text_config", "language_config", "llm_config")
"""Where a model of several parts keeps the configuration of its text part."""

POSITIONS = ("wpe", "pos")
"""Parts of the names of embeddings of positions."""


def context_length(config: Any) -> int | None:
    """Tokens of context, or ``None`` where the configuration does not say.

    A rotary scaling that extends the context counts.  Configurations differ in whether the length that they name
    holds it already, so the largest reading is taken: what is refused by it is too long in any reading.

    Args:
        config: A config.json as a mapping, or mlx-lm's arguments of a model (``model.args``).
    """
    lengths = [value for name in NAMES if (value := _number(_get(config, name))) is not None]
    named = int(lengths[0]) if lengths else None
    for name in WRAPPED:
        inner = _get(config, name)
        if inner is not None and named is None:
            return context_length(inner)
    if named is None:
        return None
    for name in ("rope_scaling", "rope_parameters"):
        scaling = _get(config, name)
        if isinstance(scaling, Mapping):
            factor = _number(scaling.get("factor")) or 1
            original = _number(scaling.get("original_max_position_embeddings")) or named
            named = max(named, int(original * factor))
    return named


def room(context: int | None, held: int, prompt: int, max_tokens: int, whose: str = "the model's") -> int:
    """How many of ``max_tokens`` new tokens fit after a cache of ``held`` tokens and a prompt.

    Raises:
        SettingsError: the prompt is longer than the context, or leaves no room for a token.
    """
    if context is None:
        return max_tokens
    total = held + prompt
    counted = f"{total} tokens" if not held else f"{total} tokens ({held} of the loaded cache and {prompt} new)"
    if total > context:
        raise SettingsError(f"the prompt makes {counted} and {whose} context holds {context}: shorten the prompt")
    if max_tokens and total == context:
        raise SettingsError(f"the prompt makes {counted} and {whose} context holds {context}: no new token fits")
    return min(max_tokens, context - total)


def vocabulary(model: Any) -> int:
    """Tokens that a model's embedding has a row for; MLX reads past the end of it for a larger one.

    The smallest of its embeddings counts: some models have a second one of the tokens, for each layer.

    Raises:
        HostError: neither an embedding nor the model's arguments tell.
    """
    kinds: Any = tuple(getattr(nn, name) for name in ("Embedding", "QuantizedEmbedding"))
    rows = [
        int(module.weight.shape[0])
        for path, module in model.named_modules()
        if isinstance(module, kinds) and not any(name in path.rpartition(".")[2] for name in POSITIONS)
    ]
    if rows:
        return min(rows)
    args = getattr(model, "args", None)
    for config in (args, *(_get(args, name) for name in WRAPPED)):
        if (value := _number(_get(config, "vocab_size"))) is not None:
            return int(value)
    raise HostError(
        f"{type(model).__name__} does not say how many tokens it knows, so tokens of a file are not fed to it"
    )


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
