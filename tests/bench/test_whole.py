"""`vq bench attention`, `decode` and `generate` on tiny sizes: what is measured, and nothing of how long it takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from vq_core.bench import attention, decode, generate, gpu_time
from vq_core.bench.attention_arms import Dense, Shape, build_pool, relative_error
from vq_core.bench.busy import Machine
from vq_core.bench.geometry import Geometry
from vq_core.cache.policy import ATTENTION
from vq_core.demo import MODEL_PATH, prompt_text
from vq_core.errors import UnsupportedShapeError
from vq_core.testing import load_plugin, registered

IDLE = Machine(cores=8, load=0.0)
IDENTITY = Path(__file__).parent.parent / "methods" / "identity.py"
GEOMETRY = Geometry(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=64, intermediate=32, vocab=50)
BUDGET = 6 << 20


def idle() -> Machine:
    return IDLE


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """No comparison is made again because it was noisy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vq_core.bench.clock.MOST_NOISE", 1e9)
        yield


def attention_wanted(method: str) -> attention.Wanted:
    return attention.Wanted(
        methods=(method,), tokens=(288,), heads=4, kv_heads=2, head_dim=64, dtype="float32", residual=32,
        tiers=("auto", "all"), rounds=1, calls=1, beyond=1, copied=4096, chunk=128,
    )  # fmt: skip


@pytest.fixture(scope="module")
def attended() -> Any:
    """One method on every tier that there is."""
    return json.loads(json.dumps(attention.measure(attention_wanted("kivi:bits=2"), machine=idle)))


@pytest.fixture(scope="module")
def decoded() -> Any:
    wanted = decode.Wanted(
        geometry=GEOMETRY, methods=("kivi:bits=2",), contexts=(160, 320), steps=2, rounds=1, host_steps=2, residual=32,
        dtype="float32", fits=BUDGET, prefill=100, prefill_rounds=1, stable_steps=40,
    )  # fmt: skip
    return json.loads(json.dumps(decode.measure(wanted, machine=idle)))


@pytest.fixture(scope="module")
def generated() -> Any:
    """As on a device with kernels: with the ways of each method that there are then."""
    wanted = generate.Wanted(methods=("kivi:bits=4",), max_tokens=6, residual=32, rounds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "device_backend", lambda: "cuda")
        made = generate.measure(str(MODEL_PATH), prompt_text()[:200], wanted, name="demo", machine=idle)
    return json.loads(json.dumps(made))


LEARNT = IDENTITY.with_name("learnt.py")


def test_methods_that_learn_are_timed_with_a_stand_in() -> None:
    """In every layer, packed and read as with an artifact of a model's own; records say what the constants are of."""
    with registered(load_plugin(LEARNT)):
        whole = decode.Wanted(
            geometry=GEOMETRY, methods=("learnt:levels=15",), contexts=(160,), steps=2, rounds=1,
            host_steps=2, residual=32, dtype="float32",
        )  # fmt: skip
        made = json.loads(json.dumps(decode.measure(whole, machine=idle)))
        wanted = attrs.evolve(attention_wanted("learnt:levels=15"), tiers=("auto",))
        one = json.loads(json.dumps(attention.measure(wanted, machine=idle)))
    arms = made["contexts"][0]["arms"]
    found = arms["learnt:levels=15 [auto]"]
    assert found["method"].startswith("learnt:levels=15,artifact=") and found["tokens_packed"] >= 128
    assert found["packed_bytes"] == 2 * 2 * 2 * 64 * 128  # layers, sides, heads, channels, tokens; bytes
    assert "learnt from random numbers" in found["stand_in"]
    assert "stand_in" not in arms["mlx-lm float32"]
    arms = one["rows"][0]["arms"]
    assert {name for name, arm in arms.items() if "learnt from random numbers" in arm.get("stand_in", "")} == {
        name for name in arms if name.startswith("learnt:levels=15 [")
    }
    assert arms["learnt:levels=15 [auto]"]["relative_error"] < 1e-3


