"""What packing costs on the model that ships: teacher-forced, one token a step, every step reads packed history.

The text is a passage that comes again.  The model was trained to copy such passages, so it predicts the second one
from the first, which it can read in the cache alone: the weights know nothing of it, and a damaged cache shows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from vq_core.demo import MODEL_PATH, heldout_text
from vq_core.evaluate.divergence import Divergence, divergences
from vq_core.hosts.mlx_lm import compress
from vq_core.hosts.mlx_lm.generate import load

PASSAGE = 600
BITS = (8, 4, 3, 2)


@pytest.fixture(scope="module")
def found() -> dict[int, Divergence]:
    model, tokenizer = load(MODEL_PATH)
    model.set_dtype(mx.float32)  # products in float16 take a multiple of the time on a CPU
    passage = tokenizer.encode(heldout_text())[:PASSAGE]
    caches: dict[int, list[Any]] = {}
    for bits in BITS:
        handle = compress(model, method=f"kivi:bits={bits}")
        caches[bits] = handle.make_cache()
    try:
        plain = handle.plain_cache()
        results = divergences(model, passage + passage, plain, list(caches.values()), prefill=PASSAGE)
    finally:
        handle.undo()
    for bits, result in zip(BITS, results, strict=True):
        print(f"{bits} bits: {result}")
    return dict(zip(BITS, results, strict=True))


def test_most_of_what_is_read_is_packed(found: dict[int, Divergence]) -> None:
    assert all(result.packed_share > 0.8 and result.tokens == PASSAGE - 1 for result in found.values())


def test_the_model_reads_the_passage_in_its_cache(found: dict[int, Divergence]) -> None:
    assert found[8].reference_perplexity < 1.2


def test_divergence_rises_as_bits_fall(found: dict[int, Divergence]) -> None:
    """Acceptance 10."""
    kl = [found[bits].kl for bits in BITS]
    assert 0 < kl[0] < kl[1] < kl[2] < kl[3]
    # A token in a hundred either way is chance; between the ends it is not.
    assert found[8].top1 > found[2].top1


def test_perplexity_is_ordered(found: dict[int, Divergence]) -> None:
    """Acceptance 10."""
    assert found[4].perplexity < found[3].perplexity < found[2].perplexity


def test_8_bits_are_as_good_as_half_precision(found: dict[int, Divergence]) -> None:
    """Acceptance 10."""
    assert found[8].perplexity == pytest.approx(found[8].reference_perplexity, rel=0.005)
