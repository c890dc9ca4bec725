"""Constants learnt from random numbers: whose they are, and from how many numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from vq_core.api import PrepareContext, SettingsError, UnsupportedShapeError, hookimpl
from vq_core.calibration.stand_in import completed
from vq_core.plugins import binding
from vq_core.testing import load_plugin, registered

LEARNT = load_plugin(Path(__file__).parent.parent.parent / "tests/methods/learnt.py")
CONTEXT = PrepareContext(side="keys", kv_heads=2, key_dim=16, value_dim=16, dtype="float16", layer=1, model="tiny 1")


@pytest.fixture(autouse=True)
def _method() -> Iterator[None]:
    with registered(LEARNT):
        yield


def test_a_stand_in_is_of_no_model(tmp_path: Path) -> None:
    stand_in = completed("learnt:levels=15", [(2, 16)])
    assert completed(stand_in, [(2, 16)]) == stand_in and completed("learnt:levels=15", [(2, 16)]) == stand_in
    assert binding.bind(stand_in, attrs.evolve(CONTEXT, layer=None, model=None)).artifact
    with pytest.raises(SettingsError, match=r"is of no model \(a stand-in\), not of tiny 1"):
        binding.bind(stand_in, CONTEXT)


def test_a_stand_in_may_be_of_a_model_of_random_weights() -> None:
    stand_in = completed("learnt:levels=15", [(2, 16)], model="random 1", layers=3)
    assert stand_in == completed("learnt:levels=15", [(2, 16)], model="random 1", layers=3)
    assert stand_in != completed("learnt:levels=15", [(2, 16)])
    for layer in range(3):
        assert binding.bind(stand_in, attrs.evolve(CONTEXT, layer=layer, model="random 1")).artifact
    with pytest.raises(SettingsError, match="is of the model random 1, not of tiny 1"):
        binding.bind(stand_in, CONTEXT)


def test_a_stand_in_is_learnt_from_as_much_as_the_method_needs() -> None:
    """4 numbers are one token, and 16 tokens are needed; what no number of tokens mends is said."""
    stand_in = completed("learnt:levels=15", [(2, 16)], 4)
    assert binding.bind(stand_in, attrs.evolve(CONTEXT, layer=None, model=None)).artifact
    seen: list[tuple[int, int]] = []
    hooks = {name: getattr(LEARNT, name) for name in dir(LEARNT) if name.startswith("vq_")}

    def vq_calibrate(calibration: Any) -> Any:
        seen.append((calibration.samples.shape[1], calibration.rounds))
        raise SettingsError("never enough")

    def vq_method() -> Any:
        return attrs.evolve(LEARNT.vq_method(), name="never")

    plugin = SimpleNamespace(**hooks | {"vq_calibrate": hookimpl(vq_calibrate), "vq_method": hookimpl(vq_method)})
    with registered(plugin), pytest.raises(SettingsError, match="keys of 2 heads of 16: never enough"):
        completed("never", [(2, 16)], 2**21)
    assert seen == [(2**16, 4), (2**17, 1), (2**18, 1)]


def test_a_stand_in_for_no_shape_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="a stand-in needs a shape"):
        completed("learnt", [])
