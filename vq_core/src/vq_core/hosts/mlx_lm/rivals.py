"""What mlx-lm itself offers, to be measured beside ours: its caches, its quantized attention, its Llama, its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from vq_core.errors import HostError
from vq_core.hosts.mlx_lm.generate import Run
from vq_core.hosts.mlx_lm.report import held_bytes
from vq_core.hosts.mlx_lm.versions import check_version

GROUP = 64
"""Group of mlx-lm's quantized cache, its own default."""
BITS = (2, 3, 4, 5, 6, 8)
"""Bits that ``mx.quantize`` takes in its affine mode."""
PREFILL = 2048
"""Tokens of a chunk in mlx-lm's prefill."""

Quantized = tuple[mx.array, mx.array, mx.array]


def quantized_refuses(bits: int | None, head_dim: int) -> str:
    """Why mlx-lm has no quantized cache for this; empty where it has one."""
    if bits is None:
        return "the method has no setting `bits`, so there is no quantized cache of as many"
    if bits not in BITS:
        return f"MLX quantizes to {', '.join(map(str, BITS))} bits, not {bits}"
    return f"head size {head_dim} is no multiple of mlx-lm's group of {GROUP}" if head_dim % GROUP else ""


def quantized_attention(
    queries: mx.array, keys: Quantized, values: Quantized, *, scale: float, bits: int
) -> mx.array:  # fmt: skip
    """mlx-lm's attention over its quantized cache; (B, H_q, L, D) in and out."""
    from mlx_lm.models.base import quantized_scaled_dot_product_attention

    # A product of its own: mlx-lm scales the queries that it is given in place.
    found: mx.array = quantized_scaled_dot_product_attention(
        queries * 1.0, keys, values, scale=scale, mask=None, group_size=GROUP, bits=bits
    )
    return found


def plain_caches(model: Any) -> list[Any]:
    """mlx-lm's own caches of a model, as it makes them."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def quantized_caches(layers: int, bits: int) -> list[Any]:
    """mlx-lm's quantized caches, empty."""
    from mlx_lm.models.cache import QuantizedKVCache

    return [QuantizedKVCache(GROUP, bits) for _ in range(layers)]


def build_llama(config: dict[str, int], dtype: str, seed: int = 0) -> Any:
    """mlx-lm's Llama of these sizes with random weights, evaluated block by block.

    Args:
        config: By the names of a config.json.
        dtype: Of the weights.
        seed: Of the weights; MLX's global random state is set.
    """
    check_version()
    from mlx_lm.models import llama

    mx.random.seed(seed)
    made: Any = llama
    model = made.Model(made.ModelArgs.from_dict({"model_type": "llama", "rms_norm_eps": 1e-5} | config))
    kind = getattr(mx, dtype)
    # Block by block: MLX makes weights in float32, and all of them at once would take twice the model's bytes more.
    for part in (*model.layers, model):
        part.set_dtype(kind)
        mx.eval(part.parameters())
    model.eval()
    return model


def step(model: Any, caches: Sequence[Any], token: mx.array) -> tuple[mx.array, mx.array]:
    """One step as ``mlx_lm.generate.generate_step`` builds it, greedy: the next token (1,) and log probabilities."""
    logits = model(token[None], cache=caches)[:, -1, :]
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    return mx.argmax(logprobs, axis=-1), logprobs.squeeze(0)


def pipelined(model: Any, caches: Sequence[Any], token: mx.array, steps: int) -> mx.array:
    """Some steps, each started before the token of the one before is read, as mlx-lm's loop does."""
    now = step(model, caches, token)
    mx.async_eval(*now)  # type: ignore[no-untyped-call]
    for _ in range(steps - 1):
        following = step(model, caches, now[0])
        mx.async_eval(*following)  # type: ignore[no-untyped-call]
        now[0].item()
        now = following
    now[0].item()
    return now[0]


def synchronous(model: Any, caches: Sequence[Any], token: mx.array, steps: int) -> mx.array:
    """Some steps, each waited for."""
    for _ in range(steps):
        token, logprobs = step(model, caches, token)
        mx.eval(token, logprobs)
    return token


def prefill(model: Any, caches: Sequence[Any], tokens: mx.array, chunk: int = PREFILL) -> None:
    """A prompt (n,) through a model as mlx-lm's loop reads it, all of it into the caches."""
    for start in range(0, tokens.size, chunk):
        model(tokens[start : start + chunk][None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()


def quantized_run(model: Any, tokenizer: Any, tokens: Sequence[int], max_tokens: int, bits: int) -> Run:
    """A greedy generation with mlx-lm's quantized cache from the first token on.

    Raises:
        HostError: mlx-lm cannot do it with this model or on this device.
    """
    from mlx_lm import stream_generate

    run = Run()
    caches = plain_caches(model)
    mx.reset_peak_memory()
    try:
        for piece in stream_generate(
            model, tokenizer, mx.array(list(tokens), mx.uint32), max_tokens=max_tokens, prompt_cache=caches,
            kv_bits=bits, kv_group_size=GROUP, quantized_kv_start=0,
        ):  # fmt: skip
            run.text += piece.text
            run.tokens.append(int(piece.token))
            run.prompt_tokens, run.prompt_tps = piece.prompt_tokens, piece.prompt_tps
            run.generation_tokens, run.generation_tps = piece.generation_tokens, piece.generation_tps
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise HostError(f"mlx-lm with kv_bits={bits}: {type(error).__name__}: {error}") from error
    run.peak_memory, run.held = mx.get_peak_memory(), sum(map(held_bytes, caches))
    return run
