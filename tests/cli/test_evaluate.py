"""`vq evaluate`: tables, records, exit status and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vq_core.evaluate import held

Vq = Callable[..., tuple[int, str, str]]
SYNTHETIC = ("evaluate", "synthetic", "--tokens", 256, "--queries", 16, "--head-dim", 32, "--seeds", 1)
BYTES = ("evaluate", "bytes", "--tokens", 400, "--kv-heads", 2, "--head-dim", 64)


def row_of(out: str, *starts: str) -> list[str]:
    """The cells of the line that begins so."""
    (line,) = [line for line in out.splitlines() if line.split()[: len(starts)] == list(starts)]
    return line.split()[len(starts) :]


def test_synthetic(vq: Vq, tmp_path: Path) -> None:
    file = tmp_path / "synthetic.json"
    status, out, err = vq(*SYNTHETIC, "--method", "kivi:bits=4", "--method", "example:bits=3", "--json", file)
    assert status == 0 and "keys: kivi:bits=4" in err and f"record: {file}" in out
    record = json.loads(file.read_text())
    row = record["rows"][0]
    assert (row["method"], row["side"]) == ("kivi:bits=4", "keys")
    told = [f"{c['error']:.3f} / {c['kl']:.4f}" for c in row["columns"].values()]
    assert len(told) == 3 and any(
        line.split()[0:1] == ["kivi:bits=4"] and all(one in line for one in told) for line in out.splitlines()
    )
    assert "256 tokens, D 32, float16, 16 queries, 1 seeds" in out and "left out" not in out
    assert "command" in record["environment"] and record["conditions"]["seeds"] == 1


def test_all_names_what_cannot_be_used(vq: Vq, monkeypatch: Any) -> None:
    from vq_core.evaluate import synthetic

    def candidates(methods: Any) -> Any:
        assert methods == ("all",)
        return [synthetic.Candidate("kivi:bits=2", "kivi", ("keys", "values"), False)], [{"arm": "x", "reason": "why"}]

    monkeypatch.setattr(synthetic, "candidates", candidates)
    status, out, _ = vq(*SYNTHETIC, "--method", "all")
    assert status == 0 and "left out: x: why" in out


def test_bytes(vq: Vq, tmp_path: Path) -> None:
    file = tmp_path / "bytes.json"
    status, out, _ = vq(*BYTES, "--method", "kivi:bits=2", "--json", file)
    assert status == 0
    for side in ("keys", "values"):
        assert row_of(out, "kivi:bits=2", side) == ["2.0000", "1.0000", "3.0000", "3.0000", "+0.00%"]
    total = json.loads(file.read_text())["rows"][0]["bytes"]
    assert row_of(out, "kivi:bits=2", "codes")[0] == f"{total['codes']:,}"
    for said, name in (("metadata", "metadata"), ("exact window", "window"), ("spare capacity", "spare"),
                       ("all in", "held"), ("shared constants, apart", "constants")):  # fmt: skip
        assert row_of(out, *said.split())[0] == f"{total[name]:,}"
    assert row_of(out, "all", "in")[1] == f"{total['held'] * 8 / (2 * 400 * 2 * 64):.4f}"


def test_bytes_that_differ(vq: Vq, monkeypatch: Any) -> None:
    monkeypatch.setattr(held, "TOLERANCE", -1)
    status, out, _ = vq(*BYTES, "--method", "kivi:bits=2")
    assert status == 1 and "+0.00%: more than 1%" in out


def test_model(vq: Vq, folder: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "model.json", tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 4)
    few = ("--prefill", 150, "--scored", 8, "--residual", 32, "--text", text)
    status, out, err = vq(
        "evaluate", "model", folder, "--method", "kivi:bits=2", "--method", "kivi:bits=8", "--keys", "kivi:bits=4",
        "--values", "example:bits=4", *few, "--json", file,
    )  # fmt: skip
    assert status == 0 and "scoring 8 tokens with 3 caches" in err
    record = json.loads(file.read_text())
    assert [row["name"] for row in record["rows"]] == ["kivi:bits=2", "kivi:bits=8", "kivi:bits=4 + example:bits=4"]
    for row in record["rows"]:
        line = next(line for line in out.splitlines() if line.strip().startswith(f"{row['name']}  "))
        assert f"{row['kl']:.5f}" in line and f"{row['perplexity']:.4f}" in line
        assert f"{row['bytes_per_token']['held']:,.1f}" in out and f"{row['all_in_bits']:.2f}" in line
    assert "KL falls as bits rise, kivi: yes" in out and f"of {text} after a prefill of 150" in out


def test_inversions_are_named(vq: Vq, monkeypatch: Any, capsys: Any) -> None:
    from vq_core.cli.evaluate import _print_model

    told = {"family": "kivi", "ordered": False, "inversions": ["a has KL 1, b 2"]}
    row = {
        "name": "a", "bits": 2, "kl": 1.0, "top1": 1, "perplexity": 1, "all_in_bits": 3, "scored": 1, "tokens": 2,
        "packed_share": 0.5, "bytes": {"ratio": 1, "constants": 0}, "notes": ["a note"],
        "bytes_per_token": dict.fromkeys(("codes", "metadata", "window", "spare", "held"), 1.0),
    }  # fmt: skip
    _print_model(
        {
            "own": {"name": "own", "perplexity": 1, "all_in_bits": 16}, "rows": [row], "left_out": [],
            "conditions": {"text": "t", "prefill": 1}, "kl_falls_as_bits_rise": [told],
            "environment": {"device": "cpu", "device_info": {}},
        }
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "kivi: no\n  a has KL 1, b 2\n" in out and "a: a note" in out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("synthetic", "--method", "nothing"), "unknown method"),
        (("synthetic", "--tokens", 0), "tokens must be 1 or more"),
        (("synthetic", "--json", "no/such/file.json"), "there is no folder no/such"),
        (("bytes", "--dtype", "int8"), "accepted are float16"),
        (("bytes", "--method", "kivi:bits=5"), "bits"),
        (("bytes", "--method", "kivi", "--residual", 5000), "pack none"),
        (("model", "demo", "--keys", "kivi"), "as many --keys as --values"),
        (("model", " ", "--method", "kivi"), "name is empty"),
    ],
)
def test_bad_input(vq: Vq, given: tuple[Any, ...], said: str) -> None:
    status, out, err = vq("evaluate", *given)
    assert status == 2 and out == "" and said in err.splitlines()[-1] and "Traceback" not in err
