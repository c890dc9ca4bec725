"""What counts as other work on the machine."""

from __future__ import annotations

import math
import os
import subprocess
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from vq_core.bench import busy
from vq_core.bench.busy import Machine, OwnLoad, gpu_processes, look, others

ABSENT = 2**22 + 12345
"""More than Linux numbers processes up to by default."""


def test_load_over_half_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(busy, "_own", SimpleNamespace(value=lambda: 0.0))
    for load, refused in ((1.9, False), (2.0, False), (2.1, True), (60.0, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert bool(look().reasons) is refused


def test_own_work_is_not_other_work() -> None:
    assert not Machine(cores=2, load=1.9, own=1.0).reasons
    assert Machine(cores=2, load=2.1, own=1.0).reasons


def test_own_load_follows_the_kernels_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = [100.0], [7.0]
    monkeypatch.setattr(busy.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(busy.time, "process_time", lambda: used[0])
    own = OwnLoad()
    assert own.value() == 0
    now[0], used[0] = 160.0, 67.0  # one core for a minute
    assert own.value() == pytest.approx(1 - math.exp(-1))
    now[0] = 220.0  # idle for a minute
    assert own.value() == pytest.approx((1 - math.exp(-1)) * math.exp(-1))


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ([], 0),
        ([os.getpid()], 0),
        ([os.getpid(), ABSENT], 1),
        ([ABSENT], 0),  # in a container: this process under the host's number
        ([ABSENT, ABSENT + 1], 1),
        ([os.getppid()], 1),
    ],
)
def test_which_processes_are_others(listed: list[int], count: int) -> None:
    assert others(listed) == count


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``gpu(answer)``: a GPU as default device, and what nvidia-smi answers: text, an error, or ``None`` without it."""
    monkeypatch.setattr(busy, "_listed", None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))

    def use(answer: Any) -> list[list[str]]:
        asked: list[list[str]] = []

        def run(command: list[str], **rest: Any) -> Any:
            asked.append(command)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(stdout=answer)

        monkeypatch.setattr(busy.shutil, "which", lambda name: None if answer is None else f"/bin/{name}")
        monkeypatch.setattr(busy.subprocess, "run", run)
        return asked

    return use


def test_processes_on_the_gpu(gpu: Any) -> None:
    asked = gpu(f"{os.getpid()}\n{ABSENT}\n")
    assert gpu_processes() == (1, "") and look().reasons[-1] == "other processes on the GPU: 1"
    assert asked == [["/bin/nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]]  # asked once for both


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "no nvidia-smi here"),
        ("[Not Supported]\n", "nvidia-smi did not answer: invalid literal"),
        (subprocess.CalledProcessError(9, "nvidia-smi"), "nvidia-smi did not answer: Command"),
        (OSError("no such\nfile"), "nvidia-smi did not answer: no such file"),
    ],
)
def test_what_cannot_be_known_is_said(gpu: Any, answer: Any, said: str) -> None:
    gpu(answer)
    count, unknown = gpu_processes()
    assert count is None and unknown.startswith(said)


def test_a_cpu_has_no_processes_on_it() -> None:
    assert gpu_processes() == (None, "the default device is no GPU")
