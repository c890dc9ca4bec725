"""The protocol of a cache: what a host reads and calls, before the first token and after."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from vq_core.cache.shell import PackedKVCache
from vq_core.errors import CacheStateError
from vq_core.testing.kit import Kit, feed
from vq_core.testing.observe import assert_same, snapshot


class ProtocolConformance(Kit):
    """State, copies, fresh caches."""

    def test_fresh_cache(self) -> None:
        """Everything a host may ask of a cache that was never updated."""
        cache = self.cache()
        assert (cache.offset, cache.size(), cache.nbytes, cache.empty()) == (0, 0, 0, True)
        assert cache.is_trimmable() == self.capabilities().trimmable and cache.trim(3) == 0
        assert not hasattr(cache, "bits"), "mlx-lm sends a cache with this attribute to its own quantized attention"
        twin = copy.deepcopy(cache)
        again = PackedKVCache.from_state(cache.state)
        assert again.policy == twin.policy == cache.policy
        assert cache.report().tokens == 0
        with pytest.raises(CacheStateError):
            cache.decode()
        with pytest.raises(CacheStateError):
            cache.attend(mx.zeros((1, self.kv_heads, 1, self.dim())), scale=1.0)
        for other in (twin, again, cache):
            feed(other, self.tokens(90, seed=91), [90])
        assert_same(snapshot(again), snapshot(cache), "from the state of a fresh cache")
        assert_same(snapshot(twin), snapshot(cache), "a copy of a fresh cache")

    def test_state_is_read_after_each_chunk(self) -> None:
        """1,025 tokens in chunks of 512, the state evaluated after each as a host does."""
        cache, tokens = self.cache(), self.tokens(1025, seed=92)
        for begin in range(0, 1025, 512):
            feed(cache, tokens, [min(512, 1025 - begin)], begin)
            mx.eval([leaf for leaf in cache.state if isinstance(leaf, mx.array)])
        assert cache.offset == 1025

    @pytest.mark.parametrize("length", [1, 100, 500])
    def test_state_round_trip(self, length: int) -> None:
        """from_state gives the same bytes, the same reading, and a cache that goes on the same way."""
        tokens = self.tokens(length + 70, seed=93)
        cache = self.cache(sink_tokens=2, residual=32)
        feed(cache, tokens, [length])
        again = PackedKVCache.from_state(cache.state)
        assert again.policy == cache.policy and again.nbytes == cache.nbytes
        assert_same(snapshot(again), snapshot(cache), "restored")
        assert_same(again.decode(), cache.decode(), "restored, decoded")
        for one in (cache, again):
            feed(one, tokens, [1, 69], length)
        assert_same(snapshot(again), snapshot(cache), "restored and continued")

    def test_state_through_a_file(self) -> None:
        """The arrays of a state are plain arrays, all that safetensors can hold; a file brings them back."""
        cache = self.filled(300)
        header, *arrays = cache.state
        assert isinstance(header, str)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            mx.save_safetensors(str(path), {f"{i:03}": a for i, a in enumerate(arrays)}, {"header": header})
            loaded: Any = mx.load(str(path), return_metadata=True)
            held, metadata = loaded
            again = PackedKVCache.from_state([metadata["header"], *(held[name] for name in sorted(held))])
            assert_same(snapshot(again), snapshot(cache), "through a file")

    def test_copy_costs_nothing(self) -> None:
        """A copy shares the arrays until it grows, and counts the same bytes."""
        cache = self.filled(600)
        mx.eval([leaf for leaf in cache.state if isinstance(leaf, mx.array)])
        before = mx.get_active_memory()
        twin = copy.deepcopy(cache)
        assert mx.get_active_memory() - before < 4096 and twin.nbytes == cache.nbytes
        assert_same(snapshot(twin), snapshot(cache), "a copy")

    def test_report_is_text(self) -> None:
        """The report names the method with its settings and goes into JSON."""
        import json

        report = self.filled(300).report()
        assert json.loads(json.dumps(report.as_dict()))["tokens"] == 300
        assert self.facts().name in report.keys + report.values
        assert report.tokens == report.packed + report.exact == 300
        assert any("encode" in line for line in report.operations)
