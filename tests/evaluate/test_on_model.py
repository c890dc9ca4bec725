"""A model's predictions with packed caches, on a tiny model: what is exact changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from vq_core.demo import heldout_text
from vq_core.errors import SettingsError, VQError
from vq_core.evaluate import on_model
from vq_core.evaluate.on_model import Wanted, measure
from vq_core.hosts.mlx_lm import prepare
from vq_core.testing.registering import load_plugin, registered

from ..host_mlx_lm.models import save

METHODS = Path(__file__).parent.parent / "methods"
LEFT = {"prefill": 150, "scored": 24, "residual": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(save(tmp_path_factory.mktemp("model") / "llama", "llama"))


@pytest.fixture(scope="module")
def record(folder: str) -> dict[str, Any]:
    with registered(load_plugin(METHODS / "identity.py")), registered(load_plugin(METHODS / "sign_sketch.py")):
        return measure(
            Wanted(
                folder, ("identity", "kivi:bits=2", "kivi:bits=8", "sign_sketch:sketch=64"), ("identity",), ("kivi",),
                **LEFT,
            )
        )  # fmt: skip


def test_rows(record: dict[str, Any]) -> None:
    names = [row["name"] for row in record["rows"]]
    assert names == [
        "identity", "kivi:bits=2", "kivi:bits=8", "sign_sketch:sketch=64 + kivi:bits=2", "identity + kivi:bits=2",
    ]  # fmt: skip
    assert record["left_out"] == [] and record["conditions"]["scored"] == 24
    for row in record["rows"]:
        assert row["scored"] == 24 and row["tokens"] == 174 and 0.7 < row["packed_share"] < 1


def test_quality(record: dict[str, Any]) -> None:
    exact, two, eight, _, mixed = record["rows"]
    assert exact["kl"] == pytest.approx(0, abs=1e-6) and exact["top1"] == 1
    assert exact["perplexity"] == pytest.approx(record["own"]["perplexity"], rel=1e-4)
    assert exact["kl"] < eight["kl"] < mixed["kl"] < two["kl"]
    assert record["kl_falls_as_bits_rise"] == [{"family": "kivi", "ordered": True, "inversions": []}]


def test_bytes(record: dict[str, Any]) -> None:
    for row in record["rows"]:
        per, held = row["bytes_per_token"], row["bytes"]
        assert per["held"] == pytest.approx(sum(per[part] for part in ("codes", "metadata", "window", "spare")))
        assert per["held"] == held["held"] / 174 and row["all_in_bits"] == pytest.approx(
            16 * held["held"] / held["fp16"]
        )
    exact, two, eight, sketch, mixed = record["rows"]
    # float32 models: codes of 32 bits, and metadata of 2 x 32 bits for 32 numbers.
    assert [row["bits"] for row in (exact, two, eight, mixed)] == [32, 4, 10, 18]
    assert two["layout_bits"]["keys"] == {"codes": 2, "metadata": 2} and two["bytes"]["window"] > 0
    assert sketch["bytes"]["constants"] > 0 and two["bytes"]["constants"] == 0


def test_the_model_is_as_before(folder: str, monkeypatch: Any) -> None:
    """Handles are undone and the text's rest is not scored, whatever happens."""
    kept = {}
    load = on_model.load_with_config
    monkeypatch.setattr(on_model, "load_with_config", lambda name: kept.setdefault("model", load(name)))
    with pytest.raises(SettingsError, match="no scored token read packed history"):
        measure(Wanted(folder, ("kivi",), prefill=20, scored=3))
    assert prepare.handle_of(kept["model"][0]) is None


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """175 tokens to read and score, 500 to learn from."""
    file = tmp_path / "text.txt"
    file.write_text(heldout_text()[: 175 + 500])
    return file


def test_what_refuses(folder: str, short: Path, monkeypatch: Any) -> None:
    picky = load_plugin(METHODS / "picky.py")
    with registered(picky):
        with pytest.raises(VQError, match="picky"):
            measure(Wanted(folder, ("picky",), text=short, **LEFT))
        found, _ = on_model.pairs(("kivi", "picky"))
        unasked = [attrs.evolve(pair, asked=False) for pair in found]
        monkeypatch.setattr(on_model, "pairs", lambda *given: (list(unasked), []))
        record = measure(Wanted(folder, text=short, **LEFT))
        assert [row["name"] for row in record["rows"]] == ["kivi:bits=2"]
        assert [one["arm"] for one in record["left_out"]] == ["kivi:bits=2 + picky"]
        del unasked[0]
        with pytest.raises(SettingsError, match="every method refuses this model: kivi:bits=2"):
            measure(Wanted(folder, text=short, **LEFT))


def test_what_needs_calibration_learns_from_the_rest(folder: str, short: Path) -> None:
    """One file a text form, of both sides; never from tokens that are scored."""
    heard: list[str] = []
    method = "vecinfer:sub=8,centroids=256"
    record = measure(Wanted(folder, (method,), (method,), ("kivi",), text=short, **LEFT), heard.append)
    assert [line for line in heard if "learning" in line] == [f"{method}: learning from 500 tokens"]
    assert record["conditions"]["calibration_tokens"] == 500
    alone, mixed = record["rows"]
    assert (alone["name"], alone["learnt"], alone["bits"]) == (method, [method], 1)
    assert mixed["name"] == f"{method} + kivi:bits=2" and all(0 < row["kl"] < 0.5 for row in (alone, mixed))
    assert "artifact=," not in alone["keys"] and "/tmp" not in alone["keys"]
    short.write_text(heldout_text()[: 175 + 20])
    with pytest.raises(SettingsError, match="layer 0, keys"):
        measure(Wanted(folder, (method,), text=short, **LEFT))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scored": 10**7}, "need 10000151; the text has"),
        ({"prefill": 0}, "must be 1 or more"),
        ({"text": Path("no/such/file")}, "cannot be read from no/such/file"),
        ({"methods": ("nothing",)}, "unknown method"),
        ({"partner": "nothing"}, None),
    ],
    ids=str,
)
def test_bad_input(folder: str, changes: dict[str, Any], said: str | None) -> None:
    wanted = Wanted(folder, **({"methods": ("kivi",), **LEFT} | changes))
    if said is None:  # of methods of both sides there is no partner
        assert len(measure(attrs.evolve(wanted, scored=2))["rows"]) == 1
        return
    with pytest.raises(SettingsError, match=said):
        measure(wanted)


def test_a_text_that_is_not_utf8(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\\xff\\xfe")
    file.write_bytes(bytes([255, 254]))
    with pytest.raises(SettingsError, match="not UTF-8"):
        measure(Wanted(folder, ("kivi",), text=file))
