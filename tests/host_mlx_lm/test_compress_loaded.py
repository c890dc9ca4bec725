"""``compress_loaded``: every model that mlx-lm loads in the process, and only while it is in force."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm import utils
from mlx_lm.models import cache
from mlx_lm.models.cache import KVCache, make_prompt_cache, save_prompt_cache

from vq_core.cache.shell import PackedKVCache
from vq_core.errors import HostError, SettingsError, UnsupportedShapeError
from vq_core.hosts.mlx_lm import hook
from vq_core.hosts.mlx_lm.loaded import compress_loaded
from vq_core.testing import load_plugin, registered

from .models import save

TEXT = "It is a truth universally acknowledged, that a cache in want of memory must be packed."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return save(tmp_path_factory.mktemp("loaded") / "llama")


def test_what_is_loaded_inside_is_packed(folder: Path) -> None:
    before = utils.load_model, cache.load_prompt_cache
    model, tokenizer = mlx_lm.load(str(folder))
    want = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=20)
    with compress_loaded(method="identity", residual=8) as loaded:
        assert loaded.handles == [] and loaded.reports() == []
        first, _ = mlx_lm.load(str(folder))
        second, _ = mlx_lm.load(str(folder))
        assert [handle.model for _, handle in loaded.handles] == [first, second]
        assert mlx_lm.generate(first, tokenizer, TEXT, max_tokens=20) == want
        assert all(isinstance(c, PackedKVCache) for c in make_prompt_cache(second))
        (name, report), (_, other) = loaded.reports()
        assert name == str(folder) and report.packed > 0 == other.packed
        # A draft is loaded through the same function.
        drafted = mlx_lm.generate(first, tokenizer, TEXT, max_tokens=20, draft_model=second)
        assert drafted == want
        assert all(report.packed for _, report in loaded.reports())
        assert all(type(c) is KVCache for c in make_prompt_cache(model))
    assert (utils.load_model, cache.load_prompt_cache) == before
    assert all(type(c) is KVCache for c in make_prompt_cache(first))
    assert not hook._users


def test_a_model_that_is_dropped_goes(folder: Path) -> None:
    """As a server does it: the old model is let go, then the new one is loaded."""
    with compress_loaded(method="identity", residual=8) as loaded:
        kept, _ = mlx_lm.load(str(folder))
        dropped, _ = mlx_lm.load(str(folder))
        weight = weakref.ref(dropped.model)
        assert hook._users == 2
        del dropped
        gc.collect()
        assert weight() is not None and len(loaded.reports()) == 2  # for the report, until there is another
        newest, _ = mlx_lm.load(str(folder))
        assert weight() is None and hook._users == 2
        assert [handle.model for _, handle in loaded.handles] == [kept, newest]
    assert not hook._users


def test_a_cache_from_a_file_is_reported(folder: Path, tmp_path: Path) -> None:
    with compress_loaded(method="kivi:bits=8", residual=8):
        model, tokenizer = mlx_lm.load(str(folder))
        caches = make_prompt_cache(model)
        model(mx.array([tokenizer.encode(TEXT)]), cache=caches)
        save_prompt_cache(str(tmp_path / "c.safetensors"), caches)
    with compress_loaded(method="kivi:bits=8", residual=8) as loaded:
        read = cache.load_prompt_cache(str(tmp_path / "c.safetensors"))
        model, tokenizer = mlx_lm.load(str(folder))
        mlx_lm.generate(model, tokenizer, TEXT, max_tokens=3, prompt_cache=read)
        ((_, report),) = loaded.reports()
        assert report.packed == sum(c.report().packed for c in read) > 0 and loaded.notes() == []
    with compress_loaded(method="identity", residual=8) as loaded:
        cache.load_prompt_cache(str(tmp_path / "c.safetensors"), return_metadata=True)
        assert "keeps its own methods: keys kivi:bits=8" in loaded.notes()[0]


def test_a_plain_cache_from_a_file_is_said(folder: Path, tmp_path: Path) -> None:
    model, _ = mlx_lm.load(str(folder))
    caches = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    save_prompt_cache(str(tmp_path / "c.safetensors"), caches)
    with compress_loaded(method="identity") as loaded:
        cache.load_prompt_cache(str(tmp_path / "c.safetensors"))
        assert loaded.notes() == ["the cache read from a file is not packed, and stays as it is"]


def test_a_model_that_is_refused(folder: Path) -> None:
    before = utils.load_model
    picky = load_plugin(Path(__file__).parent.parent / "methods" / "picky.py")
    with registered(picky), compress_loaded(keys="identity", values="picky") as loaded:
        with pytest.raises(UnsupportedShapeError, match="head size 32"):
            mlx_lm.load(str(folder))
        ((name, error),) = loaded.errors
        assert name == str(folder) and isinstance(error, UnsupportedShapeError) and loaded.handles == []
    assert utils.load_model is before and not hook._users


@pytest.mark.parametrize(
    "policy", [{}, {"method": "nothing"}, {"method": "identity", "residual": -1}, {"method": "identity", "dense": "x"}]
)
def test_a_policy_that_is_wrong_is_refused_at_once(policy: Any) -> None:
    before = utils.load_model
    with pytest.raises(SettingsError), compress_loaded(**policy):
        pass
    assert utils.load_model is before


def test_a_model_of_several_processes(folder: Path, monkeypatch: Any) -> None:
    class Two:
        def size(self) -> int:
            return 2

    with compress_loaded(method="identity"):
        monkeypatch.setattr(mx.distributed, "init", Two)
        with pytest.raises(HostError, match="several processes"):
            mlx_lm.load(str(folder))


@pytest.mark.parametrize("windows", ["native", "packed"])
def test_a_window_takes_no_draft(windows: str, folder: Path, tmp_path: Path) -> None:
    """mlx-lm keeps rejected tokens, silently, once a window has turned over; how long texts get is not known here."""
    model = str(save(tmp_path / "windows", "llama_windows"))
    options: Any = {"method": "identity", "residual": 8, "windows": windows}
    with compress_loaded(drafting=True, **options) as loaded:
        kept = mlx_lm.load(str(folder))
        with pytest.raises(SettingsError, match=r"a window of \d+ tokens that a text may overrun"):
            mlx_lm.load(model)
        assert [handle.model for _, handle in loaded.handles] == [kept[0]]
        assert loaded.total == 1 == len(loaded.errors) and hook._users == 1
    # Where nobody has said so, such as in a server whose request names a draft: before the first token.
    with compress_loaded(**options):
        plain, tokenizer = mlx_lm.load(str(folder))
        sliding, _ = mlx_lm.load(model)
        assert mlx_lm.generate(sliding, tokenizer, TEXT, max_tokens=2)
        for one, other, whose in ((plain, sliding, "the draft model"), (sliding, plain, "the model")):
            with pytest.raises(SettingsError, match=f"which {whose} does not allow .* a text may overrun"):
                mlx_lm.generate(one, tokenizer, TEXT, max_tokens=2, draft_model=other)
            caches = [*make_prompt_cache(one), *make_prompt_cache(other)]
            with pytest.raises(SettingsError, match=f"which {whose} does not allow"):
                mlx_lm.generate(one, tokenizer, TEXT, max_tokens=2, draft_model=other, prompt_cache=caches)
            assert not any(c.offset for c in caches)


def test_a_model_that_cannot_be_loaded_is_noted(folder: Path, tmp_path: Path) -> None:
    told: list[int] = []
    before = utils.load, utils.load_model
    with compress_loaded(method="identity", refused=lambda loaded: told.append(len(loaded.errors))) as loaded:
        with pytest.raises(Exception) as unknown:
            mlx_lm.load("/no/such")
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(Exception) as damaged:
            mlx_lm.load(str(tmp_path))
        assert loaded.errors == [("/no/such", unknown.value), (str(tmp_path), damaged.value)] and told == [1, 2]
    assert (utils.load, utils.load_model) == before and mlx_lm.load is before[0]


def test_an_interrupt_while_loading_is_no_error_of_the_model(folder: Path, monkeypatch: Any) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(utils, "load_model", interrupted)
    with compress_loaded(method="identity") as loaded:
        with pytest.raises(KeyboardInterrupt):
            mlx_lm.load(str(folder))
        assert (loaded.errors, loaded.total, loaded.complete) == ([], 0, 0)
