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
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


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
    command = commands()[words[0]]
    made = command.make_context(words[0], words[1:])
    assert made.params


def test_there_are_examples_of_every_command() -> None:
    assert {line.split()[1] for line in EXAMPLES} >= set(commands()) and len(EXAMPLES) > 15
