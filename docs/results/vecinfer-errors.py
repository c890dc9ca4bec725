"""Squared error of VecInfer's codebooks on N(0, 1), learnt from many numbers and measured on others: a JSON file.

python docs/results/vecinfer-errors.py FILE
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from vq_core.api import Artifact, Calibration, PrepareContext
from vq_vecinfer import method
from vq_vecinfer.method import VecInferSettings

FIGURES = {
    (8, 256): 0.3260,
    (4, 256): 0.0977,
    (4, 4096): 0.0272,
    (8, 1024): 0.2367,
    (4, 1024): 0.0516,
    (2, 256): 0.0093,
}
"""methods.md, section 6(c)."""
HEADS, DIM, ROUNDS = 2, 64, 25
EACH = 64
"""Sub-vectors a centroid that are learnt from, 65,536 at least."""


def row(sub: int, centroids: int, figure: float) -> dict[str, Any]:
    """One setting, of values (no transform)."""
    vectors = max(65536, EACH * centroids)
    learnt_from = np.random.default_rng(0).standard_normal((HEADS, vectors * sub // (HEADS * DIM), DIM), np.float32)
    low, high, mean = (mx.array(f(axis=1)) for f in (learnt_from.min, learnt_from.max, learnt_from.mean))
    settings = VecInferSettings(sub=sub, centroids=centroids)
    ctx = PrepareContext("values", HEADS, DIM, DIM, "float32", 0)
    begin = time.perf_counter()
    calibration = Calibration(mx.array(learnt_from), learnt_from.shape[1], low, high, mean, ROUNDS)
    arrays = method.vq_calibrate(ctx, settings, calibration)
    seconds = time.perf_counter() - begin
    state = method.vq_prepare(ctx, settings, Artifact(arrays, "none"))
    x = np.random.default_rng(1).standard_normal((1, HEADS, 65536 * sub // (HEADS * DIM), DIM), np.float32)
    packed = method.vq_pack(state, method.vq_encode(state, mx.array(x), {}))
    error = float(np.square(np.array(method.vq_decode(state, packed)) - x).sum() / np.square(x).sum())
    return {
        "sub": sub, "centroids": centroids, "bits": np.log2(centroids) / sub, "error": round(error, 5),
        "published": figure, "ratio": round(error / figure, 4), "learnt_from": vectors, "measured_on": 65536,
        "rounds": ROUNDS, "seeds": [0, 1], "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Print and write the rows."""
    rows = [row(sub, centroids, figure) for (sub, centroids), figure in FIGURES.items()]
    about = {"mlx": version("mlx"), "numpy": np.__version__, "device": str(mx.default_device())}
    with open(sys.argv[1], "w") as file:
        json.dump(
            {"command": f"python docs/results/vecinfer-errors.py {sys.argv[1]}", **about, "rows": rows}, file, indent=2
        )
        file.write("\n")
    for each in rows:
        print(each)


if __name__ == "__main__":
    main()
