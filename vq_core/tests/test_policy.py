"""Policies: text forms, both sides, layers, and every refusal with its way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vq_core import CachePolicy, PackedKVCache
from vq_core.cache.policy import LayerPolicy
from vq_core.errors import SettingsError

Make = Callable[..., PackedKVCache]


def test_method_means_both_sides(echo: Make) -> None:
    policy = LayerPolicy.make(method="echo:block=4")
    assert policy.keys == policy.values
    assert policy.keys.text == "echo:block=4,page=32"


def test_sides_apart(echo: Make) -> None:
    policy = LayerPolicy.make(keys="keys_only", values="echo:block=1")
    assert (policy.keys.label, policy.values.settings.block) == ("keys_only", 1)


def test_text_makes_the_same_policy(echo: Make) -> None:
    policy = LayerPolicy.make(keys="echo", values="fixed:page=64", residual=7, sink_tokens=3, fallback="warn")
    assert LayerPolicy.make(**policy.text) == policy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "no method for the keys and values"),
        ({"keys": "echo"}, "no method for the values"),
        ({"method": "echo", "keys": "echo"}, "not both"),
        ({"method": "echo", "values": "echo"}, "not both"),
        ({"method": "ecko"}, "unknown method 'ecko'; installed: echo"),
        ({"method": "kivi"}, "pip install vq-kivi"),
        ({"method": "echo:size=3"}, "no setting 'size'; it has: block, page"),
        ({"method": "echo:block=0"}, "block must be at least 1"),
        ({"method": "echo:block=two"}, "cannot read block='two' as int"),
        ({"method": "echo:block"}, "Settings are written echo:block=VALUE"),
        ({"method": "echo:block=1,block=2"}, "twice"),
        ({"method": "keys_only"}, "can hold keys only"),
        ({"keys": "echo", "values": "keys_only"}, "choose another method for the values"),
        ({"method": 5}, "named by a text"),
        ({"method": "echo", "residual": -1}, "residual must be a whole number of tokens, 0 or more; got -1"),
        ({"method": "echo", "residual": 1.5}, "residual"),
        ({"method": "echo", "residual": True}, "residual"),
        ({"method": "echo", "sink_tokens": -1}, "sink_tokens"),
        ({"method": "echo", "attention": "fast"}, "attention must be one of auto, matrix, kernel, mlx, reference"),
        ({"method": "echo", "fallback": "ignore"}, "fallback must be one of error, warn"),
    ],
)
def test_refusals(echo: Make, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        PackedKVCache(**arguments)
    with pytest.raises(SettingsError, match=said):
        CachePolicy.make(**arguments)


def test_zero_residual_is_allowed(echo: Make) -> None:
    assert echo(residual=0).policy.residual == 0


def test_layers(echo: Make) -> None:
    policy = CachePolicy.make(
        method="echo", residual=9, layers={0: None, 1: "fixed", -1: {"values": "fixed"}, 2: {"residual": 3}}
    )
    policy.check(6)
    made = [policy.of(i, 6) for i in range(6)]
    assert made[0] is None
    assert made[1] is not None and (made[1].keys.label, made[1].values.label, made[1].residual) == ("fixed", "fixed", 9)
    assert made[2] is not None and (made[2].residual, made[2].keys.label) == (3, "echo")
    assert made[3] == made[4] == policy.default
    assert made[5] is not None and (made[5].keys.label, made[5].values.label) == ("echo", "fixed")


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({4: None}, r"layers 0 to 3, not \[4\]"),
        ({-5: "echo"}, r"not \[-5\]"),
        ({-1: "echo", 3: None}, r"\[-1\] name layers that are named by \[3\]"),
        ({"0": None}, "layer indices, got '0'"),
        ({True: None}, "layer indices, got True"),
        ({0: "ecko"}, "layer 0: unknown method"),
        ({2: {"residual": -1}}, "layer 2: residual"),
        ({2: {"window": 1}}, "layer 2: .*window"),
        ({2: {"method": "echo", "keys": "echo"}}, "layer 2: .*not both"),
        ({2: 5}, "layer 2: give None, a method"),
        ([0, 1], "give a dictionary"),
    ],
)
def test_layers_refused(echo: Make, layers: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        CachePolicy.make(method="echo", layers=layers).check(4)
