"""From a model and a text to a file of constants."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

import vq_core
from vq_core.api.calibration import Calibration
from vq_core.api.facts import PrepareContext, Side
from vq_core.calibration import artifact
from vq_core.calibration.artifact import Learnt, Place
from vq_core.calibration.samples import Draw, Sample
from vq_core.errors import HostError, PluginError, SettingsError, UnsupportedShapeError, VQError
from vq_core.plugins.loader import make_manager
from vq_core.plugins.records import MethodRecord

SAMPLES, CONTEXT, ROUNDS = 4096, 2048, 25
Heard = Callable[[int, Side, mx.array], None]
"""Told of each layer side's new tokens (1, H, n, D)."""
Reading = Iterable[int]
"""Runs the model on the text; gives the number of a step's tokens after all that it was told of them."""
Tell = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and how much there is."""


def calibrate(
    method: str,
    read: Callable[[Heard], Reading],
    tokens: Sequence[int],
    path: str | os.PathLike[str],
    *,
    model: str,
    sides: Sequence[Side] | None = None,
    samples: int = SAMPLES,
    rounds: int = ROUNDS,
    seed: int = 0,
    tell: Tell = lambda what, done, of: None,
) -> Learnt:
    """Learn a method's constants from what a model's caches are given, and write them.

    Args:
        method: Text form, without a file.
        read: Runs the model: the host's, such as :func:`vq_core.hosts.mlx_lm.observe`.
        tokens: The text's tokens, for the record and for progress.
        path: The file.
        model: The model's identity.
        sides: Sides to learn; by default all that the method can hold.
        samples: Tokens of each layer side that are kept. They take ``2 * samples * H * D`` bytes a layer side of a
            float16 model, twice that of others; nothing else grows with the text.
        rounds: The most rounds of an iteration of the method.
        seed: Of what is random: which tokens are kept, where an iteration starts.
        tell: For progress.

    Raises:
        SettingsError: a method that needs no calibration, sides that it cannot hold, a text that is too short,
            a path that cannot be written.
        UnsupportedShapeError: head sizes that the method refuses.
        PluginError: the method breaks the contract.
    """
    record, settings = artifact.chosen(method)
    assert record.facts is not None
    wanted = _sides(record, sides)
    for name, value in (("samples", samples), ("rounds", rounds)):
        if value < 1:
            raise SettingsError(f"{name} must be 1 or more; got {value}")
    held = _listen(read, tokens, record, wanted, samples, seed, tell)
    made: dict[Place, Mapping[str, mx.array]] = {}
    for number, place in enumerate(sorted(held, key=lambda p: (p.layer, p.side, p.kv_heads, p.head_dim))):
        tell("learning", number, len(held))
        dtype, sample = held.pop(place)
        ctx = _context(place, dtype, seed, model)
        where = f"layer {place.layer}, {place.side}"
        made[place] = learn(record, settings, ctx, sample.calibration(rounds, where), where)
        tell("learning", number + 1, number + 1 + len(held))
    text = hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()
    learnt = {
        "vq_core": vq_core.__version__, "tokens": len(tokens), "text": text, "samples": samples, "seed": seed,
        "rounds": rounds,
    }  # fmt: skip
    return written(path, record, settings, model, learnt, made)


def learn(
    record: MethodRecord, settings: Any, ctx: PrepareContext, calibration: Calibration, where: str
) -> Mapping[str, mx.array]:
    """One layer side's constants, evaluated.

    Raises:
        VQError: what the method refuses; ``where`` stands in front.
        PluginError: it has no ``vq_calibrate``, which fails or gives anything but arrays.
    """
    manager = make_manager(record.plugin, record.label)
    try:
        arrays = manager.hook.vq_calibrate(ctx=ctx, settings=settings, calibration=calibration)
    except VQError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:  # whatever a stranger's code raises becomes one typed error that names it
        said = f"{type(error).__name__}: {error}"
        raise PluginError(f"method {record.name!r}: vq_calibrate failed with {said}") from error
    fits = isinstance(arrays, Mapping) and arrays and all(isinstance(a, mx.array) for a in arrays.values())
    if not fits:
        raise PluginError(f"method {record.name!r}: vq_calibrate must return arrays by name, it gave {arrays!r:.80}")
    mx.eval(list(arrays.values()))
    return dict(arrays)


def written(
    path: str | os.PathLike[str], record: MethodRecord, settings: Any, model: str | None, learnt: Mapping[str, Any],
    made: Mapping[Place, Mapping[str, mx.array]],
) -> Learnt:  # fmt: skip
    """Write what was made, and read it again."""
    method = {"name": record.name, "distribution": record.distribution, "version": record.version}
    artifact.write(path, Learnt(method, artifact.settings_text(settings), model, learnt, made))
    return artifact.read(path)


def _sides(record: MethodRecord, sides: Sequence[Side] | None) -> tuple[Side, ...]:
    assert record.facts is not None
    wrong = [side for side in sides or () if side not in record.facts.sides]
    if wrong:
        raise SettingsError(f"method {record.name!r} can hold {' and '.join(record.facts.sides)}, not {wrong[0]}")
    return tuple(sides) if sides else record.facts.sides


def _context(place: Place, dtype: str, seed: int, model: str | None) -> PrepareContext:
    return PrepareContext(
        side=place.side,  # type: ignore[arg-type]
        kv_heads=place.kv_heads, key_dim=place.head_dim, value_dim=place.head_dim, dtype=dtype, layer=place.layer,
        seed=seed, model=model,
    )  # fmt: skip


def _listen(
    read: Callable[[Heard], Reading], tokens: Sequence[int], record: MethodRecord, sides: Sequence[Side], samples: int,
    seed: int, tell: Tell,
) -> dict[Place, tuple[str, Sample]]:  # fmt: skip
    """Samples and statistics of every layer side that the model fills."""
    if not len(tokens):
        raise SettingsError("the calibration text has no token: give a longer one")
    draw, done = Draw(min(samples, len(tokens)), seed), 0
    drawn: list[Any] = []  # of this step: its length, and which of its tokens stay
    held: dict[Place, tuple[str, Sample]] = {}

    def heard(layer: int, side: Side, x: mx.array) -> None:
        if side not in sides:
            return
        count = x.shape[2]
        if not drawn:
            drawn[:] = [count, *draw.next(count)]
        if count != drawn[0] or x.shape[0] != 1:
            raise HostError(f"layer {layer} is given {x.shape[0]} rows of {count} tokens, others 1 of {drawn[0]}")
        place, dtype = Place(layer, side, x.shape[1], x.shape[3]), str(x.dtype).removeprefix("mlx.core.")
        if place not in held:
            try:  # now, and not when the model has read all of the text
                artifact.check_size(record, place.head_dim)
            except UnsupportedShapeError as error:
                raise UnsupportedShapeError(f"layer {layer}, {side}: {error}") from error
            held[place] = dtype, Sample(draw.most, place.kv_heads, place.head_dim, dtype)
        held[place][1].add(x, drawn[1], drawn[2])

    tell("reading", 0, len(tokens))
    for count in read(heard):
        drawn.clear()
        done += count
        tell("reading", done, len(tokens))
    if not held:
        raise SettingsError("the model fills no cache of keys and values that vq could pack: nothing can be learnt")
    return held
