"""mlx_lm.server itself, in a process of its own, on a tiny model with packed caches; localhost only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from .models import save

PREFIX = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no memory in my purse, "
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama")


@contextmanager
def serving(folder: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The address of a server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = Path(__file__).with_name("server_child.py")
    command = [sys.executable, str(child), *arguments, "--model", str(folder), "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def ask(address: str, text: str) -> tuple[str, int]:
    """The completion of a text, and how many of its tokens came from the prompt cache."""
    body = json.dumps({"prompt": text, "max_tokens": TOKENS, "temperature": 0.0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=120))
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def test_requests_one_by_one_and_at_once(folder: Path, tmp_path: Path) -> None:
    """Three in a row and four together on a shared prefix: the text of direct generation, and prefixes are reused."""
    model, tokenizer = mlx_lm.load(str(folder))
    prompts = [PREFIX + end for end in ("I thought I would sail.", "I went to sleep.", "I packed my keys.")]

    def want(text: str) -> str:
        return mlx_lm.generate(model, tokenizer, text, max_tokens=TOKENS)

    log = tmp_path / "server.log"
    with serving(folder, log, "identity", "8") as address:
        cached = []
        for text in prompts:
            got, count = ask(address, text)
            assert got == want(text), log.read_text()
            cached.append(count)
        shared = len(PREFIX) + len("I ")  # the tokens are bytes
        assert cached == [0, shared, shared]
        more = [PREFIX + end for end in ("A", "Bb", "Ccc", "Dddd")]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda text: ask(address, text), more))
        for text, (got, count) in zip(more, answers, strict=True):
            assert got == want(text), log.read_text()
            assert count >= len(PREFIX)
