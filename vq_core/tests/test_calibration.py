"""Sampling, files of learnt constants, and what a file may not serve."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_core import PackedKVCache
from vq_core.api import (
    Capabilities,
    FormatError,
    MethodFacts,
    PluginError,
    PrepareContext,
    SettingsError,
    UnsupportedShapeError,
    VQError,
    hookimpl,
    setting,
)
from vq_core.api.settings import format_choice
from vq_core.cache.policy import LayerPolicy
from vq_core.calibration import artifact, learn
from vq_core.calibration.artifact import Learnt, Place
from vq_core.calibration.samples import Draw, Sample
from vq_core.files import tensors
from vq_core.plugins import binding
from vq_core.plugins.choice import choose
from vq_core.testing import load_plugin, registered

LEARNT = load_plugin(Path(__file__).parent.parent.parent / "tests/methods/learnt.py")
CONTEXT = PrepareContext(side="keys", kv_heads=2, key_dim=16, value_dim=16, dtype="float16", layer=1, model="tiny 1")


@pytest.fixture(autouse=True)
def _method() -> Iterator[None]:
    with registered(LEARNT):
        yield


@attrs.frozen
class Model:
    """Stands for a host: three layers of random numbers, in steps of so many tokens."""

    tokens: int = 40
    step: int = 16
    layers: int = 3
    spoilt: float | None = None

    def read(self, heard: Any) -> Iterator[int]:
        for begin in range(0, self.tokens, self.step):
            count = min(self.step, self.tokens - begin)
            for layer in range(self.layers):
                rng = np.random.default_rng((layer, begin))
                x = rng.standard_normal((2, 1, 2, count, 16)).astype(np.float32)
                if self.spoilt is not None and layer == 2:
                    x[1, 0, 0, 0, 0] = self.spoilt
                heard(layer, "keys", mx.array(x[0]).astype(mx.float16))
                heard(layer, "values", mx.array(x[1]).astype(mx.float16))
            yield count


def made(path: Path, model: Model | None = None, method: str = "learnt", **options: Any) -> Learnt:
    model = model or Model()
    given: dict[str, Any] = {"model": "tiny 1", **options}
    return learn.calibrate(method, model.read, range(model.tokens), path, **given)


# ---- sampling


def test_every_token_stays_with_the_same_chance() -> None:
    counts = np.zeros(50)
    for seed in range(400):
        draw, kept = Draw(10, seed), np.full(10, -1)
        for begin, count in ((0, 7), (7, 30), (37, 13)):
            places, slots = draw.next(count)
            kept[slots] = begin + places
        assert len(set(kept.tolist())) == 10 and kept.min() >= 0
        counts[kept] += 1
    # 80 expected of each; the standard deviation is 8.
    assert counts.sum() == 4000 and counts.min() > 48 and counts.max() < 112


def test_statistics_are_of_all_tokens_and_the_sample_is_bounded() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 300, 8)).astype(np.float16)
    draw, sample = Draw(20, 0), Sample(20, 2, 8, "float16")
    for begin in range(0, 300, 64):
        part = x[:, :, begin : begin + 64]
        sample.add(mx.array(part), *draw.next(part.shape[2]))
    found = sample.calibration(5, "here")
    wide = x[0].astype(np.float32)
    assert sample.kept.nbytes == 20 * 2 * 8 * 2 and found.samples.shape == (2, 20, 8) and found.tokens == 300
    assert np.array_equal(found.low, wide.min(axis=1)) and np.array_equal(found.high, wide.max(axis=1))
    assert np.allclose(found.mean, wide.mean(axis=1), atol=1e-6)
    rows = {row.tobytes() for row in wide.swapaxes(0, 1)}
    assert all(row.tobytes() in rows for row in np.array(found.samples).swapaxes(0, 1))


# ---- making a file


def test_a_file_holds_every_layer_side_and_says_where_it_is_from(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    file = made(tmp_path / "a.vqa", samples=20, seed=3, tell=lambda *what: told.append(what))
    assert set(file.entries) == {Place(layer, side, 2, 16) for layer in range(3) for side in ("keys", "values")}
    assert file.model == "tiny 1" and file.settings == "levels=255" and file.method["name"] == "learnt"
    assert (file.learnt["tokens"], file.learnt["samples"], file.learnt["seed"]) == (40, 20, 3)
    assert told[0] == ("reading", 0, 40) and ("reading", 40, 40) in told and told[-1] == ("learning", 6, 6)


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("a", "b", "c"))
    assert made(first).digest == made(again).digest != made(other, Model(tokens=41)).digest
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_one_side_alone(tmp_path: Path) -> None:
    file = made(tmp_path / "a", sides=["values"])
    assert {place.side for place in file.entries} == {"values"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "kit_exact_not_there"}, "unknown method"),
        ({"method": "learnt:artifact=x"}, "leave artifact= out"),
        ({"model": Model(tokens=0)}, "the calibration text has no token"),
        ({"model": Model(tokens=9)}, "layer 0, keys: 9 tokens are too few: at least 16 are needed"),
        ({"samples": 12}, "12 tokens are too few: at least 16 are needed"),
        ({"samples": 0}, "samples must be 1 or more; got 0"),
        ({"rounds": 0}, "rounds must be 1 or more; got 0"),
        ({"model": Model(spoilt=float("nan"))}, "layer 2, values: the model gives NaN or infinity"),
        ({"model": Model(spoilt=float("inf"))}, "layer 2, values: the model gives NaN or infinity"),
        ({"model": Model(layers=0)}, "the model fills no cache"),
        ({"path": "no/such/folder/a"}, "cannot write"),
    ],
)
def test_what_cannot_be_learnt_is_one_error(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    given = dict(options)
    path, model = tmp_path / given.pop("path", "a"), given.pop("model", Model())
    with pytest.raises(SettingsError, match=said):
        made(path, model, **given)
    assert not path.exists()


def test_a_head_size_that_no_file_helps_is_refused_before_one_is_asked_for(tmp_path: Path) -> None:
    """At the first tokens of the model, and in a cache before its settings are found to name no file."""
    hooks = {name: getattr(LEARNT, name) for name in dir(LEARNT) if name.startswith("vq_")}
    facts = LEARNT.vq_method()

    def vq_method() -> Any:
        able = attrs.evolve(facts.capabilities, head_dims=(8, 9, 10, 12))
        return attrs.evolve(facts, name="sizes", capabilities=able)

    plugin = SimpleNamespace(**hooks | {"vq_method": hookimpl(vq_method)})
    steps: list[int] = []
    model = Model()

    def read(heard: Any) -> Iterator[int]:
        for count in model.read(heard):
            steps.append(count)
            yield count

    with registered(plugin):
        for text in ("sizes", f"sizes:artifact={tmp_path / 'none'}"):
            with pytest.raises(UnsupportedShapeError, match=r"'sizes': head size 16 .*accepted are 8 to 10, 12$"):
                binding.bind(text, CONTEXT)
        with pytest.raises(UnsupportedShapeError, match=r"layer 0, keys: .*head size 16 .*accepted are 8 to 10, 12$"):
            learn.calibrate("sizes", read, range(model.tokens), tmp_path / "a", model="tiny 1")
    assert not steps and not (tmp_path / "a").exists()


@pytest.mark.parametrize("gives", [None, {}, {"low": 1.0}, [1]])
def test_a_method_that_gives_no_arrays_is_named(tmp_path: Path, gives: Any) -> None:
    hooks = {name: getattr(LEARNT, name) for name in dir(LEARNT) if name.startswith("vq_")}

    def vq_calibrate() -> Any:
        return gives

    def vq_method() -> Any:
        return attrs.evolve(LEARNT.vq_method(), name="gives")

    plugin = SimpleNamespace(**hooks | {"vq_calibrate": hookimpl(vq_calibrate), "vq_method": hookimpl(vq_method)})
    with registered(plugin), pytest.raises(PluginError, match="'gives': vq_calibrate must return arrays by name"):
        made(tmp_path / "a", method="gives")


def test_facts_say_what_calibration_needs() -> None:
    @attrs.frozen
    class Without:
        bits: int = setting(1)

    for settings, layers in ((Without, True), (LEARNT.Settings, False)):
        with pytest.raises(PluginError, match="must say per_layer=True, and its settings class must have artifact"):
            MethodFacts("x", "y", settings, per_layer=layers, capabilities=Capabilities(needs_calibration=True))


# ---- whose a file is


def text(path: Path) -> str:
    return f"learnt:artifact={quote(str(path))}"


def test_a_file_serves_the_layer_side_that_it_was_learnt_from(tmp_path: Path) -> None:
    file = made(tmp_path / "a.vqa")
    bound = binding.bind(text(tmp_path / "a.vqa"), CONTEXT)
    assert bound.artifact == file.digest
    low, step, _, _ = bound.state
    held = file.entries[Place(1, "keys", 2, 16)]
    assert np.array_equal(low[:, 0], held["low"]) and np.array_equal(step[:, 0], held["step"])


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"model": "tiny 2"}, SettingsError, "is of the model tiny 1, not of tiny 2"),
        ({"model": None}, SettingsError, "is of the model tiny 1; this is a cache of no model"),
        ({"layer": 3}, SettingsError, "none for layer 3: keys of 2 heads of 16"),
        ({"layer": None}, SettingsError, "none for keys of 2 heads of 16"),
        ({"kv_heads": 4}, UnsupportedShapeError, "has layer 1: keys of 2 heads of 16, and none for layer 1: keys of 4"),
        ({"key_dim": 32}, UnsupportedShapeError, "none for layer 1: keys of 2 heads of 32"),
    ],
)
def test_what_a_file_may_not_serve(tmp_path: Path, changes: dict[str, Any], kind: type[VQError], said: str) -> None:
    made(tmp_path / "a.vqa")
    with pytest.raises(kind, match=said) as caught:
        binding.bind(text(tmp_path / "a.vqa"), attrs.evolve(CONTEXT, **changes))
    assert "vq calibrate MODEL --method learnt:levels=255 --text FILE --out FILE" in str(caught.value)


def test_other_settings_and_other_methods_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.vqa"
    made(path)
    with pytest.raises(SettingsError, match="was learnt with levels=255, not with levels=15: give the same settings"):
        binding.bind(f"learnt:levels=15,artifact={path}", CONTEXT)
    file = artifact.read(path)
    for method in ({"name": "other"}, {"distribution": "theirs"}):
        artifact.write(path, attrs.evolve(file, method={**file.method, **method}))
        with pytest.raises(SettingsError, match=r"is of the method .* of .*, not of 'learnt' of in-test"):
            binding.bind(text(path), CONTEXT)


def test_no_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"needs an artifact.*vq calibrate MODEL --method learnt:levels=255 --text"):
        binding.bind("learnt", CONTEXT)


def _header(path: Path, **changes: Any) -> None:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"] |= changes
    body = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + raw[8 + size :])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder, not a regular file"),
        (lambda path: path.write_bytes(b""), "0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cut"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x07"), "not those that were saved"),
        (lambda path: path.write_text("a text, and no artifact at all"), "no safetensors file"),
        (lambda path: _header(path, version="9"), "vq-calibration file of version '9'; this vq-core reads version 1"),
        (lambda path: _header(path, format="vq-cache"), "no file of the format vq-calibration"),
        (lambda path: _header(path, description="{}"), "not the one that was saved"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, damage: Any, said: str) -> None:
    path = tmp_path / "a.vqa"
    made(path)
    damage(path)
    with pytest.raises(FormatError, match=said) as caught:
        binding.bind(text(path), CONTEXT)
    assert "the artifact" in str(caught.value) and "vq calibrate" in str(caught.value)


def test_a_file_that_claims_what_it_has_not(tmp_path: Path) -> None:
    path, file = tmp_path / "a.vqa", made(tmp_path / "a.vqa")
    entry = {"layer": 1, "side": "keys", "kv_heads": 2, "head_dim": 16, "arrays": ["low"]}
    whole = {
        "method": dict(file.method), "settings": file.settings, "model": None, "learnt": dict(file.learnt),
        "entries": [entry],
    }  # fmt: skip
    low = {"0.low": mx.zeros((2, 16))}
    for changes, arrays, said in (
        ({"entries": []}, low, "must have entries"),
        ({"entries": [entry | {"layer": -1}]}, low, "the layer of an entry"),
        ({"entries": [entry | {"side": "both"}]}, low, "must be keys or values"),
        ({"entries": [entry | {"head_dim": True}]}, low, "head_dim of an entry"),
        ({"entries": [entry | {"arrays": "low"}]}, low, "must be names"),
        ({"entries": [entry, entry]}, low, "is there twice"),
        ({"entries": [entry | {"more": 1}]}, low, "which nobody knows"),
        ({}, {}, "without its arrays"),
        ({}, low | {"7.low": mx.zeros((1,))}, "arrays that no entry names"),
        ({"model": 3}, low, "its model must be text"),
        ({"method": {"name": "learnt"}}, low, "lacks distribution, version"),
    ):
        tensors.write(path, tensors.Format("vq-calibration", 1), whole | changes, arrays)
        with pytest.raises(FormatError, match=said):
            binding.bind(text(path), CONTEXT)


def test_paths_round_trip_as_settings(tmp_path: Path) -> None:
    folder = tmp_path / "a b,c=d:e%"
    folder.mkdir()
    made(folder / "x y.vqa")
    path = str(folder / "x y.vqa")
    settings = LEARNT.Settings(artifact=path)
    written = format_choice("learnt", settings)
    assert choose(written, "keys").settings == settings
    assert binding.bind(written, CONTEXT).choice.text == written


# ---- caches


def fed(path: Path, tokens: int = 60) -> PackedKVCache:
    policy = LayerPolicy.make(method=text(path), residual=16)
    cache = PackedKVCache.from_policy(policy, layer=1, model="tiny 1")
    x = mx.array(np.random.default_rng(5).standard_normal((1, 2, tokens, 16)).astype(np.float16))
    cache.update_and_fetch(x, x)
    return cache


def test_a_saved_cache_is_read_with_its_own_artifact_only(tmp_path: Path) -> None:
    path = tmp_path / "a.vqa"
    made(path)
    cache = fed(path)
    state = cache.state
    again = PackedKVCache.from_state(state)
    assert np.array_equal(again.decode()[0], cache.decode()[0])
    other = made(path, Model(tokens=41))
    with pytest.raises(FormatError, match=f"packed with the artifact of SHA-256 .*{other.digest}.*put the file back"):
        PackedKVCache.from_state(state)
    description = json.loads(state[0])
    for method in description["methods"].values():
        del method["artifact"]
    with pytest.raises(FormatError, match="packed with the artifact of SHA-256 ''"):
        PackedKVCache.from_state([json.dumps(description), *state[1:]])
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        PackedKVCache.from_state(state)


def test_a_saved_cache_is_read_wherever_a_file_of_that_content_lies(tmp_path: Path) -> None:
    """Once the process has read it there; the cache then names the place where it lies."""
    path, moved = tmp_path / "a.vqa", tmp_path / "other folder" / "b,c.vqa"
    digest = made(path).digest
    cache = fed(path)
    state = cache.state
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(
        FormatError, match=f"SHA-256 '{digest}'; the artifact .* cannot be read: .*compress the model with it"
    ):
        PackedKVCache.from_state(state)
    elsewhere = fed(moved)
    again = PackedKVCache.from_state(state)
    assert again.policy == elsewhere.policy and np.array_equal(again.decode()[0], cache.decode()[0])
    assert PackedKVCache.from_state(again.state).policy == elsewhere.policy
    made(path, Model(tokens=41))  # another file at the old place does not hide it
    again = PackedKVCache.from_state(state)
    assert again.policy == elsewhere.policy and np.array_equal(again.decode()[0], cache.decode()[0])
    assert PackedKVCache.join([cache, again]).state and PackedKVCache.join([again, cache]).offset == 60
    moved.unlink()
    with pytest.raises(FormatError, match=f"packed with the artifact of SHA-256 '{digest}', that of"):
        PackedKVCache.from_state(state)


def test_caches_of_two_artifacts_do_not_join(tmp_path: Path) -> None:
    path = tmp_path / "a.vqa"
    made(path)
    first = fed(path)
    assert PackedKVCache.join([first, fed(path)]).offset == 60
    made(path, Model(tokens=41))
    with pytest.raises(SettingsError, match="packed with one artifact"):
        PackedKVCache.join([first, fed(path)])
