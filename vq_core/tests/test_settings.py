"""Settings: what is accepted, what is said otherwise, and the text form's way there and back."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_core.api import PluginError, SettingsError, VQError, setting
from vq_core.api.settings import MethodChoice, build_settings, canonical_name, format_choice, parse_choice


@attrs.frozen
class Settings:
    bits: int = setting(2, accepted=(2, 3, 4, 8), help="Bits a number.")
    sketch: int = setting(64, minimum=1, maximum=4096)
    clip: float = setting(1.0, minimum=0.0)
    rotate: bool = setting(True)
    norm: str = setting("l2", accepted=("l2", "max"))


def refused(text: str, part: str) -> None:
    choice = parse_choice(text)
    with pytest.raises(SettingsError, match=re.escape(part)):
        build_settings(choice.name, Settings, choice.options)


def test_defaults_and_values() -> None:
    assert build_settings("toy", Settings, ()) == Settings()
    choice = parse_choice(" Toy : bits = 4 , sketch=7, clip=2, rotate=off, norm=max ")
    made = build_settings(choice.name, Settings, choice.options)
    assert made == Settings(bits=4, sketch=7, clip=2.0, rotate=False, norm="max")
    assert isinstance(made.clip, float)


def test_a_settings_error_is_a_value_error_and_a_vq_error() -> None:
    with pytest.raises(ValueError) as caught:
        Settings(bits=5)
    assert isinstance(caught.value, VQError)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("toy:bits=5", "method 'toy': bits=5 is not accepted: bits must be one of 2, 3, 4, 8"),
        ("toy:bits=", "method 'toy': cannot read bits='' as int"),
        ("toy:bits=two", "method 'toy': cannot read bits='two' as int"),
        ("toy:bits=2.0", "method 'toy': cannot read bits='2.0' as int"),
        ("toy:bit=2", "method 'toy' has no setting 'bit'; it has: bits, sketch, clip, rotate, norm"),
        ("toy:sketch=0", "sketch must be at least 1 and at most 4096"),
        ("toy:sketch=4097", "sketch must be at least 1 and at most 4096"),
        ("toy:sketch=-1", "sketch=-1 is not accepted"),
        ("toy:clip=-0.5", "clip=-0.5 is not accepted: clip must be at least 0"),
        ("toy:rotate=maybe", "method 'toy': cannot read rotate='maybe' as bool"),
        ("toy:norm=l1", "norm='l1' is not accepted: norm must be one of l2, max"),
    ],
)
def test_refused_settings(text: str, part: str) -> None:
    refused(text, part)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"bits": True}, "bits=True is not accepted"),
        ({"bits": "2"}, "bits='2' is not accepted"),
        ({"bits": None}, "bits=None is not accepted"),
        ({"bits": 2.0}, "bits=2.0 is not accepted"),
        ({"rotate": 1}, "rotate=1 is not accepted: rotate must be a value of type bool"),
        ({"clip": True}, "clip=True is not accepted"),
    ],
)
def test_refused_types(values: dict[str, Any], part: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(part)):
        Settings(**values)


def test_settings_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().bits = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("kivi", MethodChoice("kivi")),
        ("kivi:", MethodChoice("kivi")),
        ("KIVI:bits=2", MethodChoice("kivi", None, (("bits", "2"),))),
        ("vq-kivi:kivi", MethodChoice("kivi", "vq-kivi")),
        ("vq-kivi:kivi:bits=2,group_size=32", MethodChoice("kivi", "vq-kivi", (("bits", "2"), ("group_size", "32")))),
    ],
)
def test_the_text_form(text: str, choice: MethodChoice) -> None:
    assert parse_choice(text) == choice


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "a method must be named by a text such as 'kivi:bits=2', got ''"),
        ("   ", "a method must be named by a text"),
        (None, "got None"),
        (3, "got 3"),
        (":bits=2", "cannot read the method ':bits=2'; accepted: name, name:key=value"),
        ("bits=2", "cannot read the method 'bits=2'"),
        ("a:b:c", "cannot read the method 'a:b:c'"),
        ("a:b:c:bits=2", "cannot read the method"),
        ("kivi:bits=2:group=3", "cannot read"),
        ("kivi:bits=2,group", "cannot read 'group' in the method 'kivi:bits=2,group'"),
        ("kivi:=2", "cannot read '=2' in the method"),
        ("kivi:bits=2,bits=4", "'bits' is given twice in the method 'kivi:bits=2,bits=4'"),
    ],
)
def test_what_is_not_the_text_form(text: Any, part: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(part)):
        parse_choice(text)


@pytest.mark.parametrize("spelling", ["ki_vi", "Ki-Vi", " ki vi ", "KI.VI", "ki--vi"])
def test_one_canonical_name(spelling: str) -> None:
    assert canonical_name(spelling) == "ki_vi"


@given(
    st.builds(
        Settings,
        bits=st.sampled_from((2, 3, 4, 8)),
        sketch=st.integers(1, 4096),
        clip=st.floats(0, allow_infinity=False, allow_nan=False),
        rotate=st.booleans(),
        norm=st.sampled_from(("l2", "max")),
    )
)
def test_the_text_form_goes_there_and_back(settings: Settings) -> None:
    choice = parse_choice(format_choice("toy", settings))
    assert choice.name == "toy"
    assert build_settings(choice.name, Settings, choice.options) == settings


@given(st.text(max_size=30))
def test_any_text_is_a_choice_or_a_settings_error(text: str) -> None:
    try:
        choice = parse_choice(text)
    except SettingsError:
        return
    assert choice.name == canonical_name(choice.name)


def test_a_method_without_settings() -> None:
    @attrs.frozen
    class Nothing:
        pass

    assert format_choice("toy", Nothing()) == "toy"
    with pytest.raises(SettingsError, match="method 'toy' has no setting 'bits'; it has: none"):
        build_settings("toy", Nothing, (("bits", "2"),))


@pytest.mark.parametrize("path", ["", "/a b/c:d,e=f%u.npz", "späth", " x", "C:\\tables\\one.npz"])
def test_text_values_of_any_kind_round_trip(path: str) -> None:
    """A calibration file's path may hold the characters that the text form uses itself."""

    @attrs.frozen
    class Filed:
        path: str = setting("")

    choice = parse_choice(format_choice("m", Filed(path=path)))
    assert build_settings("m", Filed, choice.options) == Filed(path=path)


def test_nan_and_none_are_refused() -> None:
    @attrs.frozen
    class Clipped:
        clip: float = setting(1.0, minimum=0, maximum=2)

    with pytest.raises(SettingsError, match="clip=nan is not accepted"):
        Clipped(clip=float("nan"))
    with pytest.raises(PluginError, match="default of its own type"):
        setting(None)
