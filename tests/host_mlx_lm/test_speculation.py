"""Case 29: speculative decoding with mlx-lm's own functions, target and draft both on packed caches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from vq_core.testing import load_plugin, registered

from .drafts import DRAFTS, draft_of
from .models import build, prompt, save
from .recording import Recorder, assert_as_given

PROMPT, STEPS = 50, 200
PICKY = load_plugin(Path(__file__).parent.parent / "methods" / "picky.py")


@cache
def greedy(name: str, length: int = PROMPT, steps: int = STEPS) -> list[int]:
    """Plain greedy decoding on mlx-lm's own caches."""
    return [token for token, _ in generate_step(prompt(length), build(name), max_tokens=steps)]


def speculate(model: Any, draft: Any, num: int, steps: int = STEPS, length: int = PROMPT, **rest: Any) -> Any:
    """Tokens, log-probabilities, and how many tokens came from the draft."""
    found = list(
        speculative_generate_step(prompt(length), model, draft, num_draft_tokens=num, max_tokens=steps, **rest)
    )
    return [int(t) for t, _, _ in found], mx.stack([p for _, p, _ in found]), sum(bool(d) for _, _, d in found)


@pytest.mark.parametrize("residual", [0, 8, 128])
@pytest.mark.parametrize("kind", DRAFTS)
def test_speculation_changes_no_token(kind: str, residual: int, compress: Any) -> None:
    """An exact method: the text is the target's own, whatever the draft, 4 tokens ahead."""
    model, draft = build("llama"), draft_of(kind)
    handle, other = compress(model, residual=residual), compress(draft, residual=residual)
    caches = [*handle.make_cache(), *other.make_cache()]
    tokens, _, drafted = speculate(model, draft, 4, prompt_cache=caches)
    assert tokens == greedy("llama")
    assert all(c.offset == PROMPT + STEPS - 1 for c in caches[: len(model.layers)])
    assert handle.report(caches[: len(model.layers)]).packed and other.report(caches[len(model.layers) :]).packed
    # Else the drafts would not be what their names say.
    share = drafted / STEPS
    assert {"good": share >= 0.75, "bad": share < 0.3, "half": 0.3 < share < 0.75}[kind], share


@pytest.mark.parametrize("num", [1, 7, 200])
@pytest.mark.parametrize("kind", DRAFTS)
def test_any_number_of_drafted_tokens(num: int, kind: str, compress: Any) -> None:
    """Residual 0, so every rewind cuts packed blocks; 200 ahead, rewinds reach over pages."""
    model, draft = build("llama"), draft_of(kind)
    compress(model, residual=0)
    compress(draft, residual=0)
    steps = 30 if num == 200 and kind != "good" else 100
    assert speculate(model, draft, num, steps)[0] == greedy("llama")[:steps]


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("residual", "num"), [(0, 4), (8, 4), (128, 7), (0, 40)])
def test_lossy_caches_hold_what_a_fresh_one_would(
    bits: int, residual: int, num: int, compress: Any, monkeypatch: Any
) -> None:
    """Rewinds inside the window leave no trace; behind it, tokens are off by half a step for each coding."""
    steps = 100
    model, draft = build("llama"), draft_of("half")
    handle = compress(model, f"kivi:bits={bits}", residual=residual)
    other = compress(draft, f"kivi:bits={bits}", residual=residual)
    caches, beside = handle.make_cache(), other.make_cache()
    recorder = Recorder(monkeypatch)
    tokens, scores, _ = speculate(model, draft, num, steps, prompt_cache=[*caches, *beside])
    assert len(tokens) == steps and mx.isfinite(scores).all()
    for packed in caches:
        row = recorder.row(packed)
        assert packed.offset == PROMPT + steps - 1
        assert (row.clean is None) == (residual > num)
        assert_as_given(packed, row)


