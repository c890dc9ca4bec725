"""Speculative decoding on packed caches against plain greedy decoding, on the model that ships: speculation.json.

python docs/results/speculation.py docs/results/speculation.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

from vq_core.bench.clock import environment
from vq_core.demo import MODEL_PATH, prompt_text
from vq_core.hosts.mlx_lm import compressed

STEPS, DRAFT = 200, "kivi:bits=2"


def main(file: Path) -> None:
    """Run all and write the file."""
    model, tokenizer = mlx_lm.load(str(MODEL_PATH))
    draft, _ = mlx_lm.load(str(MODEL_PATH))
    prompt = mx.array(tokenizer.encode(prompt_text()))
    greedy = [t for t, _ in generate_step(prompt, model, max_tokens=STEPS)]
    runs = []
    for bits in (4, 2):
        for residual, num in ((128, 4), (0, 4)):
            runs.append(one(model, draft, prompt, greedy, f"kivi:bits={bits}", residual, num))
            print(json.dumps(runs[-1]))
    record = {
        "environment": environment(),
        "model": "vq_core.demo, prompt of vq_core.demo.prompt_text",
        "what": "kl and top1: the target's distributions in the speculative run on packed caches against decoding "
        "on the model's own caches, teacher-forced on the tokens of the speculative run; plain_top1 and plain_kl: the "
        "same packed cache decoded greedily without speculation, on the same tokens; same_prefix: tokens before the "
        "first that differs from plain greedy decoding's; from_draft: share of tokens that the draft proposed",
        "draft": f"the same model on {DRAFT} caches, residual 0",
        "runs": runs,
    }
    file.write_text(json.dumps(record, indent=1) + "\n")


def one(model: Any, draft: Any, prompt: mx.array, greedy: list[int], method: str, residual: int, num: int) -> Any:
    """One speculative run and what it is compared with."""
    with (
        compressed(model, method=method, residual=residual) as handle,
        compressed(draft, method=DRAFT, residual=0) as other,
    ):
        caches = handle.make_cache()
        found = list(
            speculative_generate_step(
                prompt, model, draft, num_draft_tokens=num, max_tokens=STEPS,
                prompt_cache=[*caches, *other.make_cache()],
            )
        )  # fmt: skip
        tokens = [int(t) for t, _, _ in found]
        report = handle.report(caches)
        packed = forced(model, handle.make_cache(), prompt, tokens)
    scores = mx.stack([p for _, p, _ in found])
    plain = forced(model, make_prompt_cache(model), prompt, tokens)
    same = next((i for i, (a, b) in enumerate(zip(tokens, greedy, strict=True)) if a != b), STEPS)
    layers = report.packed_layers
    return {
        "method": method, "residual": residual, "num_draft_tokens": num, "tokens": STEPS,
        "kl": divergence(plain, scores), "top1": agreement(plain, scores),
        "plain_kl": divergence(plain, packed), "plain_top1": agreement(plain, packed),
        "same_prefix": same, "from_draft": sum(bool(d) for _, _, d in found) / STEPS,
        "packed_share": sum(r.packed for r in layers) / sum(r.tokens for r in layers),
        "approximate": sum(r.approximate for r in layers),
    }  # fmt: skip


def forced(model: Any, caches: Any, prompt: mx.array, tokens: list[int]) -> mx.array:
    """Log-probabilities before each of ``tokens``, fed one at a time after the prompt."""
    rows = []
    for ids in (prompt, *(mx.array([t]) for t in tokens[:-1])):
        if len(ids) > 1:
            model(ids[:-1][None], cache=caches)
        logits = model(ids[-1:][None], cache=caches)[0, -1].astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits))
        mx.eval(rows[-1])
    return mx.stack(rows)


def divergence(p: mx.array, q: mx.array) -> float:
    """Mean KL(p || q) in nats."""
    q = q.astype(mx.float32)
    q = q - mx.logsumexp(q, axis=-1, keepdims=True)  # mlx-lm normalises in the model's dtype
    return round(float(mx.where(p == -mx.inf, 0, mx.exp(p) * (p - q)).sum(axis=-1).mean()), 6)


def agreement(p: mx.array, q: mx.array) -> float:
    """Share of places with the same most likely token."""
    return round(float((p.argmax(axis=-1) == q.argmax(axis=-1)).astype(mx.float32).mean()), 4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
