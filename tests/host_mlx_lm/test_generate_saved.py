"""A generation in two parts, saved and loaded between them, against one that was never interrupted."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

import vq_core
from vq_core.errors import CacheStateError, FormatError, HostError, SettingsError
from vq_core.hosts.mlx_lm.context import vocabulary
from vq_core.hosts.mlx_lm.continuation import KEY, Continuation, check_target, resume
from vq_core.hosts.mlx_lm.draft import Draft
from vq_core.hosts.mlx_lm.generate import Run, load, stream

from .models import build, save

FIRST = [int(t) for t in b"It is a truth universally acknowledged"]
SECOND = [int(t) for t in b", and so on: "]


def last(*args: Any, **kwargs: Any) -> Run:
    *_, (_, run) = stream(*args, **kwargs)
    return run


def tokenizer_of(folder: Path) -> Any:
    return load(save(folder))[1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Any:
    return tokenizer_of(tmp_path_factory.mktemp("saved") / "llama")


def wide(name: str, **changes: Any) -> Any:
    """A model whose vocabulary fits the tokenizer."""
    return build(name, vocab_size=257, **changes)


def logits(model: Any, caches: Any) -> mx.array:
    return model(mx.array([[7]]), cache=caches)[0, -1]


@pytest.mark.parametrize("steps", [0, 1, 20])
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_two_parts_are_one(name: str, steps: int, tokenizer: Any, compress: Any, tmp_path: Path) -> None:
    """Nothing is fed twice and nothing is lost, whatever the layers' caches are."""
    path = tmp_path / "first"
    model = wide(name)
    handle = compress(model, residual=8)
    first = last(model, tokenizer, FIRST, handle=handle, max_tokens=steps)
    assert len(first.tokens) == steps == first.generation_tokens
    assert first.continuation and first.continuation.count == len(FIRST) + steps
    first.continuation.save(path, handle)

    other = wide(name)  # the same weights, as in another process
    again = compress(other, residual=8)
    after = resume(path, again)
    assert after.tokens == FIRST + first.tokens
    second = last(other, tokenizer, SECOND, handle=again, max_tokens=20, after=after)
    assert second.loaded == len(FIRST) + steps

    whole = compress(model, residual=8).make_cache()
    fed = mx.array(FIRST + first.tokens + SECOND)
    want = [token for token, _ in generate_step(fed, model, max_tokens=20, prompt_cache=whole)]
    assert second.tokens == want and (name == "jamba" or len(set(want)) > 2)
    assert second.continuation and second.continuation.tokens == FIRST + first.tokens + SECOND + want
    held = second.continuation.caches
    assert [c.offset for c in held if hasattr(c, "offset")] == [c.offset for c in whole if hasattr(c, "offset")]
    assert mx.allclose(logits(other, held), logits(model, whole), atol=1e-4)


def test_a_lossy_method_packs_the_same(tokenizer: Any, compress: Any, tmp_path: Path) -> None:
    model = wide("llama")
    handle = compress(model, "kivi:bits=4", residual=16)
    first = last(model, tokenizer, FIRST * 3, handle=handle, max_tokens=10)
    assert first.continuation
    first.continuation.save(tmp_path / "c", handle)
    straight = last(model, tokenizer, SECOND, handle=handle, max_tokens=10, after=first.continuation)
    loaded = last(model, tokenizer, SECOND, handle=handle, max_tokens=10, after=resume(tmp_path / "c", handle))
    assert loaded.tokens == straight.tokens
    assert loaded.report and straight.report and loaded.report.packed == straight.report.packed > 0


def test_an_answer_that_ended_by_itself(tokenizer: Any, compress: Any, monkeypatch: Any) -> None:
    """mlx-lm feeds the end token before it shows it, so it is among the tokens that are held."""
    model = wide("llama")
    handle = compress(model, residual=8)
    tokens = last(model, tokenizer, FIRST, handle=handle, max_tokens=20).tokens
    end = tokens[12]
    at = tokens.index(end)
    monkeypatch.setattr(tokenizer, "_eos_token_ids", {end})
    run = last(model, tokenizer, FIRST, handle=handle, max_tokens=20)
    assert run.tokens == tokens[: at + 1] and run.continuation
    assert run.continuation.ending.last == end and run.continuation.tokens == FIRST + run.tokens
    assert {c.offset for c in run.continuation.caches} == {run.continuation.count} == {len(FIRST) + at + 1}


