"""Load a model and generate with it, telling what the caches held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from vq_core.errors import HostError, SettingsError
from vq_core.hosts.mlx_lm.prepare import CompressedModel
from vq_core.hosts.mlx_lm.report import ModelReport, held_bytes
from vq_core.hosts.mlx_lm.versions import check_version

# What a folder that is no model, or is a damaged one, makes mlx-lm and its tokenizers raise.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)


@attrs.define
class Run:
    """One generation.

    Attributes:
        text: What was generated so far.
        prompt_tokens, prompt_tps, generation_tokens, generation_tps: Counts and tokens per second.
        peak_memory: Bytes, the most that MLX had allocated.
        held: Bytes of the caches when generation ended, spare capacity included.
        fp16: What the same tokens take in a plain float16 cache without spare capacity, 0 where not known.
        report: Of the packed caches; ``None`` for the model's own.
    """

    text: str = ""
    prompt_tokens: int = 0
    prompt_tps: float = 0.0
    generation_tokens: int = 0
    generation_tps: float = 0.0
    peak_memory: int = 0
    held: int = 0
    fp16: int = 0
    report: ModelReport | None = None


def load(model: str | Path) -> tuple[Any, Any]:
    """A model and its tokenizer, from a folder or the model hub.

    Raises:
        HostError: an mlx-lm that vq does not know, or a model that mlx-lm cannot load.
    """
    check_version()
    import mlx_lm

    folder = Path(model).expanduser()
    name = str(folder) if folder.exists() else str(model)
    if not folder.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise HostError(f"no such folder: {name}; give a folder in mlx-lm's format or a name on the model hub")
    try:
        loaded = mlx_lm.load(name)
    except _LOAD_ERRORS as error:
        raise HostError(f"mlx-lm cannot load {name!r}: {type(error).__name__}: {error}") from error
    return loaded[0], loaded[1]


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    handle: CompressedModel | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[str, Run]]:
    """Generate, yielding each piece of text and the run so far; the last run has the report.

    Args:
        model, tokenizer: From :func:`load`.
        prompt: Text.
        handle: A model prepared by :func:`~vq_core.hosts.mlx_lm.compress`; ``None``: the model's own caches.
        max_tokens: At most so many new tokens.
        temperature: 0 takes the most likely token.
        seed: Of the sampling.

    Raises:
        SettingsError: a prompt of no token, or numbers that are out of range.
    """
    from mlx_lm import stream_generate
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.sample_utils import make_sampler

    if not prompt and not tokenizer.encode(prompt):
        raise SettingsError("the prompt is empty: give at least one token to continue")
    if max_tokens < 1 or not temperature >= 0 or not 0 <= seed < 2**64:
        raise SettingsError(
            f"max_tokens must be 1 or more, temperature and seed 0 or more; got {max_tokens}, {temperature}, {seed}"
        )
    mx.random.seed(seed)
    mx.reset_peak_memory()
    caches = handle.make_cache() if handle is not None else make_prompt_cache(model)
    run = Run()
    for piece in stream_generate(
        model, tokenizer, prompt, max_tokens=max_tokens, sampler=make_sampler(temp=temperature), prompt_cache=caches
    ):
        run.text += piece.text
        run.prompt_tokens, run.prompt_tps = piece.prompt_tokens, piece.prompt_tps
        run.generation_tokens, run.generation_tps = piece.generation_tokens, piece.generation_tps
        yield piece.text, run
    run.peak_memory = mx.get_peak_memory()
    run.held = sum(map(held_bytes, caches))
    if handle is not None:
        run.report = handle.report(caches)
        run.fp16 = run.report.bytes.fp16
    else:
        run.fp16 = sum(_plain_fp16(c) for c in caches)
    yield "", run


def _plain_fp16(cache: Any) -> int:
    """float16 bytes of the tokens in a plain cache, without its spare capacity."""
    if isinstance(inner := getattr(cache, "caches", None), list | tuple):
        return sum(map(_plain_fp16, inner))
    if type(cache).__name__ != "KVCache" or cache.empty():
        return 0
    return sum(2 * a[..., : cache.offset, :].size for a in (cache.keys, cache.values))