# ---- attention


def test_attention_has_every_arm(attended: Any) -> None:
    """What cannot be had of all tiers is named; auto and reference are there whatever there is."""
    (row,) = attended["rows"]
    arms = list(row["arms"])
    assert arms[0] == row["queued"]["base"] == "mlx float32" and arms[-1] == "mlx-lm quantized 2 bits"
    tried = {entry["arm"] for entry in attended["left_out"]}
    assert {f"kivi:bits=2 [{tier}]" for tier in ATTENTION} == {*arms[1:-1], *tried}
    assert {"kivi:bits=2 [auto]", "kivi:bits=2 [reference]"} <= set(arms)


def test_a_method_without_bits_has_no_quantized_rival() -> None:
    left_out: list[dict[str, Any]] = []
    with registered(load_plugin(IDENTITY)):
        wanted = attention_wanted("identity")
        arms = attention._arms(wanted, Shape(288, 1, 4, 2, 64, "float32"), left_out)
    assert {"mlx float32", "identity [auto]", "identity [reference]"} <= {arm.name for arm in arms}
    assert not any("quantized" in arm.name for arm in arms)
    reasons = {entry["arm"]: entry["reason"] for entry in left_out}
    assert "no setting `bits`" in reasons["mlx-lm quantized, as identity"]


