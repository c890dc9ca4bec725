"""``python -m vq_core.testing.child TEXT HEADS DIM [FILE]``: print a hash of what a method stores, side by side."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from vq_core.testing.determinism import digest
from vq_core.testing.kit import Kit
from vq_core.testing.registering import load_plugin, registered


def main(text: str, heads: str, dim: str, file: str | None = None) -> None:
    """See the module."""
    kit = type("Child", (Kit,), {"method": text, "kv_heads": int(heads), "head_dim": int(dim)})()
    with registered(load_plugin(file)) if file else nullcontext():
        for side in kit.facts().sides:
            print(side, digest(kit, text, side))


if __name__ == "__main__":
    main(*sys.argv[1:])