@pytest.mark.parametrize("same", [True, False], ids=["all accepted", "few accepted"])
@pytest.mark.parametrize("steps", range(1, 10))
def test_after_speculation(steps: int, same: bool, tokenizer: Any, compress: Any) -> None:
    """mlx-lm leaves the newest token unfed or not, by whether the draft proposed it; here it is always fed."""
    model = wide("llama")
    handle = compress(model, residual=8)
    draft = wide("llama") if same else wide("llama", seed=3, num_hidden_layers=1)
    run = last(model, tokenizer, FIRST, handle=handle, max_tokens=steps, draft=Draft(draft, tokenizer))
    assert run.continuation and len(run.tokens) == steps
    assert {c.offset for c in run.continuation.caches} == {run.continuation.count} == {len(FIRST) + steps}
    want = last(model, tokenizer, FIRST, handle=handle, max_tokens=steps)
    assert run.tokens == want.tokens and want.continuation
    assert mx.allclose(logits(model, run.continuation.caches), logits(model, want.continuation.caches), atol=1e-4)


def test_speculation_that_ends_by_itself(tokenizer: Any, compress: Any, monkeypatch: Any) -> None:
    model = wide("llama")
    handle = compress(model, residual=8)
    tokens = last(model, tokenizer, FIRST, handle=handle, max_tokens=12).tokens
    for end in sorted(set(tokens)):
        monkeypatch.setattr(tokenizer, "_eos_token_ids", {end})
        run = last(model, tokenizer, FIRST, handle=handle, max_tokens=12, draft=Draft(wide("llama"), tokenizer))
        assert run.tokens == tokens[: tokens.index(end) + 1] and run.continuation
        assert {c.offset for c in run.continuation.caches} == {len(FIRST) + len(run.tokens)}


def test_a_draft_reads_what_was_loaded(tokenizer: Any, compress: Any, tmp_path: Path) -> None:
    model, draft = wide("llama"), wide("llama")
    handle, theirs = compress(model, residual=8), compress(draft, residual=8)
    first = last(model, tokenizer, FIRST, handle=handle, max_tokens=5)
    assert first.continuation
    first.continuation.save(tmp_path / "c", handle)
    want = last(model, tokenizer, SECOND, handle=handle, max_tokens=20, after=first.continuation)
    run = last(
        model, tokenizer, SECOND, handle=handle, max_tokens=20, after=resume(tmp_path / "c", handle),
        draft=Draft(draft, tokenizer, theirs, num_tokens=4),
    )  # fmt: skip
    assert run.tokens == want.tokens
    # The draft is the same model: it is right every time only if it has read the same.
    assert run.draft and run.draft.accepted == 16 and run.draft.held > 0
    assert run.draft.report and run.draft.report.tokens()[0] > 0


# ---- files that are not what a continuation needs


def test_a_file_without_our_facts(tokenizer: Any, compress: Any, tmp_path: Path) -> None:
    model = wide("llama")
    handle = compress(model, residual=8)
    run = last(model, tokenizer, FIRST, handle=handle, max_tokens=5)
    assert run.continuation
    vq_core.save_cache(tmp_path / "c", run.continuation.caches, model=handle)
    after = resume(tmp_path / "c", handle)
    assert (after.count, after.tokens, after.ending.state) == (len(FIRST) + 5, None, "unknown")
    with pytest.raises(SettingsError, match="does not say which tokens"):
        last(model, tokenizer, SECOND, handle=handle, after=after, draft=Draft(model, tokenizer))
    want = last(model, tokenizer, SECOND, handle=handle, max_tokens=5, after=run.continuation)
    found = last(model, tokenizer, SECOND, handle=handle, max_tokens=5, after=after)
    assert found.tokens == want.tokens and found.continuation
    assert found.continuation.tokens is None and found.continuation.count == len(FIRST) + 5 + len(SECOND) + 5


NESTED: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(40), {})
GOOD = {"version": 1, "count": 3, "tokens": [1, 2, 3], "state": "none", "last": None, "template": {}, "model": "m"}


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[" * 100000, '{"count": ' + "9" * 5000 + "}", "[]", "null", "3", "{}",
        *(json.dumps({k: v for k, v in GOOD.items() if k != name}) for name in GOOD),
        *(
            json.dumps(GOOD | change)
            for change in (
                {"version": 2}, {"count": -1}, {"count": "3"}, {"count": 4}, {"tokens": [1, 2]},
                {"tokens": [1, 2, 3, 4]}, {"tokens": [1, -2, 3]}, {"tokens": "123"}, {"state": "over"},
                {"last": "x"}, {"template": []}, {"model": 3}, {"count": True, "tokens": [1]},
                {"count": 2, "tokens": None}, {"tokens": [1, 2, 257]}, {"tokens": [1, 2, 2**31]},
                {"tokens": [10**30, 2, 3]}, {"last": 257, "state": "turn"}, {"last": 10**30, "state": "turn"},
                {"state": []}, {"version": [2]}, {"template": NESTED},
            )
        ),
    ],
)  # fmt: skip
def test_damaged_facts_are_one_error(text: str, compress: Any, tmp_path: Path) -> None:
    model = wide("llama")
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    model(mx.array([[1, 2, 3]]), cache=caches)
    vq_core.save_cache(tmp_path / "c", caches, model=handle, metadata={KEY: json.dumps(GOOD)})
    assert resume(tmp_path / "c", handle).tokens == [1, 2, 3]
    vq_core.save_cache(tmp_path / "c", caches, model=handle, metadata={KEY: text})
    with pytest.raises(FormatError):
        resume(tmp_path / "c", handle)


