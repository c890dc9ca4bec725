"""An artifact learnt from random numbers, for tests, verification and clocks.

Constants that fit N(0, 1) and no model's keys: no model's cache takes them, since they are of no model.  Or they are of
a model of random weights alone, which is there to be timed.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import vq_core
from vq_core.api.calibration import Calibration
from vq_core.api.facts import PrepareContext
from vq_core.api.settings import format_choice, parse_choice
from vq_core.calibration import artifact
from vq_core.calibration.artifact import Place
from vq_core.calibration.learn import learn, written
from vq_core.errors import SettingsError, UnsupportedShapeError
from vq_core.plugins.records import MethodRecord
from vq_core.plugins.registry import resolve

NUMBERS, ROUNDS = 2**16, 4
"""Random numbers of each layer side, and rounds, unless more are asked for: enough to run with."""
MOST = 2**23
"""Numbers at most, for settings that need more; they are learnt from in one round."""
SAID = (
    "its constants are a stand-in, learnt from random numbers: times and bytes are those with an artifact of a model "
    "(vq calibrate), what is decoded is not"
)
"""For records and what is printed of them."""


def completed(
    text: str, shapes: Iterable[tuple[int, int]], numbers: int = NUMBERS, *, model: str | None = None, layers: int = 0
) -> str:
    """A method's text form, with a stand-in where the method needs an artifact and the text names none.

    Args:
        text: Any method's.
        shapes: KV heads and head size of the caches that it is for; those that the method refuses are left out.
        numbers: Random numbers of each layer side that it is learnt from, made up to whole tokens; twice as many until
            they are enough for the settings.
        model: Identity of a model of random weights; ``None``: for caches of no model.
        layers: Of that model; all get the same constants.

    Raises:
        SettingsError: settings that the method does not accept.
        UnsupportedShapeError: it refuses all of the shapes.
    """
    choice = parse_choice(text)
    facts = resolve(choice.label).facts
    if facts is None or not facts.capabilities.needs_calibration or dict(choice.options).get(artifact.SETTING):
        return text
    record, settings = artifact.chosen(text)
    path = _made(
        choice.label, record.version, format_choice(record.name, settings), tuple(sorted(set(shapes))), numbers,
        model, layers,
    )  # fmt: skip
    return format_choice(choice.label, attrs.evolve(settings, **{artifact.SETTING: path}))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vq-stand-in-")


@functools.cache
def _made(
    label: str, version: str, text: str, shapes: tuple[tuple[int, int], ...], numbers: int, model: str | None,
    layers: int,
) -> str:  # fmt: skip
    record, settings = artifact.chosen(f"{label}:{text.partition(':')[2]}" if ":" in text else label)
    assert record.facts is not None
    made = {}
    refused: UnsupportedShapeError | None = None
    for side in record.facts.sides:
        for heads, dim in shapes:
            ctx = PrepareContext(side=side, kv_heads=heads, key_dim=dim, value_dim=dim, dtype="float16")
            try:
                arrays = _learnt(record, settings, ctx, numbers)
            except UnsupportedShapeError as error:
                refused = error
                continue
            for layer in range(layers) if model else (None,):
                made[Place(layer, side, heads, dim)] = arrays
    if not made:
        raise refused or UnsupportedShapeError("a stand-in needs a shape: give KV heads and a head size")
    learnt = {
        "vq_core": vq_core.__version__, "tokens": numbers, "text": "N(0, 1)", "samples": numbers, "seed": 0,
        "rounds": ROUNDS,
    }  # fmt: skip
    path = str(Path(_folder().name) / f"{_made.cache_info().misses}.vqa")
    written(path, record, settings, model, learnt, made)
    return path


def _learnt(record: MethodRecord, settings: Any, ctx: PrepareContext, numbers: int) -> Mapping[str, mx.array]:
    """From so many numbers, or from the fewest that the method finds enough."""
    heads, dim, rounds = ctx.kv_heads, ctx.head_dim, ROUNDS
    artifact.check_size(record, dim)
    while True:
        given = _random(heads, dim, -(-numbers // (heads * dim)), rounds)
        try:
            return learn(record, settings, ctx, given, f"{ctx.side} of {heads} heads of {dim}")
        except SettingsError:  # too few, as far as can be told
            if numbers >= MOST:
                raise
        numbers, rounds = 2 * numbers, 1


def _random(heads: int, dim: int, tokens: int, rounds: int) -> Calibration:
    x = np.random.default_rng((heads, dim)).standard_normal((heads, tokens, dim), np.float32)
    low, high, mean = (mx.array(f(axis=1)) for f in (x.min, x.max, x.mean))
    return Calibration(mx.array(x), tokens, low, high, mean, rounds)
