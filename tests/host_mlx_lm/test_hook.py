"""The replaced attribute: how long it stays, whoever holds what a layer's update returned."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest

from vq_core import PackedKVCache
from vq_core.attention.packed import stock_attention
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.tagged import StrictTag
from vq_core.hosts.mlx_lm import hook
from vq_core.testing.observe import gaussian

STRICT: Any = hook.WhileInstalled()


def updated(cache: PackedKVCache | None = None) -> Any:
    """The pair of tags of an update."""
    cache = cache or PackedKVCache.from_policy(LayerPolicy.make(method="identity"), strict=STRICT)
    x = gaussian((1, 2, 3, 64), "float32")
    return cache.update_and_fetch(x, x)


def stock() -> bool:
    return mx.fast.scaled_dot_product_attention is stock_attention


def test_tags_keep_ours_until_the_last_is_gone() -> None:
    hook.install()
    pairs = [updated(), updated()]
    assert all(type(tag) is StrictTag for pair in pairs for tag in pair)
    hook.uninstall()
    keys, values = pairs.pop()
    pairs.clear()
    assert not stock()
    assert type(updated()[0]) is not StrictTag, "nobody waits for what comes later"
    q = gaussian((1, 4, 1, 64), "float32")
    assert mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1).shape == q.shape
    del keys
    assert not stock()
    del values
    assert stock()


@pytest.mark.parametrize("older_first", (True, False))
def test_tags_of_two_installations(older_first: bool) -> None:
    """Ours goes when both are undone and the tags of both are gone, in whatever order."""
    hook.install()
    older = updated()
    hook.uninstall()
    hook.install()
    newer = updated()
    assert type(newer[0]) is StrictTag
    hook.uninstall()
    pairs = [newer, older] if older_first else [older, newer]
    del older, newer
    pairs.pop()
    assert not stock()
    pairs.pop()
    assert stock()


def test_an_installation_that_still_has_users_stays() -> None:
    hook.install()
    hook.install()
    pair = updated()
    hook.uninstall()
    del pair
    assert not stock() and type(updated()[0]) is StrictTag
    hook.uninstall()
    assert stock()


EXIT = """
import mlx.core as mx
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.hosts.mlx_lm import hook
hook.install()
cache = PackedKVCache.from_policy(LayerPolicy.make(method="kivi"), strict=hook.WhileInstalled())
tags = cache.update_and_fetch(mx.ones((1, 2, 3, 64)), mx.ones((1, 2, 3, 64)))
mx.kept = lambda: None  # what keeps a script's names, and so the tags, until modules are taken apart
"""


def test_a_process_ends_quietly_with_tags_held() -> None:
    run = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
