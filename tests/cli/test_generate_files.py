"""`vq generate` with saved caches, prompt files, draft models and chat templates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vq_core
from vq_core.hosts.mlx_lm.saved import read_metadata

TEXT = "It is a truth universally acknowledged, that a cache in want of memory must be packed. " * 2
METHOD = ("--method", "kivi:bits=8", "--residual", 16)
Vq = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def made(answer: tuple[int, str, str]) -> Any:
    status, out, err = answer
    assert status == 0, err
    return json.loads(out)


def test_a_long_text_is_read_once_and_asked_twice(folders: dict[str, Path], vq: Vq, tmp_path: Path) -> None:
    """What cache_prompt is for, on a model with a chat template."""
    model, file, text = folders["chat"], tmp_path / "long.vq", tmp_path / "long.txt"
    text.write_text(TEXT)
    run = ("generate", model, *METHOD, "--json")
    read = made(vq(*run, "--prompt-file", text, "--max-tokens", 0, "--save-cache", file))
    assert read["text"] == "" and read["generation_tokens"] == 0 and read["saved"] == str(file)
    assert read["prompt_tokens"] == read["held_tokens"] == len("[user]") + len(TEXT) and read["prompt_tps"] > 0
    for question in ("What is it about?", "Who wrote it?"):
        asked = made(vq(*run, "-p", question, "--max-tokens", 12, "--load-cache", file))
        whole = made(vq(*run, "-p", TEXT + question, "--max-tokens", 12))
        assert asked["text"] == whole["text"] != ""
        assert asked["loaded_tokens"] == read["held_tokens"] and asked["saved"] is None
        assert asked["held_tokens"] == whole["held_tokens"] == asked["loaded_tokens"] + asked["prompt_tokens"] + 12
        packed = [[layer["report"]["packed"] for layer in one["report"]["layers"]] for one in (asked, whole)]
        assert packed[0] == packed[1]


def test_a_conversation_in_one_file(folders: dict[str, Path], vq: Vq, tmp_path: Path) -> None:
    """The file is read and then replaced, turn by turn; the report names it."""
    file = tmp_path / "talk.vq"
    run = ("generate", folders["chat"], *METHOD, "--max-tokens", 10, "--save-cache", file)
    status, out, err = vq(*run, "-p", TEXT, "--system-prompt", "be kind", "--chat-template-config", '{"quiet": true}')
    assert (status, err) == (0, "") and out.endswith(f"saved: {file}\n")
    held = len(f"[system]be kind\n[user]{TEXT}\n[assistant][quiet]") + 2 + 10
    for _ in range(2):
        status, out, err = vq(*run, "-p", "Go on.", "--load-cache", file)
        assert (status, err) == (0, "") and f"{held} tokens" in next(s for s in out.splitlines() if "loaded" in s)
        held += len("\n[user]Go on.\n[assistant][quiet]") + 2 + 10


def test_the_template_and_without(folders: dict[str, Path], vq: Vq) -> None:
    run = ("generate", folders["chat"], *METHOD, "--max-tokens", 3, "--json", "-p", TEXT)
    assert made(vq(*run))["prompt_tokens"] == len(TEXT) + len("[user]\n[assistant]") + 1
    assert made(vq(*run, "--ignore-chat-template"))["prompt_tokens"] == len(TEXT)


def test_prompt_files(folder: Path, vq: Vq, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text(TEXT + "\u00e9\n", encoding="utf-8")
    run = ("generate", folder, *METHOD, "--max-tokens", 3, "--json")
    want = made(vq(*run, "-p", TEXT + "\u00e9\n"))
    assert made(vq(*run, "--prompt-file", text))["text"] == want["text"]
    assert made(vq(*run, "--prompt-file", "-", stdin=text.read_bytes()))["text"] == want["text"]


def test_a_draft_model(folder: Path, vq: Vq) -> None:
    run = ("generate", folder, *METHOD, "-p", TEXT, "--max-tokens", 20)
    want = made(vq(*run, "--json"))
    found = made(vq(*run, "--json", "--draft-model", folder, "--num-draft-tokens", 4, "--draft-method", "kivi:bits=4"))
    assert found["text"] == want["text"]
    draft = found["draft"]
    assert draft["num_draft_tokens"] == 4 and 10 <= draft["accepted"] <= 16
    assert draft["held"] == draft["report"]["bytes"]["held"] > 0
    assert draft["report"]["layers"][0]["report"]["keys"].startswith("kivi:bits=4")
    assert found["report"]["layers"][0]["report"]["keys"].startswith("kivi:bits=8")
    status, out, _ = vq(*run, "--draft-model", folder)
    assert status == 0 and "draft: bytes held" in out and "of 20 new tokens" in out
    assert "draft model: kivi:bits=8,group_size=32; tokens packed" in out


def test_the_context_limits(folders: dict[str, Path], vq: Vq) -> None:
    run = ("generate", folders["short"], *METHOD, "--json")
    found = made(vq(*run, "-p", TEXT, "--max-tokens", 100))
    assert found["context"] == 220 == found["held_tokens"]
    assert found["notes"] == [f"at most {220 - len(TEXT)} new tokens, not 100: no more fit into the context of 220"]
    status, out, _ = vq(*run[:-1], "-p", TEXT, "--max-tokens", 100)
    assert status == 0 and f"note: {found['notes'][0]}" in out


def test_the_model_that_ships(vq: Vq) -> None:
    found = made(vq("generate", "demo", *METHOD, "-p", TEXT, "--max-tokens", 3, "--json"))
    assert found["context"] == 4096 and found["report"]["layers"][2]["status"] == "packed"


def test_a_saved_cache_of_other_settings(folder: Path, folders: dict[str, Path], vq: Vq, tmp_path: Path) -> None:
    file = tmp_path / "c.vq"
    saved = vq("generate", folder, *METHOD, "-p", TEXT, "--max-tokens", 0, "--save-cache", file)
    assert saved[0] == 0
    before = file.read_bytes()
    for model, method, said in (
        (folder, ("--method", "kivi:bits=4", "--residual", 16), "bits"),
        (folder, ("--method", "kivi:bits=8", "--residual", 32), "residual"),
        (folders["jamba"], METHOD, "do not fit the model"),
        (folders["gpt_oss"], METHOD, "do not fit the model"),
    ):
        status, out, err = vq("generate", model, *method, "-p", "a", "--load-cache", file, "--save-cache", file)
        assert (status, out) == (2, "") and err.count("\n") == 1 and said in err
    assert file.read_bytes() == before


DEEP = '{"a": ' + "[" * 40 + "]" * 40 + "}"
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "no prompt": ((), "either --prompt TEXT or --prompt-file FILE"),
    "two prompts": (("-p", "a", "--prompt-file", "x"), "either --prompt TEXT or --prompt-file FILE"),
    "no such prompt file": (("--prompt-file", "{tmp}/none"), "cannot be read from"),
    "a folder as prompt": (("--prompt-file", "{tmp}"), "cannot be read from"),
    "a prompt file of other bytes": (("--prompt-file", "{tmp}/bytes"), "not UTF-8"),
    "an empty prompt file": (("--prompt-file", "{tmp}/empty"), "prompt is empty"),
    "reading without saving": (("-p", "a", "--max-tokens", 0), "give --save-cache"),
    "saving into nothing": (("-p", "a", "--save-cache", "{tmp}/no/file"), "there is no folder"),
    "saving into a folder": (("-p", "a", "--save-cache", "{tmp}"), "is a folder"),
    "loading nothing": (("-p", "a", "--load-cache", "{tmp}/none"), "no cache to load"),
    "loading what is no cache": (("-p", "a", "--load-cache", "{tmp}/bytes"), ""),
    "a draft of another vocabulary": (("-p", "a", "--draft-model", "demo"), "another vocabulary"),
    "a draft that is not there": (("-p", "a", "--draft-model", "/no/such"), "no such folder"),
    "a model without a name": (("-p", "a", "--draft-model", ""), "the model's name is empty"),
    "a number of draft tokens alone": (("-p", "a", "--num-draft-tokens", 3), "--num-draft-tokens is for --draft-model"),
    "a draft's method alone": (("-p", "a", "--draft-method", "kivi"), "--draft-method is for --draft-model"),
    "a draft's method unknown": (("-p", "a", "--draft-model", "x", "--draft-method", "none"), "unknown method"),
    "no place for a system prompt": (("-p", "a", "--system-prompt", "b"), "no chat template"),
    "ignored and given": (("-p", "a", "--system-prompt", "b", "--ignore-chat-template"), "leaves no place"),
    "template arguments no JSON": (("-p", "a", "--chat-template-config", "{{"), "is not valid JSON"),
    "template arguments without end": (("-p", "a", "--chat-template-config", "[" * 100000), "nested too deeply"),
    "template arguments too deep": (("-p", "a", "--chat-template-config", DEEP), "nested deeper than 32"),
    "template arguments no number": (("-p", "a", "--chat-template-config", '{"a": NaN}'), "NaN is no number"),
    "template arguments of no template": (("-p", "a", "--chat-template-config", '{"b": 1}'), "no chat template"),
    "saving into a pipe": (("-p", "a", "--save-cache", "{tmp}/pipe"), "is a pipe, a device or a socket"),
    "saving into a device": (("-p", "a", "--save-cache", "/dev/null"), "is a pipe, a device or a socket"),
    "saving through a link, refused": (("-p", "", "--save-cache", "{tmp}/link"), "prompt is empty"),
    "template arguments no object": (("-p", "a", "--chat-template-config", "[1]"), "must be a JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_status_2(name: str, folder: Path, vq: Vq, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    arguments, said = BAD[name]
    given = [str(argument).replace("{tmp}", str(tmp_path)) for argument in arguments]
    status, out, err = vq("generate", folder, *METHOD, *given)
    assert (status, out) == (2, ""), err
    assert err.startswith("vq: ") and err.count("\n") == 1 and said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes", "empty", "link", "pipe"]
    assert (tmp_path / "link").is_symlink()


def test_a_recurrent_model_takes_no_draft(folders: dict[str, Path], vq: Vq) -> None:
    status, out, err = vq("generate", folders["jamba"], *METHOD, "-p", TEXT, "--draft-model", folders["llama"])
    assert (status, out) == (2, "") and "layers 0: ArraysCache" in err and err.count("\n") == 1


def test_a_prompt_beyond_the_context(folders: dict[str, Path], vq: Vq) -> None:
    status, out, err = vq("generate", folders["short"], *METHOD, "-p", TEXT * 2)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert f"the prompt makes {2 * len(TEXT)} tokens and the model's context holds 220" in err


def test_saving_through_a_link_to_nothing_yet(folder: Path, vq: Vq, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    run: tuple[Any, ...] = ("generate", folder, *METHOD, "--json", "-p")
    read = made(vq(*run, TEXT, "--max-tokens", 0, "--save-cache", tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").is_file()
    found = made(vq(*run, "a", "--max-tokens", 1, "--load-cache", tmp_path / "target"))
    assert found["loaded_tokens"] == read["held_tokens"] == len(TEXT)


@pytest.mark.parametrize("token", [257, 2**31, 10**30])
def test_a_file_of_tokens_that_no_model_knows(token: int, folder: Path, vq: Vq, tmp_path: Path) -> None:
    """A draft would read past the end of its embedding."""
    file, bad = tmp_path / "c.vq", tmp_path / "bad.vq"
    assert vq("generate", folder, *METHOD, "-p", TEXT, "--max-tokens", 0, "--save-cache", file)[0] == 0
    facts = json.loads(read_metadata(file)["continuation"])
    facts["tokens"] = [token] * len(TEXT)
    vq_core.save_cache(bad, vq_core.load_cache(file), metadata={"continuation": json.dumps(facts)})
    for draft in ((), ("--draft-model", folder)):
        status, out, err = vq("generate", folder, *METHOD, "-p", "a", "--load-cache", bad, *draft)
        assert (
            (status, out) == (2, "") and err.count("\n") == 1 and f"the token {token}, and Model knows 0 to 256" in err
        )
