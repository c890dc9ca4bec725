"""What was run on the H200: the error of attention from packed codes against a dense reference.

The times that stand in ``attention-h200.json`` too came from an older benchmark, in the place of which is
``vq bench attention``.
"""

import json
import os

import mlx.core as mx

from vq_core.bench.clock import environment
from vq_core.cache.shell import PackedKVCache

CASES = ((1, 1, 1000, 2, 128), (2, 1, 333, 4, 128), (1, 5, 700, 8, 64), (1, 40, 900, 4, 128), (1, 1, 500, 3, 96))


def relative_error(dtype: mx.Dtype, rows: int, queries: int, tokens: int, bits: int, dim: int) -> float:
    """Of attention over packed codes, against dense float32 attention over the decoded cache."""
    cache = PackedKVCache(method=f"kivi:bits={bits}", residual=32)
    keys, values = (mx.random.normal((rows, 8, tokens, dim)).astype(dtype) for _ in range(2))
    cache.update_and_fetch(keys, values)
    for i in range(40):
        cache.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    k, v = (mx.repeat(x.astype(mx.float32), 4, axis=1) for x in cache.decode())
    q = mx.random.normal((rows, 32, queries, dim)).astype(dtype)
    got = cache.attend(q, scale=0.09, mask="causal").astype(mx.float32)
    length = k.shape[2]
    scores = (q.astype(mx.float32) * 0.09) @ k.swapaxes(-1, -2)
    seen = mx.arange(length - queries, length)[:, None] >= mx.arange(length)[None]
    want = mx.softmax(mx.where(seen, scores, -1e30), -1) @ v
    return float(mx.linalg.norm(got - want) / mx.linalg.norm(want))  # type: ignore[arg-type]


if __name__ == "__main__":
    errors = {}
    for kind in (mx.float16, mx.float32):
        for b, n, s, w, d in CASES:
            errors[f"{kind} B{b} L{n} S{s} bits{w} D{d}"] = relative_error(kind, b, n, s, w, d)
    record = {"environment": environment(), "relative_error": errors}
    with open(os.path.join(os.environ.get("OUT", "."), "h200.json"), "w") as file:
        json.dump(record, file, indent=1)