def test_layers_that_differ_in_length(compress: Any, tmp_path: Path) -> None:
    model = wide("llama")
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    model(mx.array([[1, 2, 3]]), cache=caches)
    caches[1].trim(1)
    vq_core.save_cache(tmp_path / "c", caches, model=handle)
    with pytest.raises(CacheStateError, match=r"\[2, 3\]"):
        resume(tmp_path / "c", handle)


def test_a_file_of_other_settings(tokenizer: Any, compress: Any, tmp_path: Path) -> None:
    model = wide("llama")
    handle = compress(model, residual=8)
    run = last(model, tokenizer, FIRST, handle=handle, max_tokens=0)
    assert run.continuation
    run.continuation.save(tmp_path / "c", handle)
    with pytest.raises(FormatError, match="residual"):
        resume(tmp_path / "c", compress(wide("llama"), residual=16))
    for name in ("nothing", "n" * 300):
        with pytest.raises(SettingsError, match="no cache to load"):
            resume(tmp_path / name, handle)


def test_the_target_is_checked(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"kept")
    check_target(there)
    check_target(tmp_path / "new")
    assert there.read_bytes() == b"kept" and not (tmp_path / "new").exists()
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "file", "no folder"),
        (there / "file", "no folder"),
        (tmp_path / ("n" * 300), "too long"),
    ):
        with pytest.raises(SettingsError, match=said):
            check_target(path)
    with pytest.raises(SettingsError, match="no folder"):
        Continuation([], 0).save(tmp_path / "no" / "file", None)


def test_links_are_followed_and_what_is_no_file_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for its reader."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "twice").symlink_to(tmp_path / "link")
    (tmp_path / "lost").symlink_to(tmp_path / "no" / "file")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    check_target(tmp_path / "link")
    check_target(tmp_path / "twice")
    for path, said in (
        (tmp_path / "lost", "no folder"),
        (tmp_path / "circle", "in a circle"),
        (tmp_path / "pipe", "is a pipe"),
        (tmp_path / "to_pipe", "is a pipe"),
        (Path("/dev/null"), "a device"),
    ):
        with pytest.raises(SettingsError, match=said):
            check_target(path)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "link").readlink() == tmp_path / "target"


def test_a_draft_that_knows_fewer_tokens_than_the_file_has(tokenizer: Any, compress: Any, tmp_path: Path) -> None:
    model, small = wide("llama"), build("llama", vocab_size=100)
    handle = compress(model, residual=8)
    first = last(model, tokenizer, [1, 2, 99, 100], handle=handle, max_tokens=0)
    assert first.continuation
    first.continuation.save(tmp_path / "c", handle)
    after = resume(tmp_path / "c", handle)
    with pytest.raises(FormatError, match="names the token 100, and Model knows 0 to 99"):
        last(model, tokenizer, [1], handle=handle, after=after, max_tokens=1, draft=Draft(small, tokenizer))
    assert {c.offset for c in after.caches} == {4}


@pytest.mark.parametrize("name", ["llama", "mistral3", "gemma3n", "plamo2", "gpt_neox", "nanochat"])
def test_tokens_that_a_model_knows(name: str) -> None:
    assert vocabulary(build(name, vocab_size=96)) == 96


def test_tokens_that_other_models_know() -> None:
    model = build("llama", vocab_size=96)
    nn.quantize(model, group_size=32, bits=4)
    assert vocabulary(model) == 96
    nothing = nn.Linear(2, 2)
    with pytest.raises(HostError, match="Linear does not say how many tokens it knows"):
        vocabulary(nothing)
    nothing.args = {"text_config": {"vocab_size": 77}}
    assert vocabulary(nothing) == 77
    nothing.wpe, nothing.wte = nn.Embedding(4, 2), nn.Embedding(9, 2)
    assert vocabulary(nothing) == 9


@pytest.mark.parametrize("value", [float("nan"), object(), NESTED])
def test_template_arguments_that_no_file_can_hold(value: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be saved"):
        Continuation([], 0, template={"a": value}).save(tmp_path / "c", None)
    assert not list(tmp_path.iterdir())
