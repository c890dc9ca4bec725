"""`vq bench kernels`: refusals on this CPU, and what is printed of a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vq_core.bench import kernels as bench
from vq_core.bench.busy import Machine
from vq_core.bench.clock import Comparison, Timing

Vq = Callable[..., tuple[int, str, str]]


def test_a_cpu_has_nothing_to_measure(vq: Vq, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    status, out, err = vq("bench", "kernels", "--json", file)
    assert status == 2 and out == ""
    assert len(err.strip().splitlines()) == 1 and "the simulator is not a clock" in err
    assert not file.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--method", "vq_none"), "vq_none"),
        (("--bits", 5), "bits"),
        (("--dtype", "int8"), "accepted are float16"),
        (("--share", 2), "from 0 to 1"),
        (("--json", "."), "is a folder"),
        (("--json", "no/such/folder.json"), "there is no folder no/such"),
        (("--json", "x" * 300), "cannot be written"),
    ],
)
def test_bad_input(vq: Vq, given: tuple[Any, ...], said: str) -> None:
    """Told before anything is measured, and before it is asked where."""
    status, out, err = vq("bench", "kernels", "--method", "kivi", *given)
    assert status == 2 and out == ""
    assert len(err.strip().splitlines()) == 1 and said in err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``measured(kernel=1e-5, noise=0.01, busy=())``: comparisons find these figures, whatever is compared."""
    bind = bench.bind
    ways = {"auto": "simulator", "off": "off"}
    monkeypatch.setattr(bench, "bind", lambda text, ctx, kernels: bind(text, ctx, kernels=ways[kernels]))
    monkeypatch.setattr(bench.fused, "device_backend", lambda: "simulator")
    monkeypatch.setattr(bench, "NO_CLOCK", "")
    monkeypatch.setattr(bench, "BEYOND_CACHES", 1)
    monkeypatch.setattr(bench, "Wanted", partial(bench.Wanted, copied=4096))
    monkeypatch.setattr(bench, "queue_length", lambda arms, pool, least, most: least)

    def use(kernel: float, noise: float = 0.01, busy: tuple[str, ...] = ()) -> None:
        times = {"plain": 1e-4, "kernel": kernel, "copy": 5e-6}

        def compare(arms: Any, pool: Any, **rest: Any) -> Comparison:
            found = {name: Timing(times[name], times[name] / 2, times[name] * 2, 48) for name in arms}
            noises = dict.fromkeys(arms, noise)
            machine = (Machine(cores=8, load=0.5),) * 2
            return Comparison(found, next(iter(arms)), noises, busy, rest["inner"], 1, machine)

        monkeypatch.setattr(bench, "compare", compare)

    return use


SMALL = ("bench", "kernels", "--method", "kivi", "--bits", 2, "--tokens", 32, "--heads", 1, "--head-dim", 64)


def test_what_is_printed_and_written(vq: Vq, measured: Any, tmp_path: Path) -> None:
    measured(1e-5)
    file = tmp_path / "kernels.json"
    status, out, err = vq(*SMALL, "--share", 0.1, "--json", file)
    assert status == 0, err
    rows = [line for line in out.splitlines() if "encode+pack" in line and "32" in line and "us" not in line]
    assert any("keys+values" in row for row in rows)
    assert "10.00 (noise 1.0%)" in out and "100.0 (50.0-200.0)" in out and "0.50 (noise 1.0%)" in out
    assert "10.0% of a whole step: at most 1.099 times as fast end to end; 1.111 if it took no time at all" in out
    assert "no ratio" not in out and f"record: {file}" in out
    record = json.loads(file.read_text())
    row = record["rows"][0]
    copied = max(row["bytes_read"] + row["bytes_written"], record["copy"]["bytes_read_and_written"])
    share = (row["bytes_read"] + row["bytes_written"]) / 1e-5 / (copied / 5e-6)
    assert row["queued"]["times_as_fast"] == 10
    assert row["bandwidth"]["fraction_of_copy"] == pytest.approx(share, abs=1e-4) and share < 0.5
    assert row["whole_step"][0]["at_most"] == 1.0989
    assert "encode+pack of keys" in err  # what is measured next


def test_inside_the_noise_is_said(vq: Vq, measured: Any) -> None:
    measured(0.995e-4)
    status, out, _ = vq(*SMALL, "--share", 0.1)
    assert status == 0 and "1.00, inside the noise (noise 1.0%)" in out
    assert "no estimate, there is no ratio outside the noise" in out


@pytest.mark.parametrize(("noise", "busy"), [(0.06, ()), (0.01, ("other processes on the GPU: 1",))])
def test_no_ratio_is_printed_where_there_is_none(vq: Vq, measured: Any, noise: float, busy: tuple[str, ...]) -> None:
    measured(1e-5, noise, busy)
    status, out, _ = vq(*SMALL)
    reason = busy[0] if busy else "an arm against itself differs by 6.0%, over 5%"
    assert status == 0 and f": {reason}" in out and "no ratio" in out
    assert "10.00" not in out and "0.50" not in out


def test_groups_show_their_commands(vq: Vq) -> None:
    status, out, _ = vq("bench", "--help")
    assert status == 0 and "kernels" in out
