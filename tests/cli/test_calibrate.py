"""`vq calibrate`: a file of a model's own, what it serves, and what is refused before and after the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import vq_core
from vq_core.api import SettingsError
from vq_core.calibration import artifact
from vq_core.calibration.artifact import Place
from vq_core.hosts.mlx_lm import identity, load, observe
from vq_core.testing import load_plugin, registered

LEARNT = load_plugin(Path(__file__).parent.parent / "methods/learnt.py")
TEXT = "It was a fine day, and nobody had anything to say against it. " * 4


@pytest.fixture(autouse=True)
def _method() -> Iterator[None]:
    with registered(LEARNT):
        yield


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_a_model_is_calibrated_and_then_served(vq: Any, folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.vqa"
    given = ("--method", "learnt:levels=15", "--text", text, "--out", out)
    status, said, err = vq("calibrate", folder, *given)
    assert status == 0 and "reading, tokens" in err and "learning, layer sides" in err
    model, tokenizer = load(folder)
    file = artifact.read(out)
    assert f"use it: --method learnt:levels=15,artifact={out}" in said and file.digest in said
    assert file.model == identity(model) and file.learnt["tokens"] == len(tokenizer.encode(TEXT))
    # The same again gives the same bytes.
    first = out.read_bytes()
    assert vq("calibrate", folder, *given)[0] == 0 and out.read_bytes() == first
    status, said, _ = vq(
        "generate", folder, "--method", f"learnt:levels=15,artifact={out}", "--residual", 8, "--max-tokens", 4,
        "--prompt-file", text,
    )  # fmt: skip
    assert status == 0 and f"learnt:levels=15,artifact={out}" in said.replace("\n", "").replace(" ", "")
    # Other weights are another model.
    model.model.layers[0].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight + 1
    with pytest.raises(SettingsError, match=f"is of the model {file.model}, not of llama "):
        vq_core.compress(model, method=f"learnt:levels=15,artifact={out}")


def test_what_is_learnt_is_what_the_caches_are_given(vq: Any, folder: Path, text: Path, tmp_path: Path) -> None:
    """Keys after the rotary embedding, over sequences that begin anew, as mlx-lm's own caches hold them."""
    out = tmp_path / "made.vqa"
    assert vq("calibrate", folder, "--method", "learnt", "--text", text, "--out", out, "--context", 50)[0] == 0
    model, tokenizer = load(folder)
    tokens = tokenizer.encode(TEXT)
    from mlx_lm.models.cache import make_prompt_cache

    held: list[list[np.ndarray[Any, Any]]] = [[] for _ in model.layers]
    for begin in range(0, len(tokens), 50):
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([tokens[begin : begin + 50]]), cache=caches))
        for layer, cache in enumerate(caches):
            held[layer].append(np.array(cache.state[0].astype(mx.float32))[0])
    entries = artifact.read(out).entries
    for layer, parts in enumerate(held):
        keys = np.concatenate(parts, axis=1)
        entry = entries[Place(layer, "keys", keys.shape[0], keys.shape[2])]
        low, high = np.minimum(keys.min(axis=1), 0), np.maximum(keys.max(axis=1), 0)
        assert np.allclose(entry["step"], np.maximum((high - low) / 255, 1e-6), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--method": "kivi"}, "method 'kivi' needs no calibration"),
        ({"--method": "learnt:artifact=x"}, "leave artifact= out"),
        ({"--method": "learnt:levels=7"}, "levels=7 is not accepted"),
        ({"--side": "both"}, "--side 'both' is not accepted; accepted are keys and values"),
        ({"--text": "no/such/file"}, "the calibration text cannot be read from no/such/file"),
        ({"--out": "no/such/folder/x"}, "the artifact cannot be saved: there is no folder"),
        ({"--context": 10**6}, "sequences of 1000000 tokens: accepted are 1 to"),
        ({"--samples": 5}, "layer 0, keys: 5 tokens are too few: at least 16 are needed"),
    ],
)
def test_what_is_refused(vq: Any, folder: Path, text: Path, tmp_path: Path, changes: Any, said: str) -> None:
    given = {"--method": "learnt", "--text": text, "--out": tmp_path / "made.vqa"} | changes
    status, out, err = vq("calibrate", folder, *(word for pair in given.items() for word in pair))
    assert status == 2 and out == "" and said in err.splitlines()[-1], err
    assert not (tmp_path / "made.vqa").exists()


def test_a_text_of_no_token_and_tokens_that_the_model_does_not_know(folder: Path) -> None:
    model, _ = load(folder)
    with pytest.raises(SettingsError, match="the text has tokens that the model does not know"):
        list(observe(model, [10**6], lambda *told: None, context=10))
    assert list(observe(model, [], lambda *told: None, context=10)) == []
    with pytest.raises(SettingsError, match="a model must have layers; got int"):
        list(observe(3, [1], lambda *told: None, context=10))


def test_layers_with_windows_are_listened_to_and_recurrent_ones_are_not(folders: dict[str, Path]) -> None:
    for name, sides in (("gpt_oss", 8), ("jamba", 2)):
        model, _ = load(folders[name])
        told: dict[tuple[int, str], int] = {}

        def heard(layer: int, side: str, x: mx.array, told: dict[tuple[int, str], int] = told) -> None:
            told[layer, side] = told.get((layer, side), 0) + x.shape[2]

        assert sum(observe(model, list(range(1, 100)), heard, context=60, step=25)) == 99
        assert set(told.values()) == {99} and len(told) == sides, (name, told)
