"""`vq bench kernels` on KIVI's kernels in the simulator: everything runs, and nothing is concluded from the times."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import pytest

from vq_core.api import Field, Layout, hookimpl
from vq_core.bench import kernels as bench
from vq_core.bench.busy import Machine
from vq_core.bench.clock import POOL
from vq_core.bench.kernels import NO_CLOCK, Served, Wanted, choices, measure, whole
from vq_core.errors import HostError, PluginError, SettingsError
from vq_core.testing import load_plugin, registered

IDENTITY = Path(__file__).parent.parent / "methods" / "identity.py"
TINY = Wanted(
    methods=("kivi",), tokens=(20,), bits=(2,), heads=1, head_dim=64, rounds=1, calls=1, shares=(0.25,), copied=4096
)


def small(patch: pytest.MonkeyPatch) -> None:
    """Ten inputs and one call an evaluation: the simulator takes its time."""
    patch.setattr(bench, "BEYOND_CACHES", 1)
    patch.setattr(bench, "queue_length", lambda arms, pool, least, most: least)


@pytest.fixture(scope="module")
def record() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        made = measure(TINY, kernels="simulator", machine=lambda: Machine(cores=8, load=0.0))
    return json.loads(json.dumps(made))


def test_what_is_measured(record: Any) -> None:
    """Both operations of each side and of both sides, in whole blocks."""
    places = [(row["operation"], row["side"], row["tokens"]) for row in record["rows"]]
    assert places == [
        (operation, side, 32) for operation in ("encode+pack", "decode") for side in ("keys", "values", "keys+values")
    ]
    assert {row["method"] for row in record["rows"]} == {"kivi:bits=2,group_size=32"}
    assert record["rows"][0]["kernels"] == {"keys": "kernel kivi_pack_keys+kivi_pack_values (simulator)"}
    assert all(row["agrees"] for row in record["rows"]) and record["left_out"] == []


def test_bytes_are_those_of_the_arrays(record: Any) -> None:
    """fp16 numbers in; codes of 2 bits, and scale and zero of 2 bytes each for 32 numbers, out."""
    for row in record["rows"]:
        count = row["tokens"] * 64 * len(row["side"].split("+"))
        dense, packed = 2 * count, count * 2 // 8 + count // 32 * 4
        wanted = (dense, packed) if row["operation"] == "encode+pack" else (packed, 4 * count)
        assert (row["bytes_read"], row["bytes_written"]) == wanted


def test_the_simulator_is_no_clock(record: Any) -> None:
    for row in record["rows"]:
        for figures in (row["queued"], row["single"], row["bandwidth"]):
            assert NO_CLOCK in figures["refused"]
        assert row["queued"]["times_as_fast"] is row["single"]["times_as_fast"] is None
        assert row["bandwidth"]["fraction_of_copy"] is None
        assert row["whole_step"] == [{"share": 0.25, "at_most": None, "if_it_took_no_time": 1.3333}]
        assert NO_CLOCK in row["queued"]["said"]


def test_the_record_says_where_and_how(record: Any) -> None:
    facts = record["environment"]
    assert facts["device_info"]["device_name"] and facts["command"] and facts["versions"]["mlx"]
    assert facts["versions"]["vq-kivi"] and facts["versions"]["vq-core"]
    assert record["backend"] == "simulator" and record["wanted"]["heads"] == 1
    assert record["copy"]["bytes_read_and_written"] == 2 * 4096
    timing = record["rows"][0]["queued"]["comparison"]["arms"]["kernel"]
    assert timing["low"] <= timing["median"] <= timing["high"] and timing["rounds"] == 8
    assert set(record["rows"][0]["queued"]["comparison"]["arms"]) == {"plain", "kernel"}


def test_both_arms_do_the_same_on_inputs_that_differ() -> None:
    """What is timed is the binding with kernels and the one without, on at least ten inputs of other numbers."""
    text, bits, offers = choices(TINY)[0][0]
    served = bench._bound(TINY, text, bits, offers, "simulator", [])[0]
    measurer = bench._Bench(TINY, (), lambda: Machine(cores=8), lambda line: None)
    for operation in bench.OPERATIONS:
        pool = measurer._pool(served, operation, ("keys", "values"), 32)
        assert len(pool) >= POOL
        first = [item.x or item.packed for item in pool]
        told = {
            repr(mx.concatenate([mx.array(a).flatten().astype(mx.float32)[:50] for a in _leaves(x)])) for x in first
        }
        assert len(told) == len(pool)
        plain, kernel = (bench.arm(operation, ("keys", "values"), b) for b in (served.plain, served.kernel))
        assert not bench.differs(("keys", "values"), kernel(pool[0]), plain(pool[0]), 0.0)
        assert "differs" in bench.differs(("keys", "values"), kernel(pool[0]), plain(pool[1]), 0.0)


def _leaves(tree: Any) -> list[mx.array]:
    return [tree] if isinstance(tree, mx.array) else [a for part in tree.values() for a in _leaves(part)]


def test_a_kernel_that_computes_something_else_gets_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probe has passed; the numbers of this size are other ones."""
    right = bench.arm
    calls: list[Any] = []

    def arm(operation: Any, sides: Any, bound: Any) -> Any:
        calls.append(bound)
        made = right(operation, sides, bound)
        if len(calls) % 2:
            return made
        return lambda item: [{name: a + 1 for name, a in rows.items()} for rows in made(item)]

    monkeypatch.setattr(bench, "arm", arm)
    small(monkeypatch)
    text, bits, offers = choices(TINY)[0][0]
    served = bench._bound(TINY, text, bits, offers, "simulator", [])[0]
    measurer = bench._Bench(TINY, (), lambda: Machine(cores=8), lambda line: None)
    row = measurer._row(served, "encode+pack", ("keys",), 32)
    for figures in (row["queued"], row["single"], row["bandwidth"]):
        assert any("of the keys differs from the plain operations'" in reason for reason in figures["refused"])
    assert not row["agrees"] and row["queued"]["times_as_fast"] is None


