"""The other side: a method that keeps tokens as they are, for methods that hold only one side of a layer.

It is nobody's to choose: the conformance kit and `vq verify` pair one-sided methods with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

import vq_core
from vq_core.api import Capabilities, Field, Layout, MethodFacts, PrepareContext, Side, hookimpl
from vq_core.api.facts import API_VERSION
from vq_core.kernels.skeleton.snippet import Snippet
from vq_core.plugins import binding
from vq_core.plugins.binding import BoundSide
from vq_core.plugins.choice import SideChoice
from vq_core.plugins.records import MethodRecord

NAME = "kit_exact"


@attrs.frozen
class PartnerSettings:
    """None."""


@hookimpl
def vq_method() -> MethodFacts:
    """Facts."""
    return MethodFacts(
        NAME, "the conformance kit's partner: stores the input", PartnerSettings, capabilities=Capabilities(exact=True)
    )


@hookimpl
def vq_prepare(ctx: PrepareContext) -> PrepareContext:
    """The context is all that is needed."""
    return ctx


@hookimpl
def vq_layout(ctx: PrepareContext) -> Layout:
    """The tokens in the model's dtype."""
    return Layout(1, (Field("x", ctx.dtype, (128, ctx.head_dim), codes=True),))


@hookimpl
def vq_encode(x: mx.array) -> mx.array:
    """As they are."""
    return x


@hookimpl
def vq_pack(codes: Any) -> Mapping[str, mx.array]:
    """As they are."""
    return {"x": codes}


@hookimpl
def vq_decode(packed: Mapping[str, mx.array]) -> mx.array:
    """As they are."""
    return packed["x"].astype(mx.float32)


@hookimpl
def vq_snippet(state: PrepareContext, side: Side) -> Snippet:
    """Channels of two tokens of keys, or of one of values; what lies beyond a ragged head is none's."""
    D, tokens = state.head_dim, 2 if side == "keys" else 1
    run = next(n for n in (8, 4, 2, 1) if D % n == 0) if side == "keys" else 8
    number = "float(x[(t + i) * D + c + j])"
    if D % run:
        number = f"c + j < D ? {number} : 0.0f"
    numbers = f"for (int i = 0; i < N; ++i) for (int j = 0; j < C; ++j) u[i * C + j] = {number};"
    return Snippet(NAME, tokens, run, numbers, integers={"N": tokens, "C": run, "D": D})


def bound(ctx: PrepareContext) -> BoundSide:
    """Bound to a layer side without being registered."""
    version, plugin = vq_core.__version__, sys.modules[__name__]
    record = MethodRecord(NAME, "ok", "vq-core", version, __name__, API_VERSION, facts=vq_method(), plugin=plugin)
    return binding.bind_record(record, SideChoice(NAME, PartnerSettings()), ctx, kernels="off")
