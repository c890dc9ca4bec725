"""`vq generate` on a tiny model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vq_core.errors import SettingsError

TEXT = "It is a truth universally acknowledged, that a cache in want of memory must be packed. " * 2
TOKENS = len(TEXT)
Vq = Callable[..., tuple[int, str, str]]


def figure(out: str, name: str) -> str:
    """A value of the table of totals."""
    line = next(line for line in out.splitlines() if name in line)
    return line.split("│")[2].strip()


def test_text_then_report(folder: Path, vq: Vq) -> None:
    status, out, err = vq("generate", folder, "-p", TEXT, "--method", "kivi:bits=4", "--max-tokens", 20)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    text = "".join(lines[: next(i for i, line in enumerate(lines) if line.startswith("layers"))])
    assert len(text) > 5
    tokens = TOKENS + 20
    packed = (tokens - 128) // 32 * 32
    assert figure(out, "tokens packed / exact") == f"{packed} / {tokens - packed} / 0"
    layers = [line.split() for line in lines if "kivi" in line]
    assert [(*row[:4], *row[6:]) for row in layers] == [
        ("0-1", "packed", f"{packed}", f"{tokens - packed}", "kivi:bits=4,group_size=32")
    ]
    kinds = ("codes", "scales", "exact window", "spare")
    held = sum(int(figure(out, f"bytes: {kind}").replace(",", "")) for kind in kinds)
    assert figure(out, "held in packed layers") == f"{held:,}"
    fp16 = 2 * tokens * 2 * 2 * 32 * 2
    assert figure(out, "the same in fp16") == f"{fp16:,}"
    assert figure(out, "fp16 / held") == f"{fp16 / held:.2f}"
    assert figure(out, "prompt").startswith(f"{TOKENS} tokens, ") and figure(out, "prompt").endswith("tok/s")
    assert figure(out, "generation").startswith("20 tokens, ")
    assert figure(out, "peak memory").endswith("MiB")


def test_json(folder: Path, vq: Vq) -> None:
    status, out, _ = vq(
        "generate", folder, "-p", TEXT, "--keys", "kivi:bits=8", "--values", "kivi:bits=4,group_size=64",
        "--residual", 32, "--sink-tokens", 4, "--max-tokens", 20, "--json",
    )  # fmt: skip
    assert status == 0
    made = json.loads(out)
    assert set(made) == {
        "text", "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "peak_memory", "context",
        "loaded_tokens", "held_tokens", "saved", "draft", "notes", "report",
    }  # fmt: skip
    assert (made["context"], made["loaded_tokens"], made["held_tokens"]) == (4096, 0, TOKENS + 20)
    assert (made["saved"], made["draft"], made["notes"]) == (None, None, [])
    assert (made["prompt_tokens"], made["generation_tokens"]) == (TOKENS, 20)
    assert set(made["report"]) == {"layers", "bytes", "native_bytes", "notes"}
    for entry in made["report"]["layers"]:
        layer = entry["report"]
        assert layer["keys"] == "kivi:bits=8,group_size=32" and layer["values"] == "kivi:bits=4,group_size=64"
        assert layer["tokens"] == layer["packed"] + layer["exact"] == TOKENS + 20
        assert layer["packed"] == (TOKENS + 20 - 32 - 4) // 32 * 32
        assert layer["bytes"]["held"] == sum(layer["bytes"][k] for k in ("codes", "metadata", "window", "spare"))


def test_what_a_library_prints_stays_out_of_the_json(folder: Path, vq: Vq, monkeypatch: Any) -> None:
    import mlx_lm

    load = mlx_lm.load
    monkeypatch.setattr(mlx_lm, "load", lambda name, **more: (print("[WARNING] a big model"), load(name, **more))[1])
    status, out, err = vq("generate", folder, "-p", TEXT, "--method", "kivi", "--max-tokens", 2, "--json")
    assert status == 0 and json.loads(out)["text"] and "a big model" in err


def test_the_same_text_as_mlx_lm(folder: Path, vq: Vq) -> None:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(folder))
    want = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=20)
    _, out, _ = vq("generate", folder, "-p", TEXT, "--method", "kivi", "--max-tokens", 20, "--residual", 500, "--json")
    assert json.loads(out)["text"] == want


def test_prompt_from_standard_input(folder: Path, vq: Vq) -> None:
    arguments = ("generate", folder, "--method", "kivi", "--max-tokens", 5, "--json")
    _, given, _ = vq(*arguments, "-p", TEXT)
    status, read, _ = vq(*arguments, "-p", "-", stdin=TEXT.encode())
    assert status == 0 and json.loads(read)["text"] == json.loads(given)["text"]


@pytest.mark.parametrize("form", [(), ("--json",)], ids=("table", "json"))
def test_nothing_packed_is_exit_status_3(folder: Path, vq: Vq, form: Any) -> None:
    """Case 34."""
    status, out, err = vq("generate", folder, "-p", "short", "--method", "kivi", "--max-tokens", 3, *form)
    assert status == 3 and err == "vq: no token was packed; see the notes of the report\n"
    assert "a method was asked for and no token is packed" in out


def test_layers_left_alone_are_named(folders: dict[str, Path], vq: Vq) -> None:
    status, out, _ = vq("generate", folders["jamba"], "-p", TEXT, "--method", "kivi", "--max-tokens", 3)
    assert status == 0 and "ArraysCache: recurrent state" in out
    assert int(figure(out, "layers left native").replace(",", "")) > 0
    status, out, _ = vq("generate", folders["gpt_oss"], "-p", TEXT, "--method", "kivi", "--max-tokens", 3)
    assert status == 0 and out.count("RotatingKVCache: a sliding window of 16 tokens") == 2


@pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")
def test_layers_read_densely_are_named(folders: dict[str, Path], vq: Vq) -> None:
    status, out, _ = vq("generate", folders["stablelm"], "-p", TEXT, "--method", "kivi", "--max-tokens", 3)
    assert status == 0 and "dense" in out and "computes on the fetched keys" in out


BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "no method": ((), "no method: give --method"),
    "unknown method": (("--method", "nothing"), "unknown method 'nothing'"),
    "a near miss": (("--method", "ki-vi"), "Did you mean 'kivi'"),
    "unknown setting": (("--method", "kivi:bit=4"), "no setting 'bit'"),
    "bits out of range": (("--method", "kivi:bits=5"), "bits"),
    "bits no number": (("--method", "kivi:bits=four"), "bits"),
    "group size out of range": (("--method", "kivi:group_size=48"), "group_size"),
    "method and keys": (("--method", "kivi", "--keys", "kivi"), "not both"),
    "keys alone": (("--keys", "kivi"), "no method for the values"),
    "residual": (("--method", "kivi", "--residual", -1), "residual"),
    "sink tokens": (("--method", "kivi", "--sink-tokens", -1), "sink_tokens"),
    "attention": (("--method", "kivi", "--attention", "quick"), "attention"),
    "fallback": (("--method", "kivi", "--fallback", "no"), "fallback"),
    "empty prompt": (("--method", "kivi", "-p", ""), "prompt is empty"),
    "empty standard input": (("--method", "kivi", "-p", "-"), "prompt is empty"),
    "half a character": (("--method", "kivi", "-p", "a\udcff"), "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_status_2(name: str, folder: Path, vq: Vq) -> None:
    arguments, said = BAD[name]
    status, out, err = vq("generate", folder, "-p", TEXT, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("vq: ") and err.count("\n") == 1 and said in err


def test_bytes_that_are_no_text(folder: Path, vq: Vq) -> None:
    status, out, err = vq("generate", folder, "-p", "-", "--method", "kivi", stdin=b"\xff\xfe")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "not UTF-8" in err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/no/such/folder", "no such folder"),
        ("nobody/no-such-model", "cannot load"),
        (".", "cannot load"),
        ("", "name is empty"),
        (" ", "name is empty"),
    ],
)
def test_a_model_that_is_not_there(model: str, said: str, vq: Vq, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = vq("generate", model, "-p", TEXT, "--method", "kivi")
    assert (status, out) == (2, "")
    assert err.startswith("vq: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    "arguments",
    [("--max-tokens", 0), ("--temp", -1), ("--temp", "nan"), ("--seed", -1), ("--seed", 2**64), ("--nothing",)],
    ids=str,
)
def test_usage_errors_are_exit_status_2(arguments: Any, folder: Path, vq: Vq) -> None:
    status, out, err = vq("generate", folder, "-p", TEXT, "--method", "kivi", *arguments)
    assert (status, out) == (2, "") and str(arguments[0]) in err and "Traceback" not in err


def test_an_interrupt_is_no_traceback(folder: Path, vq: Vq, monkeypatch: Any) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    import mlx_lm

    monkeypatch.setattr(mlx_lm, "stream_generate", interrupted)
    status, _, err = vq("generate", folder, "-p", TEXT, "--method", "kivi")
    assert status not in (0, 3) and "Traceback" not in err


def test_as_users_run_it(folder: Path) -> None:
    """A process of its own, its output in a pipe of 80 columns."""
    command = [sys.executable, "-m", "vq_core", "generate", str(folder), "-p", TEXT, "--method", "kivi:bits=2"]
    done = subprocess.run([*command, "--max-tokens", "5"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kivi:bits=2,group_size=32" in done.stdout and "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines()[3:])) <= 80


@pytest.mark.parametrize("length", [50.5, "many", float("inf")])
def test_a_configuration_that_a_library_refuses(length: Any, folder: Path, vq: Vq, tmp_path: Path) -> None:
    """The hub's library raises an error of its own kind for it."""
    model = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
    for given in ((model,), (folder, "--draft-model", model)):
        status, out, err = vq("generate", *given, "-p", TEXT, "--method", "kivi")
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert err.startswith(f"vq: mlx-lm cannot load '{model}': ") and "max_position_embeddings" in err