def test_text_is_the_same(tmp_path: Path, compress: Any) -> None:
    """stream_generate with draft_model=, a model and a draft from folders."""
    model, tokenizer = mlx_lm.load(str(save(tmp_path / "target")))
    draft, _ = mlx_lm.load(str(save(tmp_path / "draft", num_hidden_layers=1)))
    text = "A cache that forgets to forget is no cache."
    want = mlx_lm.generate(model, tokenizer, text, max_tokens=60)
    handle = compress(model, residual=8)
    compress(draft, residual=8)
    pieces = list(mlx_lm.stream_generate(model, tokenizer, text, max_tokens=60, draft_model=draft))
    assert "".join(piece.text for piece in pieces) == want
    assert handle.report().packed


# ---- what cannot be rewound


@pytest.fixture
def picky() -> Any:
    with registered(PICKY):
        yield {"keys": "identity", "values": "picky"}


def test_a_method_that_cannot_be_trimmed_is_refused_before_the_first_token(picky: Any, compress: Any) -> None:
    """mlx-lm asks empty caches, and only at the start."""
    model, draft = build("llama_wide"), draft_of("bad", "llama_wide")
    handle = compress(model, None, **picky)
    caches = handle.make_cache()
    assert not any(c.is_trimmable() for c in caches)
    running = speculative_generate_step(
        prompt(PROMPT), model, draft, prompt_cache=[*caches, *make_prompt_cache(draft)], max_tokens=5
    )
    with pytest.raises(ValueError, match=r"trimmable prompt cache.*PackedKVCache"):
        next(running)
    assert all(c.empty() for c in caches)
    # Plain generation with it goes on as ever, and trim_prompt_cache says that it has dropped nothing.
    found = [t for t, _ in generate_step(prompt(PROMPT), model, max_tokens=20, prompt_cache=caches)]
    assert found == greedy("llama_wide", steps=20)
    assert trim_prompt_cache(caches, 3) == 0 and {c.offset for c in caches} == {PROMPT + 20}
    assert [c.trim(3) for c in caches] == [3, 3]


def test_one_layer_that_cannot_be_trimmed_is_enough(picky: Any, compress: Any) -> None:
    model, draft = build("llama_wide"), draft_of("bad", "llama_wide")
    compress(model, "identity", layers={1: picky})
    with pytest.raises(ValueError, match="trimmable"):
        speculate(model, draft, 4, 5)


def test_a_draft_that_cannot_be_trimmed_changes_no_token(picky: Any, compress: Any) -> None:
    """mlx-lm does not ask the draft's caches: rejected tokens stay in them, which costs acceptance, not text."""
    model, draft = build("llama_wide"), draft_of("half", "llama_wide")
    compress(model, residual=0)
    other = compress(draft, None, **picky)
    beside = other.make_cache()
    caches = [*make_prompt_cache(model), *beside]
    assert speculate(model, draft, 4, 40, prompt_cache=caches)[0] == greedy("llama_wide", steps=40)
    assert beside[0].offset > PROMPT + 40


@pytest.mark.parametrize("length", [8, 50])
def test_sliding_windows_beside_ours_speculate_as_they_do_without_us(length: int, compress: Any) -> None:
    """mlx-lm asks once, while its rotating caches are still empty and say that they can be trimmed.

    Past the window they cannot, and from then on trim_prompt_cache drops nothing at all, of any layer: the rejected
    tokens stay, and the text is no longer the target's. It is mlx-lm's own behaviour, the same with its own caches.
    """
    model, draft = build("llama_windows"), draft_of("bad", "llama_windows")
    steps = 16 if length == 8 else 40
    plain = speculate(model, draft, 4, steps, length)[0]
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    beside = make_prompt_cache(draft)
    assert speculate(model, draft, 4, steps, length, prompt_cache=[*caches, *beside])[0] == plain
    inside = length + steps <= 32
    assert (plain == greedy("llama_windows", length, steps)) is inside
    assert (caches[0].offset == length + steps - 1) is inside
