"""The shipped model with kernels on and off, tokens and stored bytes: ``python kernels-generate.py FILE``, on a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step

import vq_core
import vq_core.demo
from vq_core.bench.environment import environment
from vq_core.hosts.mlx_lm.report import ModelReport

TOKENS = 1500


def generated(model: Any, prompt: mx.array, method: str, kernels: Any) -> tuple[list[int], list[mx.array], ModelReport]:
    """Tokens, every stored array, and the report."""
    handle = vq_core.compress(model, method=method, residual=32, kernels=kernels)
    caches = handle.make_cache()
    tokens = [token for token, _ in generate_step(prompt, model, max_tokens=TOKENS, prompt_cache=caches)]
    found = tokens, [array for cache in caches for array in cache.state[1:]], handle.report(caches)
    handle.undo()
    return found


if __name__ == "__main__":
    loaded = mlx_lm.load(str(vq_core.demo.MODEL_PATH))
    text = (Path(vq_core.demo.__file__).parent / "prompt.txt").read_text()
    ids = mx.array(loaded[1].encode(text))
    rows = []
    for name in ("kivi:bits=4", "kivi:bits=2"):
        (a, x, report), (b, y, _) = (generated(loaded[0], ids, name, kernels) for kernels in ("auto", "off"))
        alike = all(mx.array_equal(p.view(mx.uint8), q.view(mx.uint8)).item() for p, q in zip(x, y, strict=True))
        rows.append(
            {
                "method": name,
                "prompt_tokens": ids.size,
                "generated": len(a),
                "same_tokens": a == b,
                "same_stored_bytes": alike,
                "packed": report.packed,
                "operations": list(report.packed_layers[0].operations),
            }
        )
    Path(sys.argv[1]).write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
