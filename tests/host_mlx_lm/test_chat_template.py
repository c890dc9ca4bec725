"""Prompts through the model's chat template, fresh and after a cache, against whole conversations and mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vq_core.errors import SettingsError
from vq_core.hosts.mlx_lm.chat import Chat, Ending, encode
from vq_core.hosts.mlx_lm.continuation import resume
from vq_core.hosts.mlx_lm.generate import Run, load, stream

from .models import TEMPLATE, save

END = 256


def last(*args: Any, **kwargs: Any) -> Run:
    *_, (_, run) = stream(*args, **kwargs)
    return run


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: Any) -> Any:
    return load(save(tmp_path_factory.mktemp("chat") / "llama", chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def tokenizer(loaded: Any) -> Any:
    assert loaded[1].has_chat_template and loaded[1].eos_token_ids == {END}
    return loaded[1]


def text(tokenizer: Any, prompt: str, chat: Chat | None = None, before: Any = None, answer: bool = True) -> str:
    return tokenizer.decode(encode(tokenizer, prompt, chat, before, answer)[0])


def test_fresh(tokenizer: Any) -> None:
    assert text(tokenizer, "hi") == "hi"
    assert text(tokenizer, "hi", Chat()) == "[user]hi<end>\n[assistant]"
    assert text(tokenizer, "hi", Chat("be kind")) == "[system]be kind<end>\n[user]hi<end>\n[assistant]"
    assert text(tokenizer, "hi", Chat(config={"quiet": True})) == "[user]hi<end>\n[assistant][quiet]"
    # The message stays open where no answer follows, as in mlx-lm's cache_prompt.
    assert text(tokenizer, "hi", Chat(), answer=False) == "[user]hi"
    assert encode(tokenizer, "hi", Chat(), None, True)[1] == "turn"
    assert encode(tokenizer, "hi", Chat(), None, False)[1] == "open"
    assert encode(tokenizer, "hi", None, None, True)[1] == "none"
    assert encode(tokenizer, [1, 2], Chat(), None, True) == ([1, 2], "none")


@pytest.mark.parametrize("state", ["open", "unknown"])
def test_in_an_open_message(tokenizer: Any, state: Any) -> None:
    before = Ending(state)
    assert text(tokenizer, " there", Chat(), before) == " there<end>\n[assistant]"
    assert text(tokenizer, " there", Chat(), before, answer=False) == " there"
    assert text(tokenizer, "", Chat(), before) == "<end>\n[assistant]"
    assert text(tokenizer, " there", None, before) == " there"


def test_after_an_answer(tokenizer: Any) -> None:
    assert text(tokenizer, "more", Chat(), Ending("turn")) == "<end>\n[user]more<end>\n[assistant]"
    # An answer that ended by itself has its end token in the cache already.
    assert text(tokenizer, "more", Chat(), Ending("turn", END)) == "\n[user]more<end>\n[assistant]"
    assert text(tokenizer, "more", Chat(), Ending("turn", END), answer=False) == "\n[user]more"
    assert text(tokenizer, "<vq-answer><vq-query>", Chat(), Ending("turn")).count("<vq-answer>") == 1


def test_after_plain_text(tokenizer: Any) -> None:
    tokens, state = encode(tokenizer, "more", Chat(), Ending("none"), True)
    assert tokenizer.decode(tokens) == "more" and state == "none"


def test_a_start_token_stands_at_the_start_only(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    raw = load(save(tmp_path))[1]._tokenizer.backend_tokenizer
    raw.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", END)])
    starting = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<end>")
    starting.has_chat_template = False
    assert encode(starting, "a", None, None, True)[0] == [END, *encode(starting, "a", None, Ending("none"), True)[0]]


def test_a_conversation_is_the_whole_template(loaded: Any, compress: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Question, answer, question, answer, in two processes' worth of steps: the tokens are those of one rendering."""
    model, tokenizer = loaded
    handle = compress(model, residual=8)
    first = last(model, tokenizer, "Who is Emma?", handle=handle, max_tokens=12, chat=Chat("be kind"))
    assert first.continuation
    for end in (None, first.tokens[7]):
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "_eos_token_ids", {END} if end is None else {end})
            run = last(model, tokenizer, "Who is Emma?", handle=handle, max_tokens=12, chat=Chat("be kind"))
        assert run.continuation
        run.continuation.save(tmp_path / "c", handle)
        after = resume(tmp_path / "c", handle)
        assert after.ending == Ending("turn", end)
        answer = tokenizer.decode(run.tokens)
        more = last(model, tokenizer, "And Jane?", handle=handle, max_tokens=5, chat=Chat(), after=after)
        messages = [("system", "be kind"), ("user", "Who is Emma?"), ("assistant", answer), ("user", "And Jane?")]
        whole = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
        assert more.continuation and more.continuation.tokens
        assert tokenizer.decode(more.continuation.tokens[: -len(more.tokens)]) == whole


