"""docs/command-line.md: every option of every command, and commands that parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from vq_core.cli.main import app
from vq_core.cli.run import COMMANDS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "command-line.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)
EXAMPLES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("vq ")]


def commands() -> dict[str, Any]:
    """By name; those of a group by both words."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {word}": one for word, one in inner.items()}
    return found


def split(words: list[str]) -> tuple[str, list[str]]:
    """The command's name and what follows."""
    count = 1 if words[0] in commands() else 2
    return " ".join(words[:count]), words[count:]


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_is_documented(name: str) -> None:
    assert f"vq {name}" in PAGE
    for parameter in commands()[name].params:
        for option in parameter.opts:
            if option.startswith("-"):
                assert f"`{option}`" in PAGE, f"{name} {option}"


def test_what_run_accepts_is_documented() -> None:
    for name in COMMANDS:
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_parse(line: str) -> None:
    """Every example is a command of this program whose options it knows; they were run when they were written."""
    words = shlex.split(line.partition(" <")[0])[1:]
    if words == ["--version"]:
        return
    name, rest = split(words)
    made = commands()[name].make_context(name, rest)
    assert made.params


def test_there_are_examples_of_every_command() -> None:
    named = {split(line.split()[1:])[0] for line in EXAMPLES if line != "vq --version"}
    assert named >= set(commands()) and len(EXAMPLES) > 15
