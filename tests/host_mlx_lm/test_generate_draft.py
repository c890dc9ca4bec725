"""Speculative decoding on packed caches, what refuses it, and prompts against the length of the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm.context import context_length
from vq_core.hosts.mlx_lm.draft import Draft
from vq_core.hosts.mlx_lm.generate import Run, load, load_with_config, stream
from vq_core.testing import load_plugin, registered

from .models import build, save

FIRST = [int(t) for t in b"It is a truth universally acknowledged"]


def last(*args: Any, **kwargs: Any) -> Run:
    *_, (_, run) = stream(*args, **kwargs)
    return run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Any:
    return load(save(tmp_path_factory.mktemp("draft") / "llama"))[1]


def wide(name: str, **changes: Any) -> Any:
    """A model whose vocabulary fits the tokenizer."""
    return build(name, vocab_size=257, **changes)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_same_text_with_a_draft(count: int, tokenizer: Any, compress: Any) -> None:
    model, draft = wide("llama"), wide("llama", seed=3, num_hidden_layers=1)
    handle, theirs = compress(model, residual=8), compress(draft, residual=8)
    want = last(model, tokenizer, FIRST, handle=handle, max_tokens=30)
    run = last(
        model, tokenizer, FIRST, handle=handle, max_tokens=30, draft=Draft(draft, tokenizer, theirs, num_tokens=count)
    )
    assert run.tokens == want.tokens and run.text == want.text
    assert run.report and want.report and run.report.packed == want.report.packed > 0
    assert run.draft and run.draft.num_tokens == count and run.draft.accepted < 30
    # The draft's cache is packed too: one layer of the tokens up to the last but two.
    assert run.draft.report and run.draft.report.packed >= len(FIRST) + 30 - 2 - 8 - count
    assert run.draft.held == run.draft.report.bytes.held
    assert want.draft is None


def test_what_was_accepted(tokenizer: Any, compress: Any) -> None:
    """A draft that is the model: of each four tokens three are its own."""
    model = wide("llama")
    handle = compress(model, residual=8)
    run = last(model, tokenizer, FIRST, handle=handle, max_tokens=40, draft=Draft(wide("llama"), tokenizer))
    assert run.draft and run.draft.accepted == 30
    assert run.draft.report is None and run.draft.held > 0


def test_another_vocabulary(tokenizer: Any, tmp_path: Path, compress: Any) -> None:
    model = wide("llama")
    handle = compress(model, residual=8)
    folder = save(tmp_path / "draft")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"A": 32', '"A": 33', 1).replace('"B": 33', '"B": 32', 1))
    draft, other = load(folder)
    assert other.vocab_size == tokenizer.vocab_size
    with pytest.raises(SettingsError, match="257 entries against 257, of which 2 are missing or have another number"):
        last(model, tokenizer, FIRST, handle=handle, draft=Draft(draft, other))
    assert not any(c.offset for c in handle.make_cache())


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_no_draft_tokens(count: Any, tokenizer: Any) -> None:
    model = wide("llama")
    with pytest.raises(SettingsError, match="draft tokens must be 1 or more"):
        last(model, tokenizer, FIRST, draft=Draft(model, tokenizer, num_tokens=count))


def test_layers_that_cannot_be_rewound(tokenizer: Any, compress: Any) -> None:
    plain = wide("llama")
    hybrid = wide("jamba")
    handle = compress(hybrid, residual=8)
    with pytest.raises(SettingsError, match=r"the model does not allow \(layers 0: ArraysCache\)"):
        last(hybrid, tokenizer, FIRST, handle=handle, draft=Draft(plain, tokenizer))
    with pytest.raises(SettingsError, match=r"the draft model does not allow \(layers 0: ArraysCache\)"):
        last(plain, tokenizer, FIRST, draft=Draft(hybrid, tokenizer, handle))


def test_a_window_that_would_be_overrun(tokenizer: Any, compress: Any) -> None:
    """mlx-lm asks only before the first token, and then keeps rejected tokens in a window that has turned over."""
    model = wide("gemma3", sliding_window=64)
    handle = compress(model, residual=8)
    draft = Draft(wide("llama", seed=3), tokenizer)
    with pytest.raises(SettingsError, match=r"layers 0, 1, 3, 4: RotatingKVCache, a window of 64 tokens that 71"):
        last(model, tokenizer, FIRST, handle=handle, max_tokens=30, draft=draft)
    run = last(model, tokenizer, FIRST, handle=handle, max_tokens=22, draft=draft)
    assert run.tokens == last(model, tokenizer, FIRST, handle=handle, max_tokens=22).tokens


def test_a_method_that_cannot_be_trimmed(tokenizer: Any, compress: Any) -> None:
    """Its fresh cache can: only once a token is packed it cannot, and mlx-lm would not notice."""
    picky = load_plugin(Path(__file__).parent.parent / "methods" / "picky.py")
    with registered(picky):
        model = wide("llama", head_dim=64)
        handle = compress(model, None, keys="identity", values="picky", residual=8)
        with pytest.raises(SettingsError, match=r"layers 0, 1: the method picky cannot drop packed tok"):
            last(model, tokenizer, FIRST, handle=handle, max_tokens=30, draft=Draft(wide("llama"), tokenizer))


# ---- the length of the context


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": "x"}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        # Llama 3.1 names the extended length, Qwen 2.5 with YaRN the original one.
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, 4096),
    ],
)
def test_lengths(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length


def test_length_of_a_loaded_model(tmp_path: Path) -> None:
    model, _, config = load_with_config(save(tmp_path, max_position_embeddings=300))
    assert context_length(model.args) == context_length(config) == 300
    assert context_length(None) is None


def test_a_prompt_against_the_context(tokenizer: Any, compress: Any) -> None:
    model = wide("llama", max_position_embeddings=50)
    handle = compress(model, residual=8)
    assert len(FIRST) == 38
    with pytest.raises(SettingsError, match="the prompt makes 76 tokens and the model's context holds 50"):
        last(model, tokenizer, FIRST * 2, handle=handle)
    with pytest.raises(SettingsError, match="50 tokens and the model's context holds 50: no new token fits"):
        last(model, tokenizer, FIRST + FIRST[:12], handle=handle)
    read = last(model, tokenizer, FIRST + FIRST[:12], handle=handle, max_tokens=0)
    assert read.continuation and read.continuation.count == 50 and not read.notes
    run = last(model, tokenizer, FIRST, handle=handle, max_tokens=20)
    assert run.context == 50 and run.generation_tokens == 12
    assert run.notes == ["at most 12 new tokens, not 20: no more fit into the context of 50"]
    assert last(model, tokenizer, FIRST, handle=handle, max_tokens=12).notes == []


def test_what_is_loaded_counts(tokenizer: Any, compress: Any) -> None:
    model = wide("llama", max_position_embeddings=50)
    handle = compress(model, residual=8)
    first = last(model, tokenizer, FIRST, handle=handle, max_tokens=2)
    with pytest.raises(SettingsError, match=r"51 tokens \(40 of the loaded cache and 11 new\) and the model's con"):
        last(model, tokenizer, FIRST[:11], handle=handle, after=first.continuation)
    run = last(model, tokenizer, FIRST[:5], handle=handle, after=first.continuation)
    assert run.generation_tokens == 5 and "at most 5 new tokens, not 256" in run.notes[0]


def test_the_context_of_the_draft(tokenizer: Any) -> None:
    model, draft = wide("llama"), Draft(wide("llama", max_position_embeddings=41), tokenizer)
    run = last(model, tokenizer, FIRST, max_tokens=10, draft=draft)
    assert run.generation_tokens == 3 and run.notes[0].endswith("the context of 41")
    with pytest.raises(SettingsError, match="the draft model's context holds 41"):
        last(model, tokenizer, FIRST * 2, draft=draft)


def test_no_known_context(tokenizer: Any, compress: Any) -> None:
    model = wide("llama", max_position_embeddings=None)
    run = last(model, tokenizer, FIRST * 2, handle=compress(model, residual=8), max_tokens=3)
    assert run.context is None and run.generation_tokens == 3 and not run.notes


def test_a_packed_window_that_would_be_overrun(tokenizer: Any, compress: Any) -> None:
    model = wide("gemma3", sliding_window=64)
    handle = compress(model, residual=4, windows="packed")
    draft = Draft(wide("llama"), tokenizer)
    with pytest.raises(SettingsError, match=r"layers 0, 1, 3, 4: PackedKVCache, a window of 64 tokens"):
        list(stream(model, tokenizer, "a" * 60, handle=handle, draft=draft, max_tokens=10))
