"""Every architecture: an exact method changes nothing, and the report says of each cache what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from vq_core import PackedKVCache
from vq_core.hosts.mlx_lm import hook
from vq_core.hosts.mlx_lm.report import held_bytes
from vq_core.plugins.binding import state_arrays

from .architectures import CHUNK, PREFILL, STEPS, TOKENS, apart, expected, follow, inner, told
from .configurations import CONFIGURATIONS, PLACES
from .models import build, prompt

CLOSE = 1e-3


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def made(request: Any) -> Iterator[Any]:
    """Name, model, and what it says with its own caches."""
    model = build(request.param)
    yield request.param, model, follow(model, make_prompt_cache(model))


def test_every_architecture_is_expected() -> None:
    assert sorted(PLACES) == sorted(CONFIGURATIONS) and len(PLACES) >= 45


def test_the_page_of_results_says_the_same() -> None:
    """Written by docs/results/architectures.py, which a change of what is packed makes necessary again."""
    record = json.loads((Path(__file__).parents[2] / "docs/results/architectures.json").read_text())["models"]
    assert sorted(record) == sorted(CONFIGURATIONS)
    for name, found in record.items():
        assert [(c["place"], c["status"], c["reason"]) for c in found["caches"]] == expected(name)
        assert found["methods"]["identity"]["equal_tokens"] == STEPS


def test_the_model_reads_its_history(made: Any) -> None:
    """Else a cache that loses tokens would pass what follows."""
    _, model, _ = made
    ids = prompt(PREFILL + CHUNK)
    other = mx.concatenate([prompt(20, seed=9), ids[20:]])
    assert apart(model(ids[None])[:, -1], model(other[None])[:, -1]) > 100 * CLOSE


@pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")
@pytest.mark.parametrize(("dense", "sinks"), [("auto", 0), ("lazy", 4)])
def test_an_exact_method(made: Any, compress: Any, dense: str, sinks: int) -> None:
    name, model, (tokens, scores) = made
    handle = compress(model, residual=8, sink_tokens=sinks, dense=dense)
    caches = make_prompt_cache(model)
    found, packed_scores = follow(model, caches)
    assert found == tokens and apart(packed_scores, scores) < CLOSE
    report = handle.report(caches)
    assert told(report) == expected(name) and not report.notes
    for entry in report.layers:
        layer = entry.report
        if layer is None:
            assert entry.native_bytes > 0 and entry.cache != "PackedKVCache"
            continue
        assert entry.cache == "PackedKVCache" and layer.layer == entry.layer
        assert (layer.tokens, layer.exact) == (TOKENS, 8 + sinks) and layer.updates == 12
        if entry.status == "dense":
            latent = "latent" in entry.reason  # whose ten single steps attend to codes
            assert (layer.lost, layer.attentions) == ((2, 10) if latent else (12, 0))
            assert entry.reason.endswith(f"takes {2 * layer.bytes.fp16:,} bytes")
        else:
            assert layer.lost == 0 and layer.attentions >= 12
    _bytes_are_true(report, caches)


def _bytes_are_true(report: Any, caches: list[Any]) -> None:
    """What the report counts is what the caches' states hold, native ones' too."""
    held = [a for c in inner(caches) if isinstance(c, PackedKVCache) for a in c._history.arrays()]
    assert report.bytes.held == sum(a.nbytes for a in held) > 0
    native = [c for c in inner(caches) if not isinstance(c, PackedKVCache)]
    assert report.native_bytes == sum(a.nbytes for c in native for a in state_arrays(vars(c)))
    assert report.bytes.held + report.native_bytes == sum(map(held_bytes, caches))


@pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")
def test_without_the_hook(made: Any, compress: Any) -> None:
    name, model, (tokens, scores) = made
    handle = compress(model, residual=8, dense="lazy")
    caches = make_prompt_cache(model)
    hook.uninstall()
    try:
        found, packed_scores = follow(model, caches)
    finally:
        hook.install()
    assert found == tokens and apart(packed_scores, scores) < CLOSE
    for (_, status, _), entry in zip(expected(name), handle.report(caches).layers, strict=True):
        assert entry.status == ("native" if status == "native" else "dense")
        assert entry.report is None or (entry.report.lost == 12 and not entry.report.attentions)


@pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")
@pytest.mark.parametrize("bits", [4, 2])
def test_kivi(made: Any, compress: Any, bits: int) -> None:
    name, model, (_, scores) = made
    handle = compress(model, f"kivi:bits={bits}", residual=0)
    caches = make_prompt_cache(model)
    _, packed_scores = follow(model, caches)
    assert mx.isfinite(packed_scores).all()
    # The second chunk is the first thing that reads packed history.
    assert apart(packed_scores[1], scores[1]) > 1e-6
    report = handle.report(caches)
    assert told(report) == expected(name)
    assert all(r.packed == TOKENS // 32 * 32 and r.bytes.codes and r.bytes.metadata for r in report.packed_layers)
    _bytes_are_true(report, caches)
