"""Sizes of a model whose weights are made at random, for timing whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from vq_core.errors import FormatError, SettingsError
from vq_core.files.jsontext import parse

NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
"""Our names of the sizes, and those in a model's config.json."""


@attrs.frozen
class Geometry:
    """Of a Llama; by default the one of 3B parameters.

    Attributes:
        layers: Transformer blocks.
        hidden: Width between them.
        heads, kv_heads: Query heads and KV heads; the first a multiple of the second.
        head_dim: D; even, for the rotary embedding.
        intermediate: Width of the feed-forward part.
        vocab: Tokens of the vocabulary.

    Raises:
        SettingsError: a size that is not accepted.
    """

    layers: int = 28
    hidden: int = 3072
    heads: int = 24
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 8192
    vocab: int = 128256

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name} ({NAMES[name]}) must be a whole number, 1 or more; got {value!r}")
        if self.heads % self.kv_heads:
            raise SettingsError(
                f"{self.heads} query heads and {self.kv_heads} KV heads: the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise SettingsError(f"head_dim {self.head_dim}: the rotary embedding needs an even head size")

    @property
    def config(self) -> dict[str, int]:
        """By the names of a model's config.json."""
        return {NAMES[name]: value for name, value in attrs.asdict(self).items()}

    def dense_bytes(self, itemsize: int = 2) -> int:
        """Bytes of one token's keys and values in all layers, uncompressed."""
        return 2 * itemsize * self.layers * self.kv_heads * self.head_dim


def read(path: Path) -> dict[str, Any]:
    """Sizes from a JSON file with the names of a model's config.json; other names in it are left alone.

    Raises:
        SettingsError: no such file, not a JSON object, or sizes that are missing or do not divide.
    """
    try:
        found = parse(path.expanduser().read_bytes(), str(path))
    except OSError as error:
        raise SettingsError(f"the configuration cannot be read from {path}: {error.strerror or error}") from error
    except FormatError as error:
        raise SettingsError(str(error)) from None
    if not isinstance(found, dict):
        raise SettingsError(f"{path} must hold a JSON object with {', '.join(NAMES.values())}")
    sizes = {name: found[given] for name, given in NAMES.items() if found.get(given) is not None}
    missing = [NAMES[name] for name in ("layers", "hidden", "heads", "intermediate", "vocab") if name not in sizes]
    if missing:
        raise SettingsError(f"{path} does not say {', '.join(missing)}, the sizes of the model")
    sizes.setdefault("kv_heads", sizes["heads"])
    if "head_dim" not in sizes:
        hidden, heads = sizes["hidden"], sizes["heads"]
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
            raise SettingsError(
                f"{path} has no head_dim, and hidden_size {hidden!r} is no multiple of num_attention_heads {heads!r}"
            )
        sizes["head_dim"] = hidden // heads
    return sizes


def geometry(path: Path | None = None, **given: int | None) -> Geometry:
    """A geometry from a configuration file, if any, with the sizes that are given in the place of its own."""
    return Geometry(**((read(path) if path is not None else {}) | {n: v for n, v in given.items() if v is not None}))
