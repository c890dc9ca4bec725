"""Bytes of codes and metadata in the arrays that a cache holds, against what the layout promises.

A method that needs calibration and names no artifact gets a stand-in, learnt from random numbers: bytes do not depend
on what is learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.api.facts import SIDES
from vq_core.bench.environment import environment
from vq_core.cache.report import side_bytes
from vq_core.cache.shell import PackedKVCache
from vq_core.calibration.stand_in import completed
from vq_core.errors import SettingsError, VQError
from vq_core.evaluate.arms import PARTNER, Pair, by_bits, pairs
from vq_core.plugins.binding import BoundSide
from vq_core.plugins.choice import choose
from vq_core.plugins.reach import state_arrays

TOLERANCE = 0.01
"""Share by which codes and metadata held may differ from the layout's figure."""


@attrs.frozen
class Wanted:
    """What is measured.

    Attributes:
        methods: See :func:`vq_core.evaluate.arms.candidates`; a method of one side is paired with ``partner``.
        partner: A method of the other side.
        tokens: Tokens of N(0, 1) that a cache is given at once.
        kv_heads: KV heads.
        head_dim: Head size.
        dtype: Of keys and values.
        residual: Newest tokens that stay exact.
    """

    methods: tuple[str, ...] = ()
    partner: str = PARTNER
    tokens: int = 4096
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "float16"
    residual: int = 128

    def __attrs_post_init__(self) -> None:
        for name in ("tokens", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.dtype not in ("float16", "bfloat16", "float32"):
            raise SettingsError(f"dtype {self.dtype!r}: accepted are float16, bfloat16 and float32")


def measure(wanted: Wanted, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """A row for each method.

    Raises:
        SettingsError, UnsupportedShapeError, PluginError: a method that was asked for refuses.
    """
    found, left_out = pairs(wanted.methods, partner=wanted.partner, mixed=False)
    rows = []
    for pair in found:
        tell(pair.name)
        try:
            rows.append(of_pair(pair, wanted))
        except VQError as error:
            if pair.asked:
                raise
            left_out.append({"arm": pair.name, "reason": str(error)})
    conditions = attrs.asdict(wanted) | {"tolerance": TOLERANCE, "about": "vq_core.evaluate.held, docs/evaluation.md"}
    rows = by_bits(rows, "family", lambda row: sum(sum(one["layout_bits"].values()) for one in row["sides"].values()))
    return {"environment": environment(), "conditions": conditions, "rows": rows, "left_out": left_out}


def of_pair(pair: Pair, wanted: Wanted) -> dict[str, Any]:
    """Fill a cache and count its arrays.

    Raises:
        SettingsError: no token was packed.
    """
    shapes = [(wanted.kv_heads, wanted.head_dim)]
    keys_of, values_of = (completed(text, shapes) for text in (pair.keys, pair.values))
    cache = PackedKVCache(keys=keys_of, values=values_of, residual=wanted.residual)
    shape = (1, wanted.kv_heads, wanted.tokens, wanted.head_dim)
    rng = np.random.default_rng(0)
    keys, values = (mx.array(rng.standard_normal(shape, np.float32)).astype(getattr(mx, wanted.dtype)) for _ in SIDES)
    cache.update_and_fetch(keys, values)
    history = cache._history
    assert history is not None
    mx.eval(history.arrays())
    packed = sum(history.packed)
    if not packed:
        raise SettingsError(
            f"{pair.name}: {wanted.tokens} tokens with a window of {wanted.residual} pack none; give more --tokens"
        )
    total = cache.report().bytes
    numbers = wanted.tokens * wanted.kv_heads * wanted.head_dim * 2
    sides = {}
    for side in SIDES:
        bound, held = history.bound[side], side_bytes(history, side)
        promised = dict(zip(("codes", "metadata"), bound.layout.bits_per_element(wanted.head_dim), strict=True))
        per = 8 / (packed * wanted.kv_heads * wanted.head_dim)
        bits = {"codes": held.codes * per, "metadata": held.metadata * per}
        difference = sum(bits.values()) / sum(promised.values()) - 1
        sides[side] = {
            "method": choose(getattr(pair, side), side).text,
            "bytes": attrs.asdict(held), "bits": bits, "layout_bits": promised,
            "difference": difference, "within": abs(difference) <= TOLERANCE,
        }  # fmt: skip
    return {
        "name": pair.name, "family": pair.family, "tokens": wanted.tokens, "packed": packed, "sides": sides,
        "bytes": attrs.asdict(total) | {"held": total.held, "ratio": total.ratio},
        "all_in_bits": total.held * 8 / numbers,
        # What an object walk finds, constants apart: nothing is held that the account does not know.
        "walked": sum(a.nbytes for a in state_arrays(cache, leave=(BoundSide,))),
    }  # fmt: skip
