"""What a process holds after many requests, and while one runs; measured by MLX's allocator in child processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
CHILD = """
import gc, json, resource, sys
sys.path.insert(0, ROOT)
import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
import vq_core
from tests.host_mlx_lm.models import build, prompt
from vq_core.testing import load_plugin, registered


def settle():
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def tokens(model, ids, steps, caches=None):
    found = generate_step(ids, model, max_tokens=steps, prompt_cache=caches, prefill_step_size=64)
    return [t for t, _ in found]


model = build("llama")
"""


def child(code: str) -> Any:
    body = f"ROOT = {str(ROOT)!r}\n{CHILD}\nwith registered(load_plugin(ROOT + '/tests/methods/identity.py')):\n"
    body += "\n".join(f"    {line}" for line in code.splitlines())
    body += "\n    print(json.dumps([out, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))"
    run = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
@pytest.mark.parametrize("way", ["fresh", "store", "speculation"])
def test_twenty_requests_hold_what_two_hold(way: str, method: str, record_property: Any) -> None:
    """Prompts that have nothing in common; the store keeps two of them."""
    out, rss = child(f"""
handle = vq_core.compress(model, method="{method}", residual=8)
draft = build("llama", seed=3, num_hidden_layers=1)
if "{way}" == "speculation":
    vq_core.compress(draft, method="{method}", residual=0)
store, out = LRUPromptCache(max_size=2), []
for request in range(20):
    ids = prompt(200, 50 + request)
    if "{way}" == "speculation":
        found = list(speculative_generate_step(ids, model, draft, num_draft_tokens=4, max_tokens=20))
    else:
        caches, left = None, ids.tolist()
        if "{way}" == "store":
            caches, left = store.fetch_nearest_cache("model", left)
        caches = make_prompt_cache(model) if caches is None else caches
        found = tokens(model, mx.array(left), 20, caches)
        if "{way}" == "store":
            store.insert_cache("model", ids.tolist() + found, caches)
    found = caches = None
    out.append(settle())
""")
    record_property("rss", rss)
    assert out[-1] <= 1.05 * out[1], (out, rss)


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
def test_the_graph_does_not_grow(method: str, record_property: Any) -> None:
    """500 decode steps in which nobody reads the state: the last hundred take what the first hundred take."""
    out, rss = child(f"""
handle = vq_core.compress(model, method="{method}", residual=8)
caches, out = handle.make_cache(), []
running = generate_step(prompt(100), model, max_tokens=501, prompt_cache=caches)
next(running)
for _ in range(5):
    mx.reset_peak_memory()
    for _ in range(100):
        next(running)
    out.append([mx.get_peak_memory(), sum(c.nbytes for c in caches)])
""")
    record_property("rss", rss)
    beyond = [peak - held for peak, held in out]
    # Old and new pages side by side while they grow, and scores of more tokens. A step's window alone is 8 KB, so a
    # graph that kept the steps would take 3 MB more.
    assert beyond[-1] <= beyond[0] + out[-1][1] + 4 * 4 * 4 * 600, (out, rss)


def test_peak_does_not_grow_faster_than_without_us(record_property: Any) -> None:
    """Case 35: prefill and 20 steps at 1,000 and at 4,000 tokens, with the model's own caches and with packed ones."""
    out, rss = child("""
handle = vq_core.compress(model, method="kivi:bits=4", residual=128)
out = []
for make in (handle.plain_cache, handle.make_cache):
    peaks = []
    for length in (1000, 4000):
        caches = make()
        before = settle()
        mx.reset_peak_memory()
        tokens(model, prompt(length), 20, caches)
        peaks.append(mx.get_peak_memory() - before)
        caches = None
    out.append(peaks[1] - peaks[0])
""")
    record_property("rss", rss)
    plain, packed = out
    assert packed <= plain, out
