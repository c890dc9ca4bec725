"""From a prompt to tokens: with the model's chat template or without, at the start or after a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from vq_core.errors import SettingsError

State = Literal["none", "open", "turn", "unknown"]
"""How the text that a cache holds ends.

``none``: text without a template; ``open``: inside the user's message; ``turn``: after the model's answer;
``unknown``: nobody wrote it down.
"""
DEEPEST = 32
"""Levels of lists and objects in the arguments of a template."""
_MARKS = ("<vq-query>", "<vq-answer>")


@attrs.frozen
class Chat:
    """The model's chat template, applied where it has one.

    Attributes:
        system: A system message before the prompt.
        config: Further arguments of the template.
    """

    system: str | None = None
    config: Mapping[str, Any] = attrs.Factory(dict)


@attrs.frozen
class Ending:
    """What the next prompt has to know of the text before it.

    Attributes:
        state: Where in a conversation the text ends.
        last: The last token, where the answer ended by itself.
    """

    state: State
    last: int | None = None


def encode(
    tokenizer: Any, prompt: str | Sequence[int], chat: Chat | None, before: Ending | None, answer: bool
) -> tuple[list[int], State]:
    """Tokens of a prompt, and the state in which the text is once they, and the answer if any, are read.

    Args:
        tokenizer: mlx-lm's.
        prompt: Text, or tokens to be taken as they are.
        chat: The template; ``None``: the text as it is.
        before: The end of what a cache holds already; ``None``: nothing is held.
        answer: Whether an answer of the model follows; if not, a user's message stays open.

    Raises:
        SettingsError: no token at all, a template that cannot take the prompt, a system message that has no place.
    """
    if not isinstance(prompt, str):
        if not prompt:
            raise SettingsError("the prompt is empty: give at least one token to continue")
        return list(map(int, prompt)), before.state if before else "none"
    raw = chat is None or not tokenizer.has_chat_template or (before is not None and before.state == "none")
    if chat is not None and chat.system is not None:
        _refuse_system(tokenizer, before)
    if raw:
        text, state = prompt, "none" if before is None else before.state
        bos = tokenizer.bos_token
        special = before is None and (bos is None or not text.startswith(bos))
    else:
        assert chat is not None
        if before is None and not prompt:
            raise SettingsError("the prompt is empty: give at least one token to continue")
        text, state = _render(tokenizer, prompt, chat, before, answer), "turn" if answer else "open"
        special = False
    tokens = tokenizer.encode(text, add_special_tokens=special)
    if not tokens or (raw and not text and before is not None):
        raise SettingsError("the prompt is empty: give at least one token to continue")
    return list(tokens), state


def check_arguments(config: Mapping[str, Any], what: str) -> None:
    """Raise :class:`SettingsError` where arguments of a template are nested deeper than any template needs.

    A template that shows them, and the file that keeps them, would run out of Python's stack.
    """
    level: list[Any] = [config]
    for _ in range(DEEPEST):
        level = [v for x in level for v in (x.values() if isinstance(x, Mapping) else x if isinstance(x, list) else ())]
    if level:
        raise SettingsError(f"{what}: the arguments of the chat template are nested deeper than {DEEPEST} levels")


def check_place(tokenizer: Any, chat: Chat | None, before: Ending | None) -> None:
    """Raise :class:`SettingsError` where a template's arguments are given and no template is used."""
    if chat is None or not chat.config:
        return
    check_arguments(chat.config, "chat")
    names = ", ".join(chat.config)
    if not tokenizer.has_chat_template:
        raise SettingsError(
            f"the model has no chat template, so its arguments ({names}) have no effect: leave them out"
        )
    if before is not None and before.state == "none":
        raise SettingsError(
            f"the loaded cache goes on as plain text, so arguments of the chat template ({names}) have no effect: "
            "leave them out"
        )


def _refuse_system(tokenizer: Any, before: Ending | None) -> None:
    if before is not None:
        raise SettingsError("a system prompt stands at the start of a conversation; the loaded cache is past it")
    if not tokenizer.has_chat_template:
        raise SettingsError("the model has no chat template, so a system prompt has no place: put it into the prompt")


def _render(tokenizer: Any, prompt: str, chat: Chat, before: Ending | None, answer: bool) -> str:
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    if before is None:
        return _apply(tokenizer, [*system, _said("user", prompt)], chat, answer)
    query, reply = _MARKS
    if before.state == "turn":
        # Another message of the user: what the template puts between an answer and the next prompt belongs to it.
        whole = _apply(
            tokenizer, [_said("user", query), _said("assistant", reply), _said("user", prompt)], chat, answer
        )
        text = _after(whole, reply)
        ended = "" if before.last is None else tokenizer.decode([before.last])
        return text.removeprefix(ended)
    # As mlx-lm does: the prompt goes on with the message that the cache holds the start of.
    marked = _apply(tokenizer, [_said("user", query)], chat, answer)
    if query not in marked:
        raise SettingsError("the chat template does not show the user's message: use it without (ignore the template)")
    return _apply(tokenizer, [_said("user", prompt)], chat, answer)[marked.index(query) :]


def _apply(tokenizer: Any, messages: list[dict[str, str]], chat: Chat, answer: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer, continue_final_message=not answer, **chat.config
        )
    except Exception as error:  # a template is a program of the model's author and raises what it likes
        raise SettingsError(
            f"the model's chat template cannot take this prompt ({type(error).__name__}: {error}); "
            "correct the messages or do without the template (--ignore-chat-template)"
        ) from error
    assert isinstance(text, str)
    return text


def _after(text: str, mark: str) -> str:
    if mark not in text:
        raise SettingsError("the chat template does not show the model's answers, so it cannot say what follows them")
    return text[text.index(mark) + len(mark) :]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
