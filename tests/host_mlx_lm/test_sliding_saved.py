"""Packed windows in our own files: loaded for the same model, refused for another window."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

import vq_core
from vq_core.errors import FormatError

from .models import build, prompt


def filled(model: Any, compress: Any, generate: Any, **options: Any) -> tuple[Any, list[Any]]:
    handle = compress(model, "kivi:bits=4", residual=4, **options)
    caches = handle.make_cache()
    generate(model, prompt(300), steps=2, prompt_cache=caches)
    return handle, caches


def test_packed_windows_go_on_where_they_were(compress: Any, generate: Any, tmp_path: Any) -> None:
    model = build("llama_windows")
    handle, caches = filled(model, compress, generate, windows="packed")
    path = tmp_path / "c.vq"
    vq_core.save_cache(path, caches, model=handle)
    want = generate(model, prompt(40, seed=3), steps=20, prompt_cache=caches)
    for goal in (handle, model, None):
        loaded = vq_core.load_cache(path, model=goal)
        assert [c.sliding for c in loaded] == [None, 32, 32, None]
        found = generate(model, prompt(40, seed=3), steps=20, prompt_cache=loaded)
        assert found[0] == want[0] and mx.array_equal(found[1], want[1])
    handle.undo()
    assert [c.sliding for c in vq_core.load_cache(path, model=model)] == [None, 32, 32, None]


def test_another_window_or_another_choice_is_refused(compress: Any, generate: Any, tmp_path: Any) -> None:
    model = build("llama_windows")
    handle, caches = filled(model, compress, generate, windows="packed")
    path = tmp_path / "c.vq"
    vq_core.save_cache(path, caches)
    handle.undo()
    other = build("llama_windows", sliding_window=48)
    with pytest.raises(FormatError, match=r"layer 1.*layer 2"):
        vq_core.load_cache(path, model=other)
    compressed = compress(other, "kivi:bits=4", residual=4, windows="packed")
    with pytest.raises(FormatError, match="sliding window of 32 in the file, 48 in the model"):
        vq_core.load_cache(path, model=compressed)
    native = compress(model, "kivi:bits=4", residual=4, windows="native")
    with pytest.raises(FormatError, match="layer 1: PackedKVCache in the file, the model makes RotatingKVCache"):
        vq_core.load_cache(path, model=native)


@pytest.mark.parametrize("name", ["llama_windows", "stablelm", "falcon_h1"])
def test_a_loaded_cache_is_what_the_handle_makes_but_for_its_tokens(
    name: str, compress: Any, generate: Any, tmp_path: Any
) -> None:
    """As lean where only attention reads, as careful where the model does more, at the same chunk lengths."""
    handle, caches = filled(build(name), compress, generate, windows="packed")
    vq_core.save_cache(tmp_path / "c.vq", caches, model=handle)
    pairs = zip(vq_core.load_cache(tmp_path / "c.vq", model=handle), handle.fresh(), strict=True)
    flat = [
        (a, b) for x, y in pairs for a, b in zip(getattr(x, "caches", (x,)), getattr(y, "caches", (y,)), strict=True)
    ]
    ours = [(vars(a), vars(b)) for a, b in flat if isinstance(b, vq_core.PackedKVCache)]
    assert ours
    for loaded, made in ours:
        own = ("_history", "reads")
        assert {k: v for k, v in loaded.items() if k not in own} == {k: v for k, v in made.items() if k not in own}
        assert loaded["_history"].bound == made["_history"].bound and loaded["_history"].held != [0]
