"""Snippets that are wrong in one way each: the kit says so, with what it was that differed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import pytest

from vq_core.api import Field, Layout, MethodFacts, hookimpl
from vq_core.errors import VQError
from vq_core.kernels import Snippet
from vq_core.testing import SnippetConformance

NUMBERS = """
for (int i = 0; i < N; ++i) {
  for (int j = 0; j < 8; ++j) u[i * 8 + j] = float(codes[(t + i) * D + c + j]) * 4.0f;
}
"""
AFFINE = "return vq_float2(float(scale[t]), 0.0f);"


@attrs.frozen
class Settings:
    """None."""


def int8(sides: tuple[Any, ...] = ("keys", "values"), **changes: Any) -> SimpleNamespace:
    """A byte a number and one scale a token; codes are read as four times what they are, which a unit makes good."""

    def vq_method():
        return MethodFacts("bytes", "for tests", Settings)

    def vq_prepare(ctx):
        return ctx.head_dim

    def vq_layout(state):
        return Layout(1, (Field("codes", "int8", (128, state), codes=True), Field("scale", "float32", (128, 1))))

    def vq_encode(x):
        scale = mx.abs(x.astype(mx.float32)).max(axis=-1, keepdims=True) / 127
        return {"codes": mx.round(x / mx.where(scale > 0, scale, 1)).astype(mx.int8), "scale": scale}

    def vq_pack(codes):
        return codes

    def vq_decode(packed):
        return packed["codes"].astype(mx.float32) * packed["scale"]

    def vq_snippet(state, side):
        tokens = 2 if side == "keys" else 1
        units = (0.25,) * (2 if side == "keys" else 8)  # by token, by channel
        integers = {"N": tokens, "D": state}
        made = Snippet("bytes", tokens, 8, NUMBERS, AFFINE, "token", units=units, integers=integers)
        return attrs.evolve(made, **{"name": "changed"} | changes) if changes and side in sides else made

    hooks = (vq_method, vq_prepare, vq_layout, vq_encode, vq_pack, vq_decode, vq_snippet)
    return SimpleNamespace(**{hook.__name__: hookimpl(hook) for hook in hooks})


def failure(plugin: Any, test: str = "test_fused_attention_is_dense_attention") -> str:
    """What the kit says, an assertion's words or an error's."""
    made = type("Broken", (SnippetConformance,), {"method": "bytes", "plugin": plugin})()
    with made._registered(), pytest.raises((AssertionError, VQError)) as caught:
        getattr(made, test)(*((0,) if test.endswith("dense_attention") else ()))
    return str(caught.value)


class TestTheSnippetTheyAreMadeFrom(SnippetConformance):
    """Unbroken, so that what fails below fails for its one change."""

    method = "bytes"
    plugin = int8()
    fused_shapes = ((64, "float16"),)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "index": ({"numbers": NUMBERS.replace("c + j", "c")}, "differs from dense attention by "),
    "unit": ({"units": (0.5,) * 8}, "differs from dense attention by "),
    "no_units": ({"units": ()}, "differs from dense attention by "),
    "no_scale": ({"affine": "", "per": ""}, "differs from dense attention by "),
    "one_scale": ({"affine": AFFINE.replace("scale[t]", "scale[0]")}, "differs from dense attention by "),
    "channels": ({"per": "channel"}, "differs from dense attention by "),
    "beyond": ({"numbers": NUMBERS.replace("* D", "* 1000")}, "Missing bound check"),
}


@pytest.mark.parametrize(
    ("name", "side"),
    # With one token a tile, what belongs to its channels belongs to it as well; others take turns, each is compiled.
    [
        *((name, "keys") for name in ("index", "no_units", "one_scale", "channels", "beyond")),
        *((name, "values") for name in ("index", "unit", "no_scale", "beyond")),
    ],
)
def test_what_a_snippet_reads_is_compared(name: str, side: str) -> None:
    changes, said = BROKEN[name]
    found = failure(int8((side,), name=name, **changes))
    labels = (f"{name}_2_64", "bytes_1_64") if side == "keys" else ("bytes_2_64", f"{name}_1_64")
    assert f"kernel attend_{'_'.join(labels)}_64_64_h_i8fi8f on simulator: " in found
    assert said in found and "report it to the authors of bytes" in found, found


def test_a_name_that_is_used_twice() -> None:
    """The same name and integers with another text for another head size: what is compiled would be mixed up."""

    plugin = int8(name="taken", numbers=NUMBERS + " ")
    made = type("Broken", (SnippetConformance,), {"method": "bytes", "plugin": plugin})()
    with made._registered():
        made.test_fused_attention_is_reported()
    found = failure(int8(name="taken", numbers=NUMBERS + "\n"), "test_fused_attention_is_reported")
    assert "two different snippets are called 'taken_2_64' or 'taken_1_64': give each text a name of its own" in found


def test_a_shuffle_in_a_snippet() -> None:
    found = failure(int8(("values",), numbers=NUMBERS + "u[0] = simd_shuffle_xor(u[0], 1);"))
    assert "snippet 'changed': its text calls simd_shuffle_xor" in found


def test_a_method_without_a_snippet_is_skipped() -> None:
    plugin = int8()
    del plugin.vq_snippet
    made = type("Without", (SnippetConformance,), {"method": "bytes", "plugin": plugin})()
    with made._registered(), pytest.raises(pytest.skip.Exception, match="vq_snippet: bytes has none for head size 64"):
        made.test_fused_attention_is_dense_attention(0)


def test_a_snippet_for_one_side_is_run_with_the_partner() -> None:
    plugin = int8()
    whole = plugin.vq_snippet
    plugin.vq_snippet = hookimpl(lambda state, side: whole(state, side) if side == "keys" else None)
    made = type("Half", (SnippetConformance,), {"method": "bytes", "plugin": plugin})()
    with made._registered():
        assert made.fused_sides(64, "float16") == {"keys": "bytes", "values": "kit_exact"}
        made.test_fused_attention_is_reported()
