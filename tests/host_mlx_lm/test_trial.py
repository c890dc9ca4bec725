"""The trial run computes nothing, whatever the method would look at."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

import vq_core

from .models import build, prompt


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_trial_evaluates_nothing(dtype: mx.Dtype, compress: Any) -> None:
    """KIVI looks at a bfloat16 model's numbers when it packs; a trial packs nothing, even without a window."""
    model = build("llama", hidden_size=512, intermediate_size=1024, vocab_size=101)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    compress(model, "kivi:bits=4", residual=128)  # binds the methods, which runs their probes
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    handle = compress(model, "kivi:bits=4", residual=0)
    # The activations of one chunk in one layer would take more.
    assert mx.get_peak_memory() - before < 64 * 512 * dtype.size
    caches = handle.make_cache()
    model(prompt(70)[None], cache=caches)
    assert all(c.report().packed == 64 and isinstance(c, vq_core.PackedKVCache) for c in caches)


def test_the_rule_of_windows_knows_the_real_residual(compress: Any) -> None:
    """Not the trial's, which holds everything."""
    entries = (
        compress(build("llama_windows", sliding_window=1024, head_dim=64), "kivi:bits=2", residual=32).report().layers
    )
    assert [e.status for e in entries] == ["packed"] * 4
