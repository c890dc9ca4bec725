"""A native cache that notes what a model keeps in it; imports mlx-lm, so import it where that is known to be there."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import cache as native

_Native: Any = native.KVCache


class Watching(_Native):  # type: ignore[misc]
    """mlx-lm's KVCache, watched.

    Attributes:
        one_array: Whether every update stored one array as keys and as values.
    """

    def __init__(self) -> None:
        self._updating = self._no_width = self._overwritten = False
        self.one_array = True
        super().__init__()

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """As mlx-lm's."""
        self.one_array = self.one_array and keys is values
        self._no_width = self._no_width or 0 in (keys.shape[-1], values.shape[-1])
        self._updating = True
        try:
            return super().update_and_fetch(keys, values)
        finally:
            self._updating = False

    def __setattr__(self, name: str, value: Any) -> None:
        # The constructor's ``None`` and what an update assigns are the class's own.
        if name == "values" and value is not None and not self._updating:
            self._overwritten = True
        super().__setattr__(name, value)

    def verdict(self) -> str:
        """Why this holds no keys and values of attention; empty if it may."""
        if self._no_width:
            return "KVCache: its values have no width, so it is an index of keys, not keys and values"
        if self._overwritten:
            return "KVCache: the model writes over its values, so it is an index of keys, not keys and values"
        return ""