def test_read_then_ask_is_one_message(loaded: Any, compress: Any, tmp_path: Path) -> None:
    model, tokenizer = loaded
    handle = compress(model, residual=8)
    want = last(model, tokenizer, "A long text. What is it about?", handle=handle, max_tokens=10, chat=Chat())
    read = last(model, tokenizer, "A long", handle=handle, max_tokens=0, chat=Chat())
    assert read.continuation and read.text == "" and read.prompt_tps > 0
    more = last(model, tokenizer, " text.", handle=handle, max_tokens=0, chat=Chat(), after=read.continuation)
    assert more.continuation
    more.continuation.save(tmp_path / "c", handle)
    after = resume(tmp_path / "c", handle)
    asked = last(model, tokenizer, " What is it about?", handle=handle, max_tokens=10, chat=Chat(), after=after)
    assert asked.continuation and want.continuation
    assert asked.tokens == want.tokens and asked.continuation.tokens == want.continuation.tokens


def test_arguments_of_the_template_are_kept(loaded: Any, compress: Any, tmp_path: Path) -> None:
    model, tokenizer = loaded
    handle = compress(model, residual=8)
    run = last(model, tokenizer, "hi", handle=handle, max_tokens=3, chat=Chat(config={"quiet": True}))
    assert run.continuation
    run.continuation.save(tmp_path / "c", handle)
    for chat, ending in ((Chat(), "[quiet]"), (Chat(config={"quiet": False}), "[assistant]")):
        more = last(
            model, tokenizer, "yes", handle=handle, max_tokens=1, chat=chat, after=resume(tmp_path / "c", handle)
        )
        assert more.continuation and more.continuation.tokens
        assert tokenizer.decode(more.continuation.tokens[:-1]).endswith(ending)


# ---- refusals


def test_what_has_no_place(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="start of a conversation"):
        encode(tokenizer, "hi", Chat("be kind"), Ending("turn"), True)
    plain = load(save(tmp_path))[1]
    with pytest.raises(SettingsError, match="no chat template"):
        encode(plain, "hi", Chat("be kind"), None, True)
    assert plain.decode(encode(plain, "hi", Chat(), None, True)[0]) == "hi"


@pytest.mark.parametrize(
    ("chat", "before"), [(Chat(), None), (None, None), (None, Ending("open")), (Chat(), Ending("none"))]
)
def test_an_empty_prompt(tokenizer: Any, chat: Any, before: Any) -> None:
    for prompt in ("", []):
        with pytest.raises(SettingsError, match="prompt is empty"):
            encode(tokenizer, prompt, chat, before, True)


@pytest.mark.parametrize(
    ("template", "before", "said"),
    [
        ("{{ raise_exception('no system role') }}", None, "no system role"),
        ("{% for", None, "TemplateSyntaxError"),
        ("{{ messages[7].content }}", None, "UndefinedError"),
        ("always the same", Ending("open"), "does not show the user's message"),
        ("always the same", Ending("turn"), "does not show the model's answers"),
    ],
)
def test_a_template_that_cannot(template: str, before: Any, said: str, tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, chat_template=template))[1]
    with pytest.raises(SettingsError, match=said):
        encode(tokenizer, "hi", Chat(), before, True)


def test_arguments_without_effect(loaded: Any, tmp_path: Path) -> None:
    model, tokenizer = loaded
    chat = Chat(config={"quiet": True})
    plain = load(save(tmp_path))
    with pytest.raises(SettingsError, match=r"no chat template, so its arguments \(quiet\) have no effect"):
        last(*plain, "hi", max_tokens=1, chat=chat)
    assert last(*plain, "hi", max_tokens=1, chat=Chat()).generation_tokens == 1
    text = last(model, tokenizer, "hi", max_tokens=1).continuation
    assert text and text.ending.state == "none"
    with pytest.raises(SettingsError, match="goes on as plain text"):
        last(model, tokenizer, "hi", max_tokens=1, chat=chat, after=text)
