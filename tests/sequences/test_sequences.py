"""Random sequences of calls on the cache, against whole arrays; ``VQ_SEQUENCES`` says how many.

One alone: ``VQ_SEQUENCES=1 VQ_FIRST_SEQUENCE=<seed> python -m pytest tests/sequences``.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from vq_core.hosts.mlx_lm.prepare import register
from vq_core.testing import load_plugin, registered

from .calls import Sequence

METHODS = Path(__file__).parent.parent / "methods"
COUNT = int(os.environ.get("VQ_SEQUENCES", "4000"))
FIRST = int(os.environ.get("VQ_FIRST_SEQUENCE", "0"))
PARTS = 10


def run(first: int, count: int, folder: Path) -> None:
    with ExitStack() as stack:
        for name in ("identity", "centred", "placed"):
            stack.enter_context(registered(load_plugin(METHODS / f"{name}.py")))
        for seed in range(first, first + count):
            try:
                Sequence(seed, folder).run(random.Random(-seed).randint(4, 20))
            except AssertionError as error:
                raise AssertionError(f"VQ_FIRST_SEQUENCE={seed}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_sequences(part: int, tmp_path: Path) -> None:
    """Update, trim, copy, reload, select, join, split and attend, in any order."""
    register()
    bounds = [FIRST + COUNT * i // PARTS for i in range(PARTS + 1)]
    run(bounds[part], bounds[part + 1] - bounds[part], tmp_path)
