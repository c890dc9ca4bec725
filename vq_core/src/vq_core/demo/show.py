"""The demonstration: one prompt on the model that ships, with the fp16 cache and with packed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from vq_core.hosts.mlx_lm.generate import Run

METHODS = ("kivi:bits=4", "kivi:bits=2")
PREFILL = 512
TEMPERATURE = 0.7
"""At 0 so small a model soon repeats itself."""


@attrs.frozen
class Arm:
    """One cache of the demonstration.

    Attributes:
        name: The method in text form, or ``fp16``.
        prompt_end: The end of the prompt, for showing.
        text: What was generated.
        tokens, packed: Tokens of a layer, and how many of them are packed.
        held: Bytes of every array the caches hold.
        fp16: What the same tokens take in a float16 cache without spare capacity.
        kl, top1, perplexity, scored, packed_share: See :class:`vq_core.evaluate.divergence.Divergence`.
    """

    name: str
    prompt_end: str
    text: str
    tokens: int
    packed: int
    held: int
    fp16: int
    kl: float
    top1: float
    perplexity: float
    scored: int
    packed_share: float

    @property
    def ratio(self) -> float:
        """fp16 bytes over bytes held."""
        return self.fp16 / self.held

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return attrs.asdict(self) | {"ratio": round(self.ratio, 4)}


def run_demo(
    *,
    methods: Sequence[str] = METHODS,
    max_tokens: int = 200,
    temperature: float = TEMPERATURE,
    scored: int = 600,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Arm]:
    """Generate and score with the model's own cache and with each method.

    Args:
        methods: Text forms of methods that hold both sides.
        max_tokens: New tokens.
        temperature: Of the sampling, which draws the same random numbers for every cache.
        scored: Tokens of held-out text scored after a prefill of 512.
        tell: Receives a line about each thing done.

    Raises:
        VQError: a method that is unknown or refuses.
    """
    from vq_core.cache.policy import LayerPolicy
    from vq_core.demo import MODEL_PATH, heldout_text, prompt_text
    from vq_core.errors import SettingsError
    from vq_core.evaluate.divergence import divergences
    from vq_core.hosts.mlx_lm import compress
    from vq_core.hosts.mlx_lm.context import context_length
    from vq_core.hosts.mlx_lm.generate import load_with_config, stream

    for method in methods:
        LayerPolicy.make(method=method)
    tell(f"loading {MODEL_PATH}")
    model, tokenizer, config = load_with_config(MODEL_PATH)
    prompt, text = prompt_text(), tokenizer.encode(heldout_text())
    if not methods or not 1 <= scored < len(text) - PREFILL:
        raise SettingsError(
            f"the demo scores 1 to {len(text) - PREFILL - 1} tokens of at least one method, got {scored}"
        )
    read, context = len(tokenizer.encode(prompt)), context_length(config)
    if context is not None and read + max_tokens > context:
        raise SettingsError(
            f"{max_tokens} new tokens do not fit: the demo's prompt has {read}, the model's context holds {context}; "
            f"at most {context - read} fit"
        )
    end = prompt.splitlines()[-1][-80:]
    sampling: Any = {"max_tokens": max_tokens, "temperature": temperature}
    tell(f"fp16: continuing a prompt of {read} tokens by {max_tokens}")
    plain = _last(stream(model, tokenizer, prompt, **sampling))
    runs, caches = [], []
    handle = None
    try:
        for method in methods:
            handle = compress(model, method=method)
            tell(f"{method}: continuing the same prompt")
            runs.append(_last(stream(model, tokenizer, prompt, handle=handle, **sampling)))
            caches.append(handle.make_cache())
        assert handle is not None
        tell(f"scoring {scored} tokens of another text with every cache")
        found = divergences(model, text[: PREFILL + scored + 1], handle.plain_cache(), caches, prefill=PREFILL)
    finally:
        if handle is not None:
            handle.undo()
    tokens = plain.prompt_tokens + plain.generation_tokens
    unchanged = found[0].reference_perplexity
    arms = [Arm("fp16", end, plain.text, tokens, 0, plain.held, plain.fp16, 0.0, 1.0, unchanged, scored, 0.0)]
    for method, run, figures in zip(methods, runs, found, strict=True):
        assert run.report is not None
        layer = run.report.packed_layers[0]
        quality = (figures.kl, figures.top1, figures.perplexity, figures.tokens, figures.packed_share)
        arms.append(Arm(method, end, run.text, layer.tokens, layer.packed, run.held, run.fp16, *quality))
    return arms


def _last(runs: Iterator[tuple[str, Run]]) -> Run:
    """Run to the end."""
    *_, (_, last) = runs
    return last