def test_a_tier_that_was_asked_for_by_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of all of them is left out, with the reason."""

    def refuse(*given: Any, **rest: Any) -> mx.array:
        raise UnsupportedShapeError("not this one")

    shape = Shape(288, 1, 4, 2, 64, "float32")
    wanted = attention_wanted("kivi:bits=2")
    monkeypatch.setattr("vq_core.cache.shell.PackedKVCache.attend", refuse)
    left_out: list[dict[str, Any]] = []
    with pytest.raises(UnsupportedShapeError, match="not this one"):
        attention._arms(wanted, shape, left_out)  # auto is named
    assert [arm.kind for arm in attention._arms(attrs.evolve(wanted, tiers=("all",)), shape, left_out)] == ["dense"]
    assert {"kivi:bits=2 [mlx]", "kivi:bits=2 [reference]"} <= {e["arm"] for e in left_out if "not this" in e["reason"]}
    assert len(left_out) == len(ATTENTION) - 1 and all(entry["reason"] for entry in left_out)


def test_attention_figures(attended: Any) -> None:
    (row,) = attended["rows"]
    assert row["dense_bytes"] == 2 * 2 * 288 * 64 * 4
    for clock in ("queued", "single"):
        for arm in row[clock]["arms"].values():
            assert 0 < arm["low"] <= arm["median"] <= arm["high"]
    for name, arm in row["arms"].items():
        assert arm["bytes_read"] > 0 and arm["relative_error"] < 1e-5
        if name != row["queued"]["base"]:
            assert arm["queued"][0]["base"] == row["queued"]["base"]
    ours = row["arms"]["kivi:bits=2 [auto]"]
    assert [one["base"] for one in ours["queued"]] == ["mlx float32", "mlx-lm quantized 2 bits"]
    # 256 of 288 tokens are packed: 2 bits a number, and two float32 for 32 numbers at most.
    assert (ours["tokens_packed"], ours["tokens_exact"]) == (256, 32)
    assert ours["packed_bytes"] <= 2 * 2 * 256 * 64 * (2 + 2) // 8
    assert ours["bytes_read"] == ours["packed_bytes"] + ours["window_bytes"]
    floor, rate = ours["floor"], row["best_read_rate"]["bytes_per_second"]
    assert floor["seconds"] == pytest.approx(ours["packed_bytes"] / rate, rel=1e-3)
    assert floor["fraction_of_total"] == pytest.approx(
        floor["seconds"] / row["queued"]["arms"]["kivi:bits=2 [auto]"]["median"], abs=1e-3
    )
    dense = row["dense_bytes"] / row["queued"]["arms"]["mlx float32"]["median"]
    assert rate == pytest.approx(max(dense, attended["copy"]["bytes_per_second"]), rel=1e-3)


def test_the_error_is_that_of_the_arm(attended: Any) -> None:
    """An arm that attends to something else than its cache is seen."""
    arm = Dense(Shape(64, 1, 2, 1, 32, "float32"))
    items = build_pool(arm.shape, [arm], 0, tell=lambda line: None)
    assert relative_error(arm, items[0]) < 1e-6
    other = attrs.evolve(items[0], number=1)

    class Wrong(Dense):
        def attend(self, item: Any) -> mx.array:
            return super().attend(other)

    wrong = Wrong(arm.shape, caches=arm._caches)
    assert relative_error(wrong, items[0]) > 0.1


def test_without_a_profiler_the_record_says_so(attended: Any) -> None:
    why_not = gpu_time.unavailable()
    assert attended["gpu_clock"] == {"available": not why_not, "reason": why_not}
    assert mx.default_device() != mx.cpu or "no GPU kernels" in why_not
    (row,) = attended["rows"]
    clock = "queued" if why_not else "gpu"
    assert row["best_read_rate"]["clock"] == row["arms"]["kivi:bits=2 [auto]"]["floor"]["clock"] == clock
    assert ("unavailable" in row["arms"]["kivi:bits=2 [auto]"]["gpu"]) is bool(why_not)
    assert "unavailable" in row["arms"]["mlx-lm quantized 2 bits"]["gpu"]


def test_with_a_profiler_the_record_has_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On profiles that are made up: the codes pass takes 1 us and another kernel 3, the copy 2 us."""
    asked: list[int] = []

    def record(work: Any) -> list[gpu_time.Event]:
        asked.append(1)
        mx.eval(work())
        calls = gpu_time.CALLS
        return [("vq_attend_codes", 1e-6), ("vq_attend_merge", 3e-6)] * calls + [(gpu_time.MARKER, 9.0)] * (calls - 1)

    monkeypatch.setattr(gpu_time, "unavailable", lambda: "")
    monkeypatch.setattr(gpu_time, "record_kernels", record)
    monkeypatch.setattr(gpu_time, "marker", lambda fresh, previous, count: (fresh + 0 * previous,))
    wanted = attrs.evolve(attention_wanted("kivi:bits=2"), tiers=("auto",))
    made = attention.measure(wanted, machine=idle)
    (row,) = made["rows"]
    assert made["gpu_clock"] == {"available": True, "reason": ""} and set(made["copy"]["by_clock"]) == {"queued", "gpu"}
    # A profile for each copy of the pool; of each of two arms one that compiles and six that count.
    assert len(asked) == 10 + 2 * (1 + gpu_time.PASSES)
    ours, floor = row["arms"]["kivi:bits=2 [auto]"]["gpu"], row["arms"]["kivi:bits=2 [auto]"]["floor"]
    assert (ours["median"], ours["codes_pass"], ours["times_as_fast"], ours["lost"]) == (
        pytest.approx(4e-6), pytest.approx(1e-6), pytest.approx(1.0), "",
    )  # fmt: skip
    assert floor["clock"] == row["best_read_rate"]["clock"] == "gpu"
    assert floor["fraction_of_codes_pass"] == pytest.approx(4 * floor["fraction_of_total"], rel=1e-3)
    assert floor["seconds"] == pytest.approx(
        floor["packed_bytes"] / row["best_read_rate"]["bytes_per_second"], rel=1e-6
    )
    assert "minutes" in row["arms"]["mlx-lm quantized 2 bits"]["gpu"]["unavailable"]


# ---- decode


