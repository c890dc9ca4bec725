"""The synthetic table: cases by hand, bounds from theory, and both readings of packed fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from vq_core.api.facts import PrepareContext
from vq_core.errors import SettingsError, UnsupportedShapeError
from vq_core.evaluate import synthetic
from vq_core.evaluate.synthetic import COLUMNS, Case, Wanted, case, drawn, hold, measure, of_keys, of_values
from vq_core.plugins.binding import bind
from vq_core.testing.registering import load_plugin, registered

METHODS = Path(__file__).parent.parent / "methods"
SMALL = Wanted(tokens=640, queries=64, head_dim=64, seeds=1)
T1, T3, OUTLIER = COLUMNS["keys"]
IID, MEAN = COLUMNS["values"]


@pytest.fixture
def identity() -> Iterator[None]:
    with registered(load_plugin(METHODS / "identity.py")):
        yield


def bound(text: str, side: str, dim: int = 64, seed: int = 0) -> Any:
    ctx = PrepareContext(side=side, kv_heads=1, key_dim=dim, value_dim=dim, dtype="float16", seed=seed)  # type: ignore[arg-type]
    return bind(text, ctx, kernels="off")


# ---- figures


def test_two_tokens_by_hand() -> None:
    """p0 = (3/4, 1/4) against p1 = (1/2, 1/2)."""
    one = Case.of(np.array([[1.0, 0.0]]), np.array([[math.log(3), 5.0], [0.0, 7.0]]), np.eye(2))
    assert np.allclose(one.output, [[0.75, 0.25]])
    error, kl = of_keys(one, SimpleNamespace(logits=lambda q: np.zeros((1, 2))))  # type: ignore[arg-type]
    assert kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert error == pytest.approx(math.sqrt(2 * 0.25**2) / math.sqrt(0.75**2 + 0.25**2))
    moved = SimpleNamespace(mixed=lambda w: w @ np.array([[1.0, 0.0], [0.0, 3.0]]))
    assert of_values(one, moved) == pytest.approx(0.5 / math.sqrt(0.75**2 + 0.25**2))  # type: ignore[arg-type]


def test_extreme_logits_stay_finite() -> None:
    one = Case.of(np.array([[1.0]]), np.array([[2000.0], [0.0]]), np.array([[1.0], [2.0]]))
    error, kl = of_keys(one, SimpleNamespace(logits=lambda q: np.array([[0.0, 2000.0]])))  # type: ignore[arg-type]
    assert kl == pytest.approx(2000) and error == pytest.approx(1)


def test_what_is_kept_exactly_has_no_error(identity: None) -> None:
    record = measure(attrs.evolve(SMALL, methods=("identity",)))
    keys, values = record["rows"]
    assert [keys["side"], values["side"]] == ["keys", "values"] and record["left_out"] == []
    for row in (keys, values):
        assert row["bits"] == {"codes": 16, "metadata": 0, "total": 16} and row["packed"] == 640
        assert all(column["error"] == 0 for column in row["columns"].values())
    assert [column["kl"] for column in keys["columns"].values()] == [0, 0, 0]
    assert not any("kl" in column for column in values["columns"].values())


# ---- conditions


@pytest.mark.parametrize("column", [T1, T3, OUTLIER, MEAN], ids=lambda c: c.name)
def test_conditions(column: Any) -> None:
    wanted = Wanted(tokens=2048, queries=128, head_dim=128, dtype="float32")
    noise, keys, values = drawn(column, wanted, 0, wanted.tokens)
    one = case(column, wanted, 0)
    assert np.array_equal(one.keys, keys) and np.array_equal(one.values, values)
    cosine = one.queries @ (noise / np.linalg.norm(noise, axis=1, keepdims=True)).T / column.T
    found = np.sort(cosine.max(axis=1) > 0.45)
    assert found.sum() == (64 if column.retrieval else 0)
    if column.retrieval:
        weight = synthetic.RETRIEVAL
        assert cosine[:64].max(axis=1).mean() == pytest.approx(weight / math.hypot(1, weight), rel=0.03)
    logits = one.queries[64:] @ noise.T
    assert logits.std() == pytest.approx(column.T, rel=0.02)
    offset = np.abs(keys.mean(axis=0)) > 10
    assert offset.sum() == (synthetic.OUTLIERS if column.outlier else 0)
    if column.outlier:
        assert np.abs(keys[:, offset].mean(axis=0)) == pytest.approx(synthetic.OFFSET, abs=0.2)
        assert keys[:, offset].std(axis=0) == pytest.approx(synthetic.SPREAD, rel=0.05)
    assert values.mean(axis=0).std() == pytest.approx(math.hypot(column.mean, 2048**-0.5), rel=0.15)
    again, other = drawn(column, wanted, 0, 64), drawn(column, wanted, 0, 64, part=1)
    assert not np.array_equal(again[1], other[1])
    assert np.array_equal(np.abs(other[1].mean(axis=0)) > 10, offset)


# ---- reading


@pytest.mark.parametrize("text", ["kivi:bits=2", "example:bits=3"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_both_readings_agree(text: str, side: str) -> None:
    """By the method's attention and by decoding, with tokens that fill neither pages nor blocks."""
    one = case(T1, attrs.evolve(SMALL, tokens=301), 0)
    whole = bound(text, side)
    by = [hold(b, one.keys) for b in (whole, attrs.evolve(whole, attend=None))]
    packed = 301 // whole.layout.block * whole.layout.block
    assert [h.reading for h in by] == ["attend", "decode"] and {h.packed for h in by} == {packed}
    if side == "keys":
        a, b = (h.logits(one.queries) for h in by)
        want = np.concatenate([by[1].decoded(), one.keys[packed:]]) @ one.queries.T
        assert np.allclose(b, want.T, rtol=1e-12) and not np.allclose(b, one.queries @ one.keys.T, atol=1e-2)
    else:
        a, b = (h.mixed(np.exp(one.logs)) for h in by)
    assert a.shape == b.shape and np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


