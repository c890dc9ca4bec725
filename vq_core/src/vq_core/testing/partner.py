"""The other side: a method that keeps tokens as they are, for methods that hold only one side of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, PrepareContext, hookimpl

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
