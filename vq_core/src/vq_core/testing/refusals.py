"""Bad input: one typed error with the way out, and a cache that is as it was."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from vq_core.api.settings import parse_choice
from vq_core.cache.shell import PackedKVCache
from vq_core.errors import CacheStateError, SettingsError, UnsupportedShapeError
from vq_core.testing.kit import Kit
from vq_core.testing.observe import assert_same, gaussian, snapshot


class RefusalsConformance(Kit):
    """What shapes, dtypes and settings show is refused before anything changes."""

    def _bad_updates(self) -> dict[str, tuple[mx.array, mx.array]]:
        H, D = self.kv_heads, self.dim()
        good = gaussian((1, H, 4, D))
        return {
            "values of another B": (good, gaussian((2, H, 4, D))),
            "values of another S": (good, gaussian((1, H, 5, D))),
            "values of another H": (good, gaussian((1, H + 1, 4, D))),
            "no tokens": (gaussian((1, H, 0, D)), gaussian((1, H, 0, D))),
            "two dtypes": (good, good.astype(mx.float32)),
            "three axes": (good[0], good[0]),
            "integers": (mx.zeros(good.shape, mx.int32), mx.zeros(good.shape, mx.int32)),
        }

    def _bad_later(self) -> dict[str, tuple[mx.array, mx.array]]:
        H, D = self.kv_heads, self.dim()
        return {
            "another head size": (gaussian((1, H, 4, D + 16)), gaussian((1, H, 4, D + 16))),
            "another dtype": (gaussian((1, H, 4, D), "bfloat16"), gaussian((1, H, 4, D), "bfloat16")),
            "another number of heads": (gaussian((1, H + 1, 4, D)), gaussian((1, H + 1, 4, D))),
            "another batch": (gaussian((2, H, 4, D)), gaussian((2, H, 4, D))),
        }

    def test_refused_first_update(self) -> None:
        """A fresh cache refuses and can still be used."""
        for what, (keys, values) in self._bad_updates().items():
            cache = self.cache()
            with pytest.raises(UnsupportedShapeError):
                cache.update_and_fetch(keys, values)
            assert cache.empty() and cache.nbytes == 0, what
            cache.update_and_fetch(*self.tokens(10))

    def test_refused_later_update(self) -> None:
        """A cache that holds tokens refuses and keeps every byte."""
        cache = self.filled(300)
        before = snapshot(cache)
        for what, (keys, values) in (self._bad_updates() | self._bad_later()).items():
            with pytest.raises(UnsupportedShapeError):
                cache.update_and_fetch(keys, values)
            assert_same(snapshot(cache), before, f"after a refused update, {what}")

    def test_refused_attention(self) -> None:
        """Queries, masks and sinks that do not fit; nothing changes."""
        cache = self.filled(300)
        before = snapshot(cache)
        H, D = self.kv_heads, self.dim()
        q = gaussian((1, 2 * H, 4, D))
        bad: dict[str, tuple[mx.array, dict[str, Any]]] = {
            "a mask that is too short": (q, {"mask": mx.ones((4, 299), mx.bool_)}),
            "a mask that is too long": (q, {"mask": mx.ones((4, 301), mx.bool_)}),
            "a mask of one column": (q, {"mask": mx.ones((4, 1), mx.bool_)}),
            "a mask of other heads": (q, {"mask": mx.ones((1, 2 * H + 1, 4, 300), mx.bool_)}),
            "an unknown mask": (q, {"mask": "sideways"}),
            "queries of another head size": (gaussian((1, 2 * H, 4, D + 1)), {}),
            "heads that do not divide": (gaussian((1, 2 * H + 1, 4, D)), {}),
            "queries of another batch": (gaussian((2, 2 * H, 4, D)), {}),
            "no queries": (gaussian((1, 2 * H, 0, D)), {}),
            "sinks of another length": (q, {"sinks": mx.zeros((2 * H + 1,))}),
            "more causal queries than tokens": (gaussian((1, 2 * H, 301, D)), {"mask": "causal"}),
        }
        for what, (queries, options) in bad.items():
            with pytest.raises(UnsupportedShapeError):
                mx.eval(cache.attend(queries, scale=0.1, **options))
            assert_same(snapshot(cache), before, f"after refused attention, {what}")

    def test_refused_on_an_empty_cache(self) -> None:
        """Attention and decoding need a token, whether the cache is fresh, bound or emptied."""
        bound = self.cache()
        bound.prepare_for(kv_heads=self.kv_heads, key_dim=self.dim(), value_dim=self.dim(), dtype=mx.float16)
        for cache in (self.cache(), bound):
            with pytest.raises(CacheStateError):
                cache.attend(gaussian((1, self.kv_heads, 1, self.dim())), scale=0.1)
            with pytest.raises(CacheStateError):
                cache.decode()

    def test_refused_settings(self) -> None:
        """Unknown settings and policies that are not accepted name what would be."""
        name = parse_choice(self.method).label
        policy = self.policy()
        side = self.facts().sides[0]
        with pytest.raises(SettingsError, match="no_such_setting"):
            PackedKVCache(**policy | {side: f"{name}:no_such_setting=1"})  # type: ignore[arg-type]
        for wrong in ({"residual": -1}, {"sink_tokens": -1}, {"attention": "magic"}, {"fallback": "maybe"}):
            with pytest.raises(SettingsError, match=next(iter(wrong))):
                PackedKVCache(**policy, **wrong)  # type: ignore[arg-type]

    def test_the_side_it_cannot_hold(self) -> None:
        """A one-sided method is refused on the other side, with the side that it can hold."""
        sides = self.facts().sides
        if len(sides) == 2:
            pytest.skip(f"sides={sides}: the method holds both")
        other = "values" if sides[0] == "keys" else "keys"
        with pytest.raises(SettingsError, match=sides[0]):
            PackedKVCache(**self.policy() | {other: self.method})  # type: ignore[arg-type]
