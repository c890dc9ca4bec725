"""Load a model and generate with it, telling what the caches held."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from vq_core.errors import HostError, SettingsError, VQError
from vq_core.hosts.mlx_lm.chat import Chat, Ending, check_place, encode
from vq_core.hosts.mlx_lm.context import context_length, room
from vq_core.hosts.mlx_lm.continuation import Continuation, check_tokens
from vq_core.hosts.mlx_lm.draft import Draft, DraftRun, check_draft, check_rewind, read
from vq_core.hosts.mlx_lm.prepare import CompressedModel
from vq_core.hosts.mlx_lm.report import ModelReport, held_bytes
from vq_core.hosts.mlx_lm.versions import check_version


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
        tokens: The new tokens, one that ended the text included.
        context: Tokens that the model can attend to, as its configuration says; ``None``: it does not.
        loaded: Tokens that were held before the prompt.
        draft: What the draft model did; ``None`` without one.
        notes: What the user should know, in words.
        continuation: From where to go on, once generation has ended.
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
    tokens: list[int] = attrs.Factory(list)
    context: int | None = None
    loaded: int = 0
    draft: DraftRun | None = None
    notes: list[str] = attrs.Factory(list)
    continuation: Continuation | None = None


def load(model: str | Path) -> tuple[Any, Any]:
    """A model and its tokenizer, from a folder or the model hub.

    Raises:
        HostError: an mlx-lm that vq does not know, or a model that mlx-lm cannot load.
    """
    return load_with_config(model)[:2]


def load_with_config(model: str | Path) -> tuple[Any, Any, dict[str, Any]]:
    """As :func:`load`, and the model's config.json, of which mlx-lm's models keep a part only."""
    check_version()
    import mlx_lm

    if not str(model).strip():
        raise HostError("the model's name is empty; give a folder in mlx-lm's format or a name on the model hub")
    folder = Path(model).expanduser()
    name = str(folder) if folder.exists() else str(model)
    if not folder.exists() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise HostError(f"no such folder: {name}; give a folder in mlx-lm's format or a name on the model hub")
    try:
        loaded, tokenizer, config = mlx_lm.load(name, return_config=True)  # type: ignore[misc]
    except VQError:
        raise
    except Exception as error:  # libraries of the hub, of tokenizers and of models raise what they like
        raise HostError(f"mlx-lm cannot load {name!r}: {type(error).__name__}: {error}") from error
    return loaded, tokenizer, config


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int],
    *,
    handle: CompressedModel | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat: Chat | None = None,
    after: Continuation | None = None,
    draft: Draft | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, Run]]:
    """Generate, yielding each piece of text and the run so far; the last run has the report.

    Args:
        model, tokenizer: From :func:`load`.
        prompt: Text, or tokens.
        handle: A model prepared by :func:`~vq_core.hosts.mlx_lm.compress`; ``None``: the model's own caches.
        max_tokens: At most so many new tokens; 0 only reads the prompt, whose message then stays open.
        temperature: 0 takes the most likely token.
        seed: Of the sampling.
        chat: The model's chat template; ``None``: the prompt as it is.
        after: Where an earlier generation ended: its caches go on, and are changed.
        draft: A model that proposes tokens.
        config: The model's config.json, which says how long its context is; by default what mlx-lm keeps of it.

    Raises:
        SettingsError: a prompt of no token or one beyond the context, numbers that are out of range, a draft that
            does not fit; all before the first token.
    """
    if max_tokens < 0 or not temperature >= 0 or not 0 <= seed < 2**64:
        raise SettingsError(
            f"max_tokens, temperature and seed must be 0 or more; got {max_tokens}, {temperature}, {seed}"
        )
    check_place(tokenizer, chat, after.ending if after else None)
    if after is not None and chat is not None and not chat.config:
        chat = attrs.evolve(chat, config=after.template)
    tokens, state = encode(tokenizer, prompt, chat, after.ending if after else None, answer=max_tokens > 0)
    run = Run(context=context_length(config or getattr(model, "args", None)), loaded=after.count if after else 0)
    wanted = max_tokens
    max_tokens = room(run.context, run.loaded, len(tokens), max_tokens)
    caches = after.caches if after else _fresh(model, handle)
    drafts = []
    context = run.context
    if draft is not None:
        theirs = context_length(draft.config or getattr(draft.model, "args", None))
        max_tokens = room(theirs, run.loaded, len(tokens), max_tokens, "the draft model's")
        context = min((c for c in (context, theirs) if c is not None), default=None)
        drafts = _draft_caches(draft, model, tokenizer, caches, after, run.loaded + len(tokens) + max_tokens)
        run.draft = DraftRun(draft.num_tokens)
    if max_tokens < wanted:
        run.notes.append(f"at most {max_tokens} new tokens, not {wanted}: no more fit into the context of {context}")
    mx.random.seed(seed)
    mx.reset_peak_memory()
    if draft is not None and after is not None:
        assert after.tokens is not None
        read(draft.model, drafts, after.tokens)
    if max_tokens:
        for piece in _pieces(model, tokenizer, tokens, max_tokens, temperature, caches, draft, drafts):
            _count(run, piece)
            yield piece.text, run
        if run.draft is not None and not piece.from_draft:
            # mlx-lm's speculative decoding has shown this token and not fed it; without a draft all are fed.
            read(model, caches, run.tokens[-1:])
    else:
        _read_only(run, model, tokens, caches)
    _finish(run, caches, handle)
    if run.draft is not None and draft is not None:
        run.draft.held = sum(map(held_bytes, drafts))
        run.draft.report = draft.handle.report(drafts) if draft.handle is not None else None
    held = None if after is not None and after.tokens is None else [*(after.tokens or [] if after else []), *tokens]
    last = run.tokens[-1] if run.tokens and run.tokens[-1] in tokenizer.eos_token_ids else None
    run.continuation = Continuation(
        caches, run.loaded + len(tokens) + len(run.tokens), None if held is None else [*held, *run.tokens],
        Ending(state, last), dict(chat.config if chat is not None else after.template if after is not None else {}),
    )  # fmt: skip
    yield "", run


def _fresh(model: Any, handle: CompressedModel | None) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return handle.make_cache() if handle is not None else list(make_prompt_cache(model))


def _draft_caches(
    draft: Draft, model: Any, tokenizer: Any, caches: list[Any], after: Continuation | None, length: int
) -> list[Any]:
    """The draft's caches, still empty, once it is known that it can be used."""
    check_draft(draft, tokenizer)
    made = _fresh(draft.model, draft.handle)
    check_rewind(caches, model, length + draft.num_tokens, "the model")
    check_rewind(made, draft.model, length + draft.num_tokens, "the draft model")
    if after is not None and after.tokens is None:
        raise SettingsError(
            "the loaded cache does not say which tokens it holds, so a draft model cannot read them: leave it out, or "
            "load a cache that vq generate has saved"
        )
    if after is not None and after.tokens is not None:
        check_tokens(after.tokens, draft.model, "the loaded cache, which the draft model is to read,")
    return made


