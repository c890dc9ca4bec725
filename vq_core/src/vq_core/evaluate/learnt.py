"""Constants for methods that need calibration and were given no artifact: learnt for the time of an evaluation.

What is learnt from is never what is scored: other draws of the same distribution, or another part of the text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import vq_core
from vq_core.api.calibration import Calibration
from vq_core.api.facts import PrepareContext
from vq_core.api.settings import format_choice, parse_choice
from vq_core.calibration import artifact
from vq_core.calibration.artifact import Place
from vq_core.calibration.learn import ROUNDS, calibrate, learn, written
from vq_core.hosts.mlx_lm import identity, observe
from vq_core.plugins.registry import resolve

CONTEXT = 2048
"""Tokens of the sequences that a model reads, at most."""


def needs(text: str) -> bool:
    """Whether a method has to learn, and its text form names no artifact."""
    choice = parse_choice(text)
    facts = resolve(choice.label).facts
    assert facts is not None
    return facts.capabilities.needs_calibration and not dict(choice.options).get(artifact.SETTING)


class Learning:
    """A folder of artifacts that goes when the ``with`` block ends."""

    def __init__(self) -> None:
        self._made: dict[Any, str] = {}

    def __enter__(self) -> Learning:
        self._folder = tempfile.TemporaryDirectory(prefix="vq-evaluate-")
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def _file(self) -> Path:
        return Path(self._folder.name) / f"{len(self._made)}.vqa"

    def from_numbers(self, text: str, ctx: PrepareContext, kind: Any, x: NDArray[Any]) -> str:
        """The text form with constants learnt from tokens (n, D), one KV head; once for equal ``kind``."""
        key = (text, ctx, kind)
        if key not in self._made:
            record, settings = artifact.chosen(text)
            wide = x.astype(np.float32)[None]
            low, high, mean = (mx.array(f(axis=1)) for f in (wide.min, wide.max, wide.mean))
            given = Calibration(mx.array(wide), len(x), low, high, mean, ROUNDS)
            made = {Place.of(ctx): learn(record, settings, ctx, given, f"{ctx.side} of {text}")}
            told = {"vq_core": vq_core.__version__, "tokens": len(x), "text": "synthetic", "samples": len(x)}
            file = self._file()
            written(file, record, settings, None, told | {"seed": ctx.seed, "rounds": ROUNDS}, made)
            self._made[key] = _with(text, file)
        return self._made[key]

    def from_model(
        self, text: str, model: Any, ids: Sequence[int], context: int | None, tell: Callable[[str], None]
    ) -> str:
        """The text form with constants learnt from a model that reads ``ids``; once a text form.

        Raises:
            SettingsError: too few tokens for the method.
        """
        if text not in self._made:
            tell(f"{text}: learning from {len(ids)} tokens")
            file = self._file()
            longest = min(CONTEXT, context or CONTEXT)
            calibrate(text, lambda heard: observe(model, ids, heard, context=longest), ids, file, model=identity(model))
            self._made[text] = _with(text, file)
        return self._made[text]


def _with(text: str, file: Path) -> str:
    _, settings = artifact.chosen(text)
    return format_choice(parse_choice(text).label, attrs.evolve(settings, **{artifact.SETTING: str(file)}))