def test_tiles_of_a_method_that_bounds_them() -> None:
    """The example takes 1,024 tokens at once: more are read in parts, and the parts are joined in order."""
    one = case(T1, attrs.evolve(SMALL, tokens=1600), 0)
    held = hold(bound("example:bits=2", "keys"), one.keys)
    assert len(held._tiles()) == 2
    assert np.allclose(held.logits(one.queries), one.queries @ held.decoded().T, atol=1e-4)
    values = hold(bound("example:bits=2", "values"), one.values)
    assert np.allclose(values.mixed(np.exp(one.logs)), np.exp(one.logs) @ values.decoded(), atol=1e-5)


def test_fewer_tokens_than_a_block_stay_exact() -> None:
    one = case(T1, attrs.evolve(SMALL, tokens=20), 0)
    assert of_keys(one, hold(bound("kivi:bits=2", "keys"), one.keys)) == (0, 0)
    assert of_values(one, hold(bound("kivi:bits=2,group_size=64", "values"), one.values)) > 0


@pytest.mark.parametrize(("text", "least", "most"), [("kivi:bits=4", 0.95, 1.05), ("example:bits=4", 1.0, 1.3)])
def test_figures_are_those_of_theory(text: str, least: float, most: float) -> None:
    """Small errors, T = 1: the variance of a logit's error is D, KL half of that; outputs of iid values err by sqrt(D).

    A codebook's outer cells are wide, and keys that a query looks at lie there more often: KL is a little more.
    """
    one = case(attrs.evolve(T1, retrieval=False), SMALL, 0)
    keys, values = hold(bound(text, "keys"), one.keys), hold(bound(text, "values"), one.values)
    size = synthetic.relative(keys.decoded(), one.keys) ** 2
    assert 0.004 < size < 0.012
    assert least < of_keys(one, keys)[1] / (size / 2) < most
    assert of_values(one, values) == pytest.approx(synthetic.relative(values.decoded(), one.values), rel=0.1)


