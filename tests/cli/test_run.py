"""`vq run` in child processes, as a user starts it: mlx-lm's commands on a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

import vq_core
from vq_core.cli.main import main
from vq_core.cli.options import model_path
from vq_core.demo import MODEL_PATH
from vq_core.errors import VQError
from vq_core.testing import load_plugin, registered

from ..host_mlx_lm.models import TEMPLATE, save

HEAD = "It is a truth universally acknowledged, that a cache in want of memory must be packed. " * 3
TAIL = "However little known the feelings or views of such a cache may be. "
METHOD = ("--method", "kivi:bits=8", "--residual", "16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return save(tmp_path_factory.mktemp("run") / "llama", chat_template=TEMPLATE)


def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vq_core", "run", *map(str, arguments)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}, **options,
    )  # fmt: skip


def vq(*arguments: Any, text: str = "") -> tuple[int, str, str]:
    child = start(*arguments)
    out, err = child.communicate(text, timeout=120)
    return child.returncode, out, err


def direct(folder: Path, prompt: str, max_tokens: int) -> str:
    """What generation from Python gives with the same method."""
    model, tokenizer = mlx_lm.load(str(folder))
    handle = vq_core.compress(model, method="kivi:bits=8", residual=16)
    try:
        return mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens)
    finally:
        handle.undo()


def answer(out: str) -> str:
    """The text between the two rules that mlx-lm's generate prints."""
    return out.split("==========\n")[1].removesuffix("\n")


