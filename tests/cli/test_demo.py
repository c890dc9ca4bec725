"""`vq demo` on the model that ships, with few tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from vq_core.cli import demo
from vq_core.cli.main import main
from vq_core.demo.show import Arm, run_demo
from vq_core.errors import SettingsError

KEYS = {
    "name", "prompt_end", "text", "tokens", "packed", "held", "fp16", "ratio",
    "kl", "top1", "perplexity", "scored", "packed_share",
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Any:
    """One run, as a user starts it."""
    command = [sys.executable, "-m", "vq_core", "demo", "--json", "--max-tokens", "24", "--scored", "80"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_caches_side_by_side(made: Any) -> None:
    assert [arm["name"] for arm in made] == ["fp16", "kivi:bits=4", "kivi:bits=2"]
    plain, four, two = made
    for arm in made:
        assert set(arm) == KEYS
        assert arm["text"].strip() and "\ufffd" not in arm["text"]
        assert arm["tokens"] == plain["tokens"] > 1024 and arm["scored"] == 80
        assert arm["ratio"] == pytest.approx(arm["fp16"] / arm["held"], abs=1e-4)
    assert (plain["packed"], plain["kl"], plain["top1"]) == (0, 0, 1)
    # Most of the context is packed, and it shows in bytes.
    assert four["packed"] == two["packed"] > 0.85 * four["tokens"]
    assert plain["ratio"] <= 1 < 2.5 < four["ratio"] < two["ratio"]
    assert 0 < four["kl"] < two["kl"] < 0.2
    assert 1 >= four["top1"] >= two["top1"] > 0.8
    assert four["packed_share"] == two["packed_share"] > 0.7


def test_the_table(made: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arms = [Arm(**{k: v for k, v in arm.items() if k != "ratio"}) for arm in made]
    demo._print(arms)
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    for arm in arms:
        assert out.count(arm.name) >= 2
        assert arm.text.split()[0] in out
        row = next(line for line in out.splitlines() if line.split()[:1] == [arm.name] and "%" in line)
        assert f"{arm.held:,}" in row and f"{arm.kl:.5f}" in row and f"{arm.perplexity:.3f}" in row
    assert "teacher-forced over 80 tokens" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "nothing"), "unknown method"),
        (("--method", "kivi:bits=5"), "bits"),
        (("--max-tokens", "100000"), "100000 new tokens do not fit: the demo's prompt has 1848, the model's context h"),
        (("--scored", "10000000"), "scores 1 to"),
    ],
)
def test_bad_input_is_one_line(arguments: Any, said: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["vq", "demo", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert said in err.splitlines()[-1] and "Traceback" not in err


def test_no_method_at_all() -> None:
    with pytest.raises(SettingsError, match="at least one method"):
        run_demo(methods=[])
