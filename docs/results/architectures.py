"""Writes architectures.json and architectures.md: what becomes of each architecture's caches.

``python docs/results/architectures.py`` from the root of the repository; the models are those of tests/host_mlx_lm.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from tests.host_mlx_lm.architectures import STEPS, apart, expected, follow, told  # noqa: E402
from tests.host_mlx_lm.configurations import CONFIGURATIONS  # noqa: E402
from tests.host_mlx_lm.models import build  # noqa: E402

import vq_core  # noqa: E402
from vq_core.bench.clock import environment  # noqa: E402
from vq_core.hosts.mlx_lm import ModelReport  # noqa: E402
from vq_core.testing import load_plugin, registered  # noqa: E402

METHODS = ("identity", "kivi:bits=4", "kivi:bits=2")
PREFILL, CHUNK, RESIDUAL = 768, 256, 128
LEFT_OUT = {
    "olmo": "with mlx-lm's own KVCache it raises at the first chunk of two tokens: it adds the mask to scores, and the "
    "mask is the text 'causal' (ValueError: Cannot perform inplace addition on an mlx.core.array and str)",
    "phi3small": "with mlx-lm's own KVCache its block-sparse layers corrupt memory on MLX's CPU build (the process is "
    "aborted: corrupted double-linked list)",
}


def survey(name: str) -> dict[str, Any]:
    """One architecture with each method.

    Raises:
        AssertionError: the report is not what the tests expect.
    """
    model = build(name)
    lengths = {"prefill": PREFILL, "chunk": CHUNK}
    tokens, scores = follow(model, make_prompt_cache(model), **lengths)
    found: dict[str, Any] = {"model_type": CONFIGURATIONS[name]["model_type"], "methods": {}}
    for method in METHODS:
        with vq_core.hosts.mlx_lm.compressed(model, method=method, residual=RESIDUAL) as handle:
            caches = make_prompt_cache(model)
            packed_tokens, packed_scores = follow(model, caches, **lengths)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # what is read densely stands in the table
                report = handle.report(caches)
        assert told(report) == expected(name), (name, told(report))
        found["caches"] = [{"place": p, "status": s, "reason": r} for p, s, r in told(report)]
        found["methods"][method] = _figures(report) | {
            "equal_tokens": sum(a == b for a, b in zip(tokens, packed_tokens, strict=True)),
            "largest_difference_of_log_probabilities": apart(packed_scores, scores),
        }
    return found


def _figures(report: ModelReport) -> dict[str, Any]:
    tokens = sum(r.tokens for r in report.packed_layers)
    return report.as_dict()["bytes"] | {
        "native": report.native_bytes,
        "tokens": tokens,
        "tokens_packed": report.packed,
    }


def table(record: dict[str, Any]) -> str:
    """The page."""
    models = record["models"]
    lines = [
        "# Architectures of mlx-lm",
        "",
        f"{len(models)} tiny models with random weights in float32 (tests/host_mlx_lm/configurations), mlx-lm "
        f"{record['environment']['versions']['mlx-lm']}: {PREFILL} tokens, {CHUNK} more, {STEPS} greedy steps, "
        f"residual={RESIDUAL}.",
        "Written by `python docs/results/architectures.py`; architectures.json has every cache and every figure.",
        "",
        "- packed: our cache, attention reads the codes. dense: our cache, packed at rest, but the model computes on",
        "  the fetched keys and values itself, so they are decoded for each step. native: the model's own cache.",
        "- identity stores what it is given: the same tokens as mlx-lm's own caches, or the cache is wrong.",
        "- ratio: the float16 bytes of the tokens held as codes over the bytes of codes, scales and zeros; in brackets",
        f"  float16 bytes of all tokens over all bytes held, the exact window ({RESIDUAL} to {RESIDUAL + 31} tokens)",
        "  and spare capacity. The window, scales and zeros are float32 here, as the models are; values of heads",
        "  narrower than a group of 32 are padded to one. A float16 model with heads of 32 and more has 3.2 and 5.33.",
        f"- tokens: of {STEPS} greedy steps how many are the same. Random weights say nothing about quality: one early",
        "  difference makes all later tokens different. Quality is measured on trained models.",
        "",
        "| model | packed | dense | native | identity: tokens | kivi 4 bits: ratio, tokens "
        "| kivi 2 bits: ratio, tokens | not packed or read densely, and why |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in sorted(models.items()):
        counts = Counter(c["status"] for c in found["caches"])
        exact, *lossy = (found["methods"][m] for m in METHODS)
        cells = [name, *(str(counts[s]) for s in ("packed", "dense", "native")), f"{exact['equal_tokens']}/{STEPS}"]
        cells += [f"{_packed(m):.2f} ({m['ratio']:.2f}), {m['equal_tokens']}/{STEPS}" for m in lossy]
        lines.append("| " + " | ".join([*cells, _why(found["caches"])]) + " |")
    total: Counter[str] = Counter(c["status"] for f in models.values() for c in f["caches"])
    lines += ["", f"Together {total['packed']} caches packed, {total['dense']} dense, {total['native']} native.", ""]
    lines += ["Left out, because mlx-lm itself cannot run them here:", ""]
    lines += [f"- {name}: {why}." for name, why in record["left_out"].items()]
    return "\n".join(lines) + "\n"


def _packed(figures: dict[str, Any]) -> float:
    """float16 bytes of the packed tokens over the bytes of what they are packed to."""
    share = figures["tokens_packed"] / figures["tokens"]
    ratio: float = share * figures["fp16"] / (figures["codes"] + figures["metadata"])
    return ratio


def _why(caches: list[dict[str, str]]) -> str:
    places: dict[str, list[str]] = {}
    for cache in caches:
        if cache["reason"]:
            places.setdefault(cache["reason"], []).append(cache["place"])
    return "; ".join(f"{', '.join(p)}: {reason}" for reason, p in places.items())


def main() -> None:
    """Run all and write."""
    record: dict[str, Any] = {"environment": environment(), "left_out": LEFT_OUT, "models": {}}
    with registered(load_plugin(ROOT / "tests" / "methods" / "identity.py")):
        for name in sorted(CONFIGURATIONS):
            record["models"][name] = survey(name)
            ratios = [m["ratio"] for m in record["models"][name]["methods"].values()]
            print(f"{name:20} fp16/held {ratios}", flush=True)
    folder = Path(__file__).parent
    (folder / "architectures.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "architectures.md").write_text(table(record))


if __name__ == "__main__":
    main()
