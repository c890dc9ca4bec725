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


def test_head_sizes_and_other_models_are_told(vq: Vq) -> None:
    """A size that is refused is none of those that are named, and wider scales of other models are no surprise."""
    for method, least, last in (
        ("turboquant_mse", "4.125", "512"), ("turboquant_prod", "4.25", "512"), ("qjl", "2.125", "512"),
        ("turboquant_rvq", "4.125", "512, 640, 768, 896, 1024"),
    ):  # fmt: skip
        status, out, _ = vq("info", method)
        said = " ".join(out.split())
        more = {"4.125": "4.25", "4.25": "4.5", "2.125": "2.25"}[least]
        assert status == 0 and f"head sizes 1 to {last} " in said, said
        assert f"= {least} bits per element; {more} in bfloat16 models; {more} in float32 models" in said
    _, out, _ = vq("info", "kivi")
    assert "bfloat16" not in out and "; 4 in float32 models" in " ".join(out.split())
    status, out, _ = vq("info", "qjl", "--head-dim", 513)
    assert status == 0 and "refused" in out


def test_nothing_is_promised_of_what_is_refused(vq: Vq) -> None:
    """No bound of errors and no bits for settings or sizes that no side takes; of those that are taken, both."""
    _, out, _ = vq("info", "vecinfer:sub=8,centroids=1024,codebooks=subspace", "--head-dim", 64)
    said = " ".join(out.split())  # a stand-in is learnt from as many numbers as this needs
    assert said.count("= 1.25 bits per element") == 2 and "refused: " not in said, said
    for method, dim in (("turboquant_mse", 513), ("turboquant_rvq", 1025), ("vecinfer:sub=8,centroids=256", 72)):
        status, out, _ = vq("info", method, "--head-dim", dim)
        said = " ".join(out.split())
        assert status == 0 and said.count("refused: ") == 2 and "artifact FILE" not in said, said
        assert "relative squared error" not in said and "bits per element" not in said, said
        _, out, _ = vq("info", method, "--head-dim", 64)
        said = " ".join(out.split())
        assert "at head size 64" in said and said.count("bits per element") == 2 and "refused: " not in said, said