def test_decode_has_every_arm(decoded: Any) -> None:
    names = ["mlx-lm float32", "mlx-lm quantized 2 bits", "kivi:bits=2 [auto]"]
    assert [arm["name"] for arm in decoded["arms"]] == names
    assert [row["context"] for row in decoded["contexts"]] == [160, 320]
    for row in decoded["contexts"]:
        # Two samples to check, one to warm up and six orders for each of two names, of two steps.
        assert list(row["arms"]) == names and row["grown_to"]["pipelined"] == row["context"] + (2 + 2 + 2 * 6) * 2
        assert row["grown_to"]["synchronous"] == row["grown_to"]["pipelined"] + 2 + 3  # the peak's and the host's
        for name, arm in row["arms"].items():
            for clock in ("pipelined", "synchronous"):
                rate = arm[clock]["tokens_per_second"]
                assert 0 < rate["min"] <= rate["median"] <= rate["max"]
                assert (arm[clock]["against"] is None) is (name == names[0])
            assert arm["host"]["us_a_layer"] > 0 and arm["peak_of_a_step_bytes"] > 0
            assert arm["updates_read_densely"] == 0
    assert decoded["contexts"][0]["arms"][names[0]]["host"]["over_plain_us_a_layer"] == 0


def test_decode_counts_bytes(decoded: Any) -> None:
    row = decoded["contexts"][1]
    plain, packed = row["arms"]["mlx-lm float32"], row["arms"]["kivi:bits=2 [auto]"]
    # mlx-lm's cache has room for whole steps of 256 tokens; MLX's memory comes in pages.
    assert plain["cache_bytes"] == 2 * 2 * 2 * 512 * 64 * 4
    assert plain["cache_bytes"] <= plain["resident_bytes"] < plain["cache_bytes"] + (1 << 17)
    assert packed["cache_bytes"] <= packed["resident_bytes"] < packed["cache_bytes"] + (1 << 17)
    assert packed["plain_cache_bytes_over_own"] == pytest.approx(plain["cache_bytes"] / packed["cache_bytes"], abs=1e-3)
    assert packed["tokens_packed"] == 288 and packed["tokens_exact"] == 32


def test_the_longest_context_is_filled(decoded: Any) -> None:
    found = decoded["fits"]
    plain, packed = found["arms"]["mlx-lm float32"], found["arms"]["kivi:bits=2 [auto]"]
    for arm in (plain, packed):
        assert arm["resident_bytes"] <= BUDGET < arm["passed_with_bytes"]
        assert arm["passed_at_tokens"] - arm["tokens"] == 256
    assert plain["tokens"] == BUDGET // (2 * 2 * 2 * 64 * 4)
    assert packed["times_the_base"] == pytest.approx(packed["tokens"] / plain["tokens"], abs=1e-3) and (
        packed["times_the_base"] > 3
    )


def test_prefill_and_stability(decoded: Any) -> None:
    prefill, stability = decoded["prefill"], decoded["stability"]
    assert prefill["tokens"] == 100 and list(prefill["arms"]) == ["mlx-lm float32", "kivi:bits=2 [auto]"]
    for arm in prefill["arms"].values():
        assert arm["tokens_per_second"]["median"] > 0 and arm["peak_bytes"] > arm["peak_over_weights_bytes"] > 0
    assert prefill["arms"]["kivi:bits=2 [auto]"]["tokens_packed"] == 64
    (watched,) = stability["arms"].values()
    assert (stability["steps"], stability["from_tokens"], watched["curve"][-1][0]) == (40, 160, 40)
    assert watched["compiled_after_the_third_step"] == 0
    assert watched["cache_bytes"]["end"] > 0 and watched["active_beyond_caches_bytes"]["begin"] > 0


