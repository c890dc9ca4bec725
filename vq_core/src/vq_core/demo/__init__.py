"""The model that ships: a Llama over bytes, small enough for a CPU, with text it never saw."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_PATH", "heldout_text", "prompt_text"]

_HERE = Path(__file__).parent

MODEL_PATH: Path = _HERE / "model"
"""What ``mlx_lm.load`` takes; ``MODEL_CARD.md`` in it says how it was made."""


def prompt_text() -> str:
    """About 2,000 bytes of prose that stop in the middle of a sentence."""
    return (_HERE / "prompt.txt").read_text(encoding="ascii").rstrip("\n")


def heldout_text() -> str:
    """About 24,000 bytes of the same novel, before the prompt and apart from it."""
    return (_HERE / "heldout.txt").read_text(encoding="ascii")
