"""`vq bench attention`, `decode` and `generate` as commands: what is printed and written, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vq_core.bench import plots
from vq_core.errors import SettingsError

Vq = Callable[..., tuple[int, str, str]]
ATTENTION = (
    "bench", "attention", "--method", "kivi:bits=4", "--tokens", 192, "--heads", 2, "--kv-heads", 1, "--head-dim", 64,
    "--residual", 32, "--dtype", "float32", "--rounds", 1, "--calls", 1, "--pool-bytes", 1,
)  # fmt: skip
SIZES = {"layers": 1, "hidden": 32, "heads": 2, "kv-heads": 1, "head-dim": 64, "intermediate": 32, "vocab": 40}
GEOMETRY = tuple(word for name, value in SIZES.items() for word in (f"--{name}", value))
DECODE = (
    "bench", "decode", "--method", "kivi:bits=4", *GEOMETRY, "--residual", 32, "--dtype", "float32", "--rounds", 1,
    "--steps-a-sample", 2,
)  # fmt: skip
CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40
}  # fmt: skip
GENERATE = ("bench", "generate", "demo", "--prompt", "It was a fine day, and " * 4, "--method", "kivi:bits=4",
            "--max-tokens", 4, "--rounds", 1, "--residual", 32)  # fmt: skip


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does; the figures are looked at for their shape only."""
    monkeypatch.setattr("vq_core.bench.busy.os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("vq_core.bench.attention.COPIED_CPU", 4096)
    monkeypatch.setattr("vq_core.bench.clock.MOST_NOISE", 1e9)  # no comparison is made again


def whole(file: Path) -> None:
    """A figure is written, and is what its name says."""
    data = file.read_bytes()
    assert len(data) > 5000
    assert data.startswith(b"\x89PNG") if file.suffix == ".png" else b"<svg" in data[:1000]


def test_attention(vq: Vq, tmp_path: Path) -> None:
    record, figure = tmp_path / "a.json", tmp_path / "a.svg"
    status, out, err = vq(*ATTENTION, "--tier", "auto", "--tier", "reference", "--json", record, "--plot", figure)
    assert status == 0, err
    for name in ("mlx float32", "kivi:bits=4 [auto]", "kivi:bits=4 [reference]", "mlx-lm quantized 4 bits"):
        assert name in out
    assert "no GPU clock" in out and f"record: {record}" in out and f"figure: {figure}" in out
    made = json.loads(record.read_text())
    assert made["benchmark"] == "attention" and made["wanted"]["tiers"] == ["auto", "reference"]
    assert made["environment"]["command"]
    whole(figure)
    text = figure.read_text()
    for shown in ("queued clock, microseconds", "read by a step, MiB"):
        assert shown in text
    # The same from the record, as for a machine without matplotlib.
    later = tmp_path / "later.png"
    plots.draw_saved(record, later)
    whole(later)
    for content, said in (("[]", "no record"), ("{", "not valid JSON"), ('{"benchmark": "x"}', "has no figure")):
        record.write_text(content)
        with pytest.raises(SettingsError, match=said):
            plots.draw_saved(record, later)


def test_decode(vq: Vq, tmp_path: Path) -> None:
    record, figure = tmp_path / "d.json", tmp_path / "d.png"
    status, out, err = vq(
        *DECODE, "--context", 96, "--fits", "1MiB", "--prefill", 80, "--prefill-rounds", 1, "--steps", 8,
        "--json", record, "--plot", figure,
    )  # fmt: skip
    assert status == 0, err
    assert re.search(r"96 tokens \(grown to \d+\)", out) and "kivi:bits=4 [auto]" in out
    assert "tokens fit into 1,048,576 bytes" in out and "prefill of 80 tokens, kivi:bits=4 [auto]" in out
    assert "8 steps, kivi:bits=4 [auto]: 0 kernels compiled after the third" in out
    made = json.loads(record.read_text())
    assert made["config"]["num_attention_heads"] == 2 and made["wanted"]["fits"] == 2**20
    whole(figure)


@pytest.mark.parametrize("command", [ATTENTION, (*DECODE, "--context", 100)], ids=["attention", "decode"])
def test_what_is_printed_of_a_stand_in(vq: Vq, command: tuple[Any, ...]) -> None:
    method = "vecinfer:sub=8,centroids=256"
    status, out, err = vq(*(method if word == "kivi:bits=4" else word for word in command))
    assert status == 0, err
    line = next(line for line in out.splitlines() if line.startswith(f"{method} [auto]: "))
    assert "its constants are a stand-in, learnt from random numbers" in line


def test_only_what_is_asked_for(vq: Vq, tmp_path: Path) -> None:
    """A configuration file, and no context where only a budget is asked for; then there is no figure of contexts."""
    file, record = tmp_path / "config.json", tmp_path / "d.json"
    file.write_text(json.dumps(CONFIG | {"model_type": "anything"}))
    status, _, err = vq(
        "bench", "decode", "--method", "kivi:bits=4", "--config", file, "--layers", 1, "--dtype", "float32",
        "--fits", 99999, "--json", record,
    )  # fmt: skip
    assert status == 0, err
    made = json.loads(record.read_text())
    assert made["contexts"] == [] and made["prefill"] is None and made["stability"] is None
    # Layers by the option, heads by the file; as many KV heads as query heads, and what divides.
    assert made["config"] == CONFIG | {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 32}
    with pytest.raises(SettingsError, match="give --context"):
        plots.draw(made, tmp_path / "d.png")
    assert not (tmp_path / "d.png").exists()


def test_generate(vq: Vq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, figure = tmp_path / "g.json", tmp_path / "g.png"
    status, out, err = vq(*GENERATE, "--json", record, "--plot", figure)
    assert status == 0, err
    assert "repeated runs: kivi:bits=4, 3 texts: agree (must agree)" in out and "demo: 92 tokens read" in out
    assert "left out: kivi:bits=4, kernels off: no kernels on this device" in out
    made = json.loads(record.read_text())
    assert made["agree"] is True
    whole(figure)
    # The same record with a text that differs where it must not.
    made["agree"] = made["agreements"][0]["agree"] = False
    monkeypatch.setattr("vq_core.bench.generate.measure", lambda *given, **rest: made)
    status, out, err = vq(*GENERATE)
    assert status == 1 and "3 texts: differ (must agree)" in out and "texts that must agree differ" in err


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        (ATTENTION, ("--tier", "fastest"), "attention must be one of"),
        (ATTENTION, ("--tokens", 0), "tokens 0"),
        (ATTENTION, ("--heads", 3, "--kv-heads", 2), "must be a multiple of"),
        (ATTENTION, ("--method", "vq_none"), "vq_none"),
        (ATTENTION, ("--method", "kivi:bits=5"), "bits"),
        (ATTENTION, ("--dtype", "int8"), "accepted are float16"),
        (ATTENTION, ("--batch", 0), "batch 0"),
        (ATTENTION, ("--residual", -1), "residual"),
        (ATTENTION, ("--rounds", 0), "rounds 0"),
        (ATTENTION, ("--json", "no/such/folder.json"), "there is no folder"),
        (ATTENTION, ("--plot", "figure.pdf"), "must end in .png or .svg"),
        (ATTENTION, ("--plot", "no/such/figure.png"), "there is no folder"),
        (DECODE, ("--context", 0), "context 0"),
        (DECODE, ("--tier", "fastest"), "attention must be one of"),
        (DECODE, ("--method", "vq_none"), "vq_none"),
        (DECODE, ("--heads", 3, "--kv-heads", 2), "must be a multiple of"),
        (DECODE, ("--head-dim", 33), "even head size"),
        (DECODE, ("--layers", 0), "layers (num_hidden_layers)"),
        (DECODE, ("--fits", "much"), "give bytes, such as 8GiB"),
        (DECODE, ("--fits", 0), "fits 0"),
        (DECODE, ("--prefill", 0), "prefill 0"),
        (DECODE, ("--steps", 3), "4 or more"),
        (DECODE, ("--steps-a-sample", 1), "2 or more"),
        (DECODE, ("--config", "no-such.json"), "cannot be read"),
        (DECODE, ("--prefill", 64, "--plot", "figure.png"), "give --context with --plot"),
        (GENERATE, ("--method", "vq_none"), "vq_none"),
        (GENERATE, ("--max-tokens", 1), "2 new tokens"),
        (GENERATE, ("--rounds", 0), "1 round"),
        (GENERATE, ("--prompt-file", "x"), "give the prompt by either"),
    ],
)
def test_bad_input(vq: Vq, command: tuple[Any, ...], given: tuple[Any, ...], said: str) -> None:
    """One line, nothing on standard output, and no model or cache was made for it."""
    status, out, err = vq(*command, *given)
    assert status == 2 and out == ""
    assert said in err.strip().splitlines()[-1] and len([x for x in err.splitlines() if x.startswith("vq: ")]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "JSON object"),
        ("{", "not valid JSON"),
        ('{"num_hidden_layers": 2}', "does not say hidden_size"),
        (json.dumps(CONFIG | {"hidden_size": 65}), "no multiple of num_attention_heads"),
        (json.dumps(CONFIG | {"num_hidden_layers": "2"}), "whole number"),
        (json.dumps(CONFIG | {"num_key_value_heads": "2"}), "whole number"),
    ],
)
def test_bad_configurations(vq: Vq, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    status, out, err = vq("bench", "decode", "--config", file)
    assert (status, out) == (2, "") and len(err.strip().splitlines()) == 1 and said in err


def test_without_matplotlib(vq: Vq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says how to get it, before anything is measured; without --plot nothing needs it.

    The machine is busy here, so that there are no ratios.
    """
    monkeypatch.setattr("vq_core.bench.busy.os.getloadavg", lambda: (99.0, 99.0, 99.0))
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    figure = tmp_path / "a.png"
    status, out, err = vq(*ATTENTION, "--plot", figure)
    assert (status, out) == (2, "") and len(err.strip().splitlines()) == 1
    assert "pip install 'vq-core[plots]'" in err and not figure.exists()
    status, out, err = vq(*ATTENTION)
    assert status == 0, err
    assert re.search(r"no ratio: 192 tokens, queued, .*kivi:bits=4 \[auto\].*: the load average 99\.0", out)
    assert " times as fast (noise" not in out


def test_a_record_without_a_figure(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has no figure"):
        plots.draw({"benchmark": "kernels"}, tmp_path / "k.png")


def test_figures_with_the_gpu_clock(tmp_path: Path) -> None:
    """Arms that were not profiled are left out of that panel."""
    clock = {"arms": {n: {"median": 2e-6, "low": 1e-6, "high": 3e-6} for n in ("mlx float16", "m [auto]", "q")}}
    gpu = {"median": 2e-6, "min": 1e-6, "max": 3e-6}
    row = {
        "tokens": 64, "queued": clock, "single": clock,
        "arms": {
            "mlx float16": {"gpu": gpu, "bytes_read": 9}, "m [auto]": {"gpu": gpu, "bytes_read": 3},
            "q": {"gpu": {"unavailable": "not profiled"}, "bytes_read": 2},
        },
    }  # fmt: skip
    record = {
        "benchmark": "attention", "environment": {"device": "d", "device_info": {}},
        "gpu_clock": {"available": True}, "rows": [row, row | {"tokens": 128}],
    }  # fmt: skip
    file = tmp_path / "a.svg"
    plots.draw(record, file)
    whole(file)
    assert "gpu clock, microseconds" in file.read_text()


def test_help_names_every_benchmark(vq: Vq) -> None:
    status, out, _ = vq("bench", "--help")
    assert status == 0 and all(name in out for name in ("kernels", "attention", "decode", "generate"))