def test_a_prompt_cache_of_one_process_in_another(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    status, _, err = vq(*METHOD, "--", "cache_prompt", "--model", folder, "--prompt", HEAD, "--prompt-cache-file", file)
    assert status == 0 and "kivi:bits=8" in err and "packed" in err
    status, out, err = vq(
        *METHOD, "--", "generate", "--model", folder, "--prompt", TAIL, "--prompt-cache-file", file,
        "--max-tokens", 20,
    )  # fmt: skip
    assert status == 0 and "keeps its own methods" not in err
    # One message: mlx-lm cuts what the template puts before the query.
    whole = f"[user]{HEAD}{TAIL}<end>\n[assistant]"
    assert answer(out) == direct(folder, whole, 20)
    held = f"{len(HEAD) + len('[user]') + len(TAIL) + 1 + len(chr(10) + '[assistant]') + 20:,}"
    packed, exact = (int(n) for n in err.split("tokens packed / exact / approximate")[1].split()[1:4:2])
    assert f"{packed + exact:,}" == held and packed > 300


def test_the_same_text_as_from_python(folder: Path) -> None:
    status, out, err = vq(
        *METHOD, "generate", "--model", folder, "--prompt", HEAD, "--ignore-chat-template", "--max-tokens", 20,
        "--draft-model", folder, "--max-kv-size", 100,
    )  # fmt: skip
    assert status == 0 and answer(out) == direct(folder, HEAD, 20)
    assert err.count("the caches made last") == 2 and err.count("kivi:bits=8,group_size=32") == 2
    assert "vq: --max-kv-size has no effect" in err


def test_a_chat(folder: Path) -> None:
    status, out, err = vq(
        *METHOD, "--", "chat", "--model", folder, "--max-tokens", 12, "--temp", 0, text=f"{HEAD.strip()}\nq\n"
    )
    assert status == 0 and "bye" in out
    assert direct(folder, f"[user]{HEAD.strip()}<end>\n[assistant]", 12).split("\n")[0] in out
    assert "kivi:bits=8" in err


def test_a_server(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = start(*METHOD, "--", "server", "--model", folder, "--port", port, "--temp", 0)
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps({"prompt": HEAD, "max_tokens": 20}).encode(), {"Content-Type": "application/json"},
        )  # fmt: skip
        said = None
        for _ in range(240):
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    said = json.load(response)
                break
            except urllib.error.URLError:
                assert child.poll() is None, child.communicate()[1]
                time.sleep(0.25)
        assert said is not None and said["choices"][0]["text"] == direct(folder, HEAD, 20)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0 and "Traceback" not in err
    assert "the caches made last" in err and "kivi:bits=8" in err
    packed = int(err.split("tokens packed / exact / approximate")[1].split()[1])
    assert packed == (len(HEAD) + 20 - 16) // 32 * 32


# ---- in this process: what is refused, what is said


def here(monkeypatch: Any, capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["vq", "run", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert sys.argv[0] == "vq"
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "kivi", "convert"), "accepted are benchmark, cache_prompt, chat, evaluate, generate, server"),
        (("generate", "--prompt", "a"), "no method: give --method"),
        (("--method", "nothing", "generate"), "unknown method 'nothing'"),
        (("--method", "kivi", "--residual", "-1", "generate"), "residual"),
        (("--method", "kivi", "generate", "--kv-bits", "4"), "--kv-bits quantizes mlx-lm's own caches"),
        (("--method", "kivi", "server", "--kv-bits=4"), "--kv-bits quantizes mlx-lm's own caches"),
        (("--method", "kivi", "generate", "--model", ""), "the model's name is empty"),
        (("--method", "kivi", "server", "--draft-model="), "the model's name is empty"),
        (("--method", "kivi", "--", "cache_prompt", "--kv-b", "4"), "--kv-b quantizes mlx-lm's own caches"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(arguments: Any, said: str, monkeypatch: Any, capsys: Any) -> None:
    status, out, err = here(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and err.startswith("vq: ") and said in err


@pytest.mark.parametrize("option", ["--draft-model=x", "--draft=x", "--d=x"])
def test_a_method_that_keeps_rejected_tokens_takes_no_draft(option: str, monkeypatch: Any, capsys: Any) -> None:
    with registered(load_plugin(Path(__file__).parent.parent / "methods" / "picky.py")):
        status, out, err = here(monkeypatch, capsys, "--keys", "kivi", "--values", "picky", "generate", option)
    assert (status, out) == (2, "") and "the method picky cannot drop packed tokens" in err


def test_a_model_that_a_request_names_may_be_refused(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    """A server without a model of its own goes on; the request has got the error."""
    module = importlib.import_module("mlx_lm.server")
    said = []

    def serve() -> None:
        def request() -> None:
            try:
                mlx_lm.load(str(folder))
            except VQError as error:
                said.append(str(error))

        thread = threading.Thread(target=request)
        thread.start()
        thread.join()
        said.append("goes on")

    monkeypatch.setattr(module, "main", serve)
    with registered(load_plugin(Path(__file__).parent.parent / "methods" / "picky.py")):
        status, _, err = here(monkeypatch, capsys, "--keys", "kivi", "--values", "picky", "server")
    assert "head size 32" in said[0] and said[1:] == ["goes on"]
    assert status == 2 and "head size 32" in err  # nothing was ever loaded


def test_nothing_packed_is_exit_status_3(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    status, _, err = here(
        monkeypatch, capsys, "--method", "kivi", "--", "generate", "--model", folder, "--prompt", "hi",
        "--max-tokens", 3,
    )  # fmt: skip
    assert status == 3 and err.endswith("vq: no token was packed; see the notes of the report\n")


def test_batches_are_refused_in_one_line(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    status, _, err = here(
        monkeypatch, capsys, "--method", "kivi", "benchmark", "--model", folder, "-p", 20, "-g", 2, "-n", 1, "-b", 2
    )
    assert status == 2 and "a batch size of 1" in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore:mlx_lm.server:UserWarning")
def test_a_server_whose_model_is_refused_ends(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    """mlx-lm's server loads in a thread and would go on without a model, answering nobody."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    picky = load_plugin(Path(__file__).parent.parent / "methods" / "picky.py")
    with registered(picky):
        status, out, err = here(
            monkeypatch, capsys, "--keys", "kivi", "--values", "picky", "server", "--model", folder,
            "--port", port,
        )  # fmt: skip
    assert (status, out) == (2, "") and "Traceback" not in err
    assert err.splitlines()[-1].startswith("vq: layer 0") and "head size 32" in err.splitlines()[-1]


def test_a_command_whose_parts_are_missing(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm.evaluate", None)  # as where lm_eval is not installed
    status, out, err = here(monkeypatch, capsys, "--method", "kivi", "evaluate", "--model", "x")
    assert (status, out) == (2, "") and err.startswith("vq: mlx-lm's evaluate cannot be imported")


def test_the_command_has_its_own_help_and_errors(monkeypatch: Any, capsys: Any) -> None:
    status, out, _ = here(monkeypatch, capsys, "--method", "kivi", "generate", "--help")
    assert status == 0 and "usage: mlx_lm.generate" in out
    status, _, err = here(monkeypatch, capsys, "--method", "kivi", "cache_prompt", "--model", "x")
    assert status == 2 and "--prompt-cache-file" in err


def test_the_model_that_ships_by_name(monkeypatch: Any, capsys: Any) -> None:
    assert model_path("demo") == str(MODEL_PATH) and model_path("./demo") == "./demo"
    status, _, err = here(
        monkeypatch, capsys, *METHOD, "generate", "--model=demo", "--draft-model", "demo", "--prompt", HEAD,
        "--max-tokens", 2,
    )  # fmt: skip
    assert status == 0 and err.count(str(MODEL_PATH)) == 2


def test_a_window_takes_no_draft(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Be it the model's or the draft's, before the first token: mlx-lm would keep rejected tokens in it."""
    sliding = save(tmp_path, "llama_windows")
    for model, draft in ((folder, sliding), (sliding, folder)):
        status, out, err = here(
            monkeypatch, capsys, *METHOD, "generate", "--model", model, "--draft", draft, "--prompt", HEAD,
        )  # fmt: skip
        assert (status, out) == (2, "") and "a text may overrun" in err.splitlines()[-1] and "Traceback" not in err
        assert str(sliding) in err.splitlines()[-1] and err.count("vq: ") == 1


def test_what_mlx_lm_raises_is_one_line(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "empty.safetensors").write_bytes(b"")
    for given in (
        ("generate", "--model", folder, "--prompt-cache-file", tmp_path / "empty.safetensors", "--prompt", "a"),
        ("generate", "--model", "/no/such", "--prompt", "a"),
        ("cache_prompt", "--model", folder, "--prompt", "a", "--prompt-cache-file", tmp_path / "no" / "file"),
    ):
        status, _, err = here(monkeypatch, capsys, *METHOD, *given)
        line = err.splitlines()[-1]
        assert status == 1 and "Traceback" not in err and err.count("vq: ") == 1
        assert line.startswith(f"vq: mlx-lm's {given[0]} failed: ") and line.endswith("VQ_DEBUG=1 shows the traceback")
    monkeypatch.setenv("VQ_DEBUG", "1")
    status, _, err = here(monkeypatch, capsys, *METHOD, "generate", "--model", "/no/such", "--prompt", "a")
    assert status == 1 and "Traceback" in err


def test_an_error_of_two_lines(monkeypatch: Any, capsys: Any) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr(importlib.import_module("mlx_lm.benchmark"), "main", fail)
    raised: BaseException = LookupError("two\nlines")
    status, out, err = here(monkeypatch, capsys, *METHOD, "benchmark")
    assert (status, out) == (1, "")
    assert err == "vq: mlx-lm's benchmark failed: LookupError: two lines; VQ_DEBUG=1 shows the traceback\n"
    raised = KeyboardInterrupt()
    assert here(monkeypatch, capsys, *METHOD, "benchmark")[0] == 130


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore:mlx_lm.server:UserWarning")
@pytest.mark.parametrize("case", ["no model", "damaged tokenizer", "no draft", "a draft with windows"])
def test_a_server_without_its_models_ends(
    case: str, folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """It loads them in a thread, and would go on without them, answering nobody."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    broken = save(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    sliding = save(tmp_path / "sliding", "llama_windows")
    models: Any = {
        "no model": ("--model", "/no/such"),
        "damaged tokenizer": ("--mod", broken),
        "no draft": ("--model", folder, "--draft-model", "/no/such"),
        "a draft with windows": ("--model", folder, "--draft-model", sliding),
    }[case]
    status, out, err = here(monkeypatch, capsys, *METHOD, "server", *models, "--port", port)
    line = err.splitlines()[-1]
    assert out == "" and "Traceback" not in err and err.count("vq: ") == 1
    if case == "a draft with windows":
        assert status == 2 and "a text may overrun" in line
    else:
        assert status == 1 and line.startswith("vq: mlx-lm's server failed: ")