def test_whatever_loading_raises(folder: Path, vq: Vq, monkeypatch: Any) -> None:
    import mlx_lm

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise raised

    monkeypatch.setattr(mlx_lm, "load", broken)
    raised: BaseException = Exception("two\nlines")
    status, out, err = vq("generate", folder, "-p", TEXT, "--method", "kivi")
    assert (status, out, err) == (2, "", f"vq: mlx-lm cannot load '{folder}': Exception: two lines\n")
    raised = KeyboardInterrupt()
    assert vq("generate", folder, "-p", TEXT, "--method", "kivi")[0] == 130
    raised = SettingsError("said already")
    assert vq("generate", folder, "-p", TEXT, "--method", "kivi") == (2, "", "vq: said already\n")


@pytest.mark.parametrize(
    "arguments",
    [("list-methods",), ("info", "kivi"), ("--version",), ("generate", "{folder}", "-p", TEXT, "--method", "kivi")],
    ids=lambda given: given[0],
)
def test_output_that_cannot_be_written(arguments: Any, folder: Path) -> None:
    """At once, or when Python ends and would write what is left."""
    given = [str(folder) if argument == "{folder}" else argument for argument in arguments]
    with open(os.devnull, "rb") as unwritable:  # as a disk that is full, on every system
        done = subprocess.run(
            [sys.executable, "-m", "vq_core", *given], stdout=unwritable, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr == "vq: reading or writing failed: [Errno 9] Bad file descriptor\n"


def test_a_reader_that_has_read_enough(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vq_core", "generate", str(folder), "-p", TEXT, "--method", "kivi"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