def _pieces(
    model: Any, tokenizer: Any, tokens: list[int], max_tokens: int, temperature: float, caches: list[Any],
    draft: Draft | None, drafts: list[Any],
) -> Iterator[Any]:  # fmt: skip
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    more = {} if draft is None else {"draft_model": draft.model, "num_draft_tokens": draft.num_tokens}
    yield from stream_generate(
        model, tokenizer, mx.array(tokens, mx.uint32), max_tokens=max_tokens, sampler=make_sampler(temp=temperature),
        prompt_cache=[*caches, *drafts] if draft is not None else caches, **more,
    )  # fmt: skip


def _count(run: Run, piece: Any) -> None:
    run.text += piece.text
    run.tokens.append(int(piece.token))
    run.prompt_tokens, run.prompt_tps = piece.prompt_tokens, piece.prompt_tps
    run.generation_tokens, run.generation_tps = piece.generation_tokens, piece.generation_tps
    if run.draft is not None:
        run.draft.accepted += piece.from_draft


def _read_only(run: Run, model: Any, tokens: list[int], caches: list[Any]) -> None:
    from mlx_lm.generate import generate_step

    start = time.perf_counter()
    for _ in generate_step(mx.array(tokens, mx.uint32), model, max_tokens=0, prompt_cache=caches):
        pass
    mx.eval([cache.state for cache in caches])
    run.prompt_tokens, run.prompt_tps = len(tokens), len(tokens) / (time.perf_counter() - start)


def _finish(run: Run, caches: list[Any], handle: CompressedModel | None) -> None:
    run.peak_memory = mx.get_peak_memory()
    run.held = sum(map(held_bytes, caches))
    if handle is not None:
        run.report = handle.report(caches)
        run.fp16 = run.report.bytes.fp16
    else:
        run.fp16 = sum(_plain_fp16(c) for c in caches)


def _plain_fp16(cache: Any) -> int:
    """float16 bytes of the tokens in a plain cache, without its spare capacity."""
    if isinstance(inner := getattr(cache, "caches", None), list | tuple):
        return sum(map(_plain_fp16, inner))
    if type(cache).__name__ != "KVCache" or cache.empty():
        return 0
    return sum(2 * a[..., : cache.offset, :].size for a in (cache.keys, cache.values))
