"""`vq info METHOD`: bits with all metadata, the paper, the settings with defaults and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vq_core.testing.registering import load_plugin, registered

Vq = Callable[..., tuple[int, str, str]]
METHODS = Path(__file__).parent.parent / "methods"


def test_what_a_method_costs(vq: Vq) -> None:
    status, out, _ = vq("info", "kivi:bits=3,group_size=64", "--head-dim", 64)
    assert status == 0 and "arXiv 2402.02750" in out
    for side in ("keys", "values"):
        assert f"{side} (head size 64) 3 codes + 0.5 metadata = 3.5 bits per element" in " ".join(out.split())
    words = next(line for line in out.splitlines() if line.startswith("group_size")).split()
    assert words[1] == "32" and "32/group_size bits a number" in out and "bytes a KV head" not in out


def test_fields_of_the_sequence_are_told(vq: Vq) -> None:
    with registered(load_plugin(METHODS / "centred.py")):
        status, out, _ = vq("info", "centred", "--head-dim", 64)
    assert status == 0
    assert "8 codes + 0.5 metadata = 8.5 bits per element, and 256 bytes a KV head once a sequence" in out