def test_fields_of_the_sequence() -> None:
    """A mean of the first block, which the method of a test keeps: int8 around it stays small beside outliers."""
    with registered(load_plugin(METHODS / "centred.py")):
        (row,) = measure(attrs.evolve(SMALL, methods=("centred",)))["rows"][:1]
    assert row["sequence_bytes"] == 64 * 4 and row["read_by"] == "decode"
    assert 0 < row["columns"]["T3 outlier"]["error"] < 0.02 and row["columns"]["T3 outlier"]["kl"] < 1e-3


def test_what_needs_calibration_learns_from_other_draws(monkeypatch: Any) -> None:
    """Once for columns with the same keys; with the outliers where they are, or the error would be large."""
    monkeypatch.setattr(synthetic, "CALIBRATION", 512)
    learnt: list[Any] = []
    learn = synthetic.Learning.from_numbers

    def counted(self: Any, text: str, ctx: Any, kind: Any, x: Any) -> str:
        learnt.append((ctx.side, kind, x.shape))
        return learn(self, text, ctx, kind, x)

    monkeypatch.setattr(synthetic.Learning, "from_numbers", counted)
    small = attrs.evolve(SMALL, methods=("vecinfer:sub=4,centroids=256,mean=true",), head_dim=32)
    keys, values = measure(small)["rows"]
    assert learnt[0] == learnt[1] == ("keys", (False, 0.0), (512, 32)) and learnt[2][1] == (True, 0.0)
    assert keys["learnt_from"] == 512 and keys["bits"]["total"] == 2
    assert keys["columns"]["T3 outlier"]["error"] < 1.5 * keys["columns"]["T3 iid"]["error"] < 1
    assert 0.2 < values["columns"]["iid"]["error"] < 0.5


# ---- who is measured


def test_every_installed_method() -> None:
    """All are there or left out with a reason; more bits give less of both figures."""
    record = measure(Wanted(tokens=256, queries=32, head_dim=32, seeds=1, methods=("kivi:bits=8", "example")))
    assert [row["method"] for row in record["rows"]] == ["kivi:bits=8", "example:bits=4"] * 2
    for row in record["rows"]:
        assert set(row["columns"]) == {column.name for column in COLUMNS[row["side"]]}
    coarse, fine = record["rows"][1], record["rows"][0]
    for name in ("T1 iid", "T3 iid", "T3 outlier"):
        assert 0 < fine["columns"][name]["kl"] < coarse["columns"][name]["kl"]
    assert record["conditions"]["tokens"] == 256 and "command" in record["environment"]


def test_refusals_are_told_or_raised() -> None:
    refusing = load_plugin(METHODS / "identity.py")
    made = SimpleNamespace(**{name: value for name, value in vars(refusing).items() if name.startswith("vq_")})

    def vq_prepare(ctx: Any) -> Any:
        raise UnsupportedShapeError("no head size is accepted")

    made.vq_prepare = synthetic_hook(vq_prepare)
    with registered(made, "refusing"):
        asked = attrs.evolve(SMALL, methods=("refusing",))
        with pytest.raises(UnsupportedShapeError, match="no head size"):
            measure(asked)
        rows: list[Any] = []
        left_out: list[Any] = []
        candidate = synthetic.Candidate("refusing", "refusing", ("keys",), asked=False)
        with synthetic.Learning() as learning:
            synthetic._rows("keys", [candidate], SMALL, learning, rows, left_out, lambda line: None)
    assert rows == [] and left_out == [{"arm": "refusing (keys)", "reason": "no head size is accepted"}]


def synthetic_hook(function: Any) -> Any:
    from vq_core.api import hookimpl

    return hookimpl(function)


@pytest.mark.parametrize(
    "changes", [{"tokens": 0}, {"queries": 1}, {"head_dim": 3}, {"seeds": 0}, {"dtype": "int8"}], ids=str
)
def test_bad_input(changes: Any) -> None:
    with pytest.raises(SettingsError, match=next(iter(changes))):
        attrs.evolve(SMALL, **changes)
