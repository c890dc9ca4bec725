"""A method chosen by its text form, its settings checked."""

from __future__ import annotations

from typing import Any

import attrs

from vq_core.api.facts import Side
from vq_core.api.settings import MethodChoice, build_settings, format_choice, parse_choice
from vq_core.errors import SettingsError
from vq_core.plugins.registry import resolve


@attrs.frozen
class SideChoice:
    """A method with checked settings for one side.

    Attributes:
        label: Name by which the registry is asked: ``name`` or ``distribution:name``.
        settings: An instance of the method's settings class.
    """

    label: str
    settings: Any

    @property
    def text(self) -> str:
        """The text form, every setting spelt out."""
        return format_choice(self.label, self.settings)


def choose(text: str, side: Side) -> SideChoice:
    """Read a method's text form and check that it is installed and can hold ``side``.

    Raises:
        SettingsError: unknown method or setting, or a method for the other side only.
        PluginError: the method is installed but cannot be used.
    """
    choice: MethodChoice = parse_choice(text)
    record = resolve(choice.label)
    assert record.facts is not None
    if side not in record.facts.sides:
        raise SettingsError(
            f"method {choice.label!r} can hold {' and '.join(record.facts.sides)} only, not {side}; "
            f"give it as {record.facts.sides[0]}= and choose another method for the {side}"
        )
    return SideChoice(choice.label, build_settings(choice.label, record.facts.settings, choice.options))