def test_variants_of_kernels_are_counted() -> None:
    """Each kernel with other compile-time parameters once, whatever the shapes: what MLX compiles."""
    from vq_core.bench.gpu_time import marker
    from vq_core.kernels.gpu import Gpu

    given = []

    class Recording(Gpu):
        def made(self, kernel: Any) -> Any:
            return lambda **call: given.append(call) or [mx.zeros((1,))]

    runner = Recording("cuda")
    for dtype, count in ((mx.float16, 8), (mx.float16, 8), (mx.float16, 9), (mx.float32, 8)):
        x = mx.zeros((count,), dtype)
        marker.run_on(runner, x, x, count=count)
    assert len(given) == 4 and len(runner.variants) == 2


# ---- generate


def test_generate_has_every_arm(generated: Any) -> None:
    ways = ["kivi:bits=4", "kivi:bits=4, kernels off", "kivi:bits=4, attention mlx"]
    assert list(generated["arms"]) == ["mlx-lm", "mlx-lm quantized 4 bits", *ways]
    for arm in generated["arms"].values():
        assert arm["text"] and arm["generated_tokens"] == 6
        for clock in ("prefill", "decode"):
            rate = arm[f"{clock}_tokens_per_second"]
            assert 0 < rate["min"] <= rate["median"] <= rate["max"] and rate["runs"] == 2
        assert arm["peak_bytes"] > arm["held_bytes"] > 0
    ours = generated["arms"]["kivi:bits=4"]
    # KIVI at 4 bits with groups of 32 stores 5 bits a number; the window is exact, so the whole ratio is smaller.
    assert ours["kv_ratio_without_window"] == pytest.approx(16 / 5, abs=1e-3)
    assert 1 < ours["kv_ratio_with_window"] < ours["kv_ratio_without_window"]
    assert ours["tokens_packed"] + ours["tokens_exact"] == generated["prompt_tokens"] + 6


def test_texts_are_compared(generated: Any) -> None:
    assert generated["agree"] is True
    repeated, kernels = generated["agreements"][:-2], generated["agreements"][-2:]
    assert [entry["arms"] for entry in repeated] == [[name] for name in generated["arms"]]
    assert all(entry["must"] and entry["agree"] and entry["runs"] == 3 for entry in repeated)
    assert [(entry["arms"][0], entry["must"]) for entry in kernels] == [
        ("kivi:bits=4", False), ("kivi:bits=4, attention mlx", True)
    ]  # fmt: skip
    assert all(entry["same_tokens"] == 6 for entry in kernels)


def test_texts_that_differ_are_told() -> None:
    """Repeated runs must agree, and so must arms with the same attention and with packing kernels on and off."""
    from vq_core.bench.generate import Arm, _agreements
    from vq_core.hosts.mlx_lm import Run

    def run(text: str) -> Run:
        return Run(text=text, tokens=list(text.encode()))

    options = {"method": "m"}
    arms = [
        Arm("m", "vq", Run, options),
        Arm("m, kernels off", "vq", Run, options | {"kernels": "off", "attention": "mlx"}),
        Arm("m, attention mlx", "vq", Run, options | {"attention": "mlx"}),
    ]
    runs = {"m": [run("abc"), run("abd")], "m, kernels off": [run("abx")], "m, attention mlx": [run("abx")]}
    found = {(entry["what"], *entry["arms"]): (entry["must"], entry["agree"]) for entry in _agreements(arms, runs)}
    assert found == {
        ("repeated runs", "m"): (True, False),
        ("repeated runs", "m, kernels off"): (True, True),
        ("repeated runs", "m, attention mlx"): (True, True),
        ("kernels on and off", "m", "m, kernels off"): (False, False),
        ("kernels on and off", "m, attention mlx", "m, kernels off"): (True, True),
    }


def test_every_record_is_json_without_odd_numbers(attended: Any, decoded: Any, generated: Any) -> None:
    for record in (attended, decoded, generated):
        assert record["environment"]["device"] and record["environment"]["versions"]["vq-core"]
        todo = [record]
        while todo:
            item = todo.pop()
            if isinstance(item, float):
                assert math.isfinite(item)
            elif isinstance(item, dict | list):
                todo += item.values() if isinstance(item, dict) else item