def test_a_cpu_has_nothing_to_measure() -> None:
    with pytest.raises(HostError, match=r"nothing to measure: no kernels on .*cpu.*simulator is not a clock"):
        measure(TINY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ("vq_none",)}, "vq_none"),
        ({"methods": ("example",)}, "'example' offers no kernels"),
        ({"bits": (5,)}, "bits"),
        ({"methods": ("kivi:bits=2,group_size=7",)}, "group_size"),
    ],
)
def test_methods_that_cannot_be_measured(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        measure(attrs.evolve(TINY, **changes), kernels="simulator")


def test_methods_without_kernels_are_left_out_with_the_reason() -> None:
    """Where none was named, every installed method is asked."""
    plugin = load_plugin(IDENTITY)
    with registered(plugin):
        found, left_out = choices(attrs.evolve(TINY, methods=(), bits=(2, 5)))
    assert {entry["method"] for entry in left_out} >= {"identity", "kivi"}
    assert [text.rpartition(":")[2] for text, _, _ in found if "kivi" in text] == ["bits=2,group_size=32"]
    assert {"offers no kernels" in entry["reason"] for entry in left_out if entry["method"] == "identity"} == {True}


class Failing:
    """The identity, with kernels that cannot be imported."""

    def __init__(self) -> None:
        for name, hook in vars(load_plugin(IDENTITY)).items():
            if name.startswith("vq_"):
                setattr(self, name, hook)

    @hookimpl
    def vq_kernels(self) -> Any:
        raise ImportError("no module named nothing")


def test_offers_that_fail_are_one_typed_error() -> None:
    wanted = attrs.evolve(TINY, methods=("broken_offers",))
    with registered(Failing(), "broken_offers"), pytest.raises(PluginError, match="vq_kernels failed with ImportError"):
        choices(wanted)


def test_bits_that_the_method_gives_are_kept() -> None:
    found, _ = choices(attrs.evolve(TINY, methods=("kivi:bits=8", "kivi"), bits=(2, 4)))
    assert [bits for _, bits, _ in found] == [8, 2, 4]


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": ()},
        {"tokens": (0,)},
        {"bits": (-1,)},
        {"heads": 0},
        {"rounds": 0},
        {"dtype": "int8"},
        {"shares": (1.5,)},
    ],
)
def test_bad_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(given)).removesuffix("s")):
        Wanted(**given)


def test_whole_blocks() -> None:
    def layout(block: int) -> Layout:
        return Layout(block, (Field("x", "uint8", (96, 4)),), 96)

    assert [whole(n, [layout(32)]) for n in (1, 32, 33)] == [32, 32, 64]
    assert whole(32, [layout(32), layout(48)]) == 96


def test_a_queue_holds_what_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the results of 20 calls fit: the queue is shorter, and the record says how long."""
    measurer = bench._Bench(attrs.evolve(TINY, calls=20), (NO_CLOCK,), lambda: Machine(cores=8), lambda line: None)
    pool = [mx.array([float(i)]) for i in range(POOL)]
    for left, calls in ((1, 100), (bench.MEMORY // 25, 25), (bench.MEMORY, 1)):
        monkeypatch.setattr(mx, "get_memory_limit", lambda: 10 * bench.MEMORY)
        made = measurer._compare({"a": lambda x: x + 1}, pool, left)
        assert made.as_dict()["calls_per_evaluation"] <= calls
        assert made.inner >= min(20, calls)


def test_what_serves_is_told_by_the_binding() -> None:
    def operation(name: str, implementation: str, *declined: str) -> Any:
        return SimpleNamespace(name=name, implementation=implementation, declined=declined)

    plain: Any = {
        "keys": SimpleNamespace(operations=(operation("vq_pack", "m.pack"), operation("vq_decode", "m.decode")))
    }
    kernel: Any = {
        "keys": SimpleNamespace(
            operations=(operation("vq_pack", "kernel p (cuda)"), operation("vq_decode", "m.decode", "kernel d: D 7"))
        )
    }
    served = Served("m", None, plain, kernel, ())
    assert served.said("encode+pack", "keys") == "kernel p (cuda)" and served.said("decode", "keys") == ""
    assert served.declined("decode", "keys") == "kernel d: D 7"
