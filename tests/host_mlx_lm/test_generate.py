"""mlx-lm's own ways to generate, interrupted generations, and ours with a report."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from vq_core.errors import HostError, SettingsError
from vq_core.hosts.mlx_lm.generate import load, stream

from .models import build, prompt, save

PROMPT = 50


@pytest.fixture(scope="session")
def folder(tmp_path_factory: Any) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def loaded(folder: Path) -> Any:
    return load(folder)


TEXT = "It is a truth universally acknowledged, that a cache in want of memory must be packed."


def test_every_way_to_generate(loaded: Any, compress: Any) -> None:
    model, tokenizer = loaded
    want = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=30)
    assert len(set(want)) > 3
    handle = compress(model, residual=8)
    assert mlx_lm.generate(model, tokenizer, TEXT, max_tokens=30) == want
    assert handle.report().packed
    pieces = list(mlx_lm.stream_generate(model, tokenizer, TEXT, max_tokens=30, prefill_step_size=16))
    assert "".join(piece.text for piece in pieces) == want
    caches = make_prompt_cache(model)
    assert mlx_lm.generate(model, tokenizer, TEXT, max_tokens=30, prompt_cache=caches) == want
    assert handle.report(caches).packed
    # mlx-lm's own quantization leaves our caches alone.
    assert mlx_lm.generate(model, tokenizer, TEXT, max_tokens=30, kv_bits=4, quantized_kv_start=0) == want


def test_two_turns_on_one_cache(compress: Any, generate: Any) -> None:
    model = build("qwen3")
    caches = make_prompt_cache(model)
    first = generate(model, prompt(60), steps=10, prompt_cache=caches)[0]
    second = generate(model, prompt(60, seed=2), steps=10, prompt_cache=caches)[0]
    handle = compress(model, residual=8)
    caches = handle.make_cache()
    assert generate(model, prompt(60), steps=10, prompt_cache=caches)[0] == first
    twin = copy.deepcopy(caches)
    assert generate(model, prompt(60, seed=2), steps=10, prompt_cache=caches)[0] == second
    assert generate(model, prompt(60, seed=2), steps=10, prompt_cache=twin)[0] == second
    assert [c.offset for c in caches] == [c.offset for c in twin] == [140] * 2


def test_the_next_turn_after_a_trim(compress: Any, generate: Any) -> None:
    """What a chat does when the user edits the last message: an exact method gives the same text from there."""
    model = build("llama")
    handle = compress(model, residual=8, sink_tokens=4)
    caches = handle.make_cache()
    first = generate(model, prompt(60), steps=40, prompt_cache=caches)[0]
    assert can_trim_prompt_cache(caches) and trim_prompt_cache(caches, 100 - 59) == 100 - 59
    assert generate(model, prompt(60)[59:], steps=40, prompt_cache=caches)[0] == first


@pytest.mark.parametrize("residual", [0, 8])
def test_speculative_decoding(residual: int, compress: Any) -> None:
    """Case 29, the draft a model of its own that is wrong most of the time."""
    from mlx_lm.generate import speculative_generate_step

    model, draft = build("llama"), build("llama", seed=3, num_hidden_layers=1)

    def run() -> list[int]:
        found = speculative_generate_step(prompt(PROMPT), model, draft, num_draft_tokens=4, max_tokens=50)
        return [int(token) for token, _, _ in found]

    want = run()
    assert want == [token for token, _ in generate_step(prompt(PROMPT), model, max_tokens=50)]
    handle = compress(model, residual=residual)
    compress(draft, residual=residual)
    assert run() == want
    assert handle.report().packed


def test_a_batch_of_equal_rows(compress: Any) -> None:
    model = build("gpt_oss")
    ids = mx.stack([prompt(90, seed=s) for s in (1, 2, 3)])

    def run() -> mx.array:
        caches = make_prompt_cache(model)
        model(ids[:, :60], cache=caches)
        return mx.concatenate([model(ids[:, i : i + 1], cache=caches) for i in range(60, 90)], axis=1)

    want = run()
    handle = compress(model, residual=8)
    assert mx.allclose(run(), want, atol=1e-3)
    assert handle.report().packed == 2 * 3 * 82 and not handle.report().notes


# ---- interruptions


def rest(model: Any, caches: Any, token: int, steps: int) -> list[int]:
    return [t for t, _ in generate_step(mx.array([token]), model, max_tokens=steps, prompt_cache=caches)]


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
def test_a_closed_generator_leaves_the_cache_usable(method: str, compress: Any, generate: Any) -> None:
    model = build("llama")
    handle = compress(model, method, residual=32)
    want = generate(model, prompt(PROMPT), steps=60)[0]
    caches = handle.make_cache()
    running = generate_step(prompt(PROMPT), model, max_tokens=60, prompt_cache=caches, prefill_step_size=32)
    seen = [next(running)[0] for _ in range(20)]
    running.close()
    # The newest token has been fed ahead of being shown.
    assert [c.offset for c in caches] == [PROMPT + 20] * 2
    trim_prompt_cache(caches, 1)
    assert seen + rest(model, caches, seen[-1], 40) == want


class Trigger:
    """A layer that is interrupted at one of its calls."""

    def __init__(self, layer: Any, at: int, error: type[BaseException] = KeyboardInterrupt):
        self.layer, self.left, self.error = layer, at, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.layer(*args, **kwargs)


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
@pytest.mark.parametrize("name", ["llama", "stablelm"])
@pytest.mark.filterwarnings("ignore:not read by packed:RuntimeWarning")
def test_an_interrupt_between_two_layers(method: str, name: str, compress: Any, generate: Any) -> None:
    """The first layer has the token, the second has not: cut both to what was shown, and go on."""
    model = build(name)
    handle = compress(model, method, residual=32)
    want = generate(model, prompt(PROMPT), steps=60)[0]
    caches, seen = handle.make_cache(), []
    layers = model.model.layers
    model.model.layers = [layers[0], Trigger(layers[1], at=25)]
    with pytest.raises(KeyboardInterrupt):
        for token, _ in generate_step(prompt(PROMPT), model, max_tokens=60, prompt_cache=caches, prefill_step_size=32):
            seen.append(token)
    model.model.layers = layers
    assert len(seen) > 10 and len({c.offset for c in caches}) == 2
    for cache in caches:
        cache.trim(cache.offset - (PROMPT + len(seen) - 1))
    assert seen + rest(model, caches, seen[-1], 60 - len(seen)) == want


@pytest.mark.parametrize("method", ["identity", "kivi:bits=4"])
@pytest.mark.parametrize("hook", ["vq_encode", "vq_pack"])
def test_an_interrupt_inside_a_flush(method: str, hook: str, compress: Any, generate: Any) -> None:
    """The values are interrupted when the keys are packed already: the layer is as before the update."""
    model = build("llama")
    handle = compress(model, method, residual=0)
    want = generate(model, prompt(PROMPT), steps=60)[0]
    caches = handle.make_cache()
    ids = prompt(PROMPT)[None]
    model(ids[:, : PROMPT - 1], cache=caches)
    history = caches[1]._history
    bound = history.bound["values"]
    attribute = {"vq_encode": "_encode", "vq_pack": "_pack"}[hook]
    history.bound["values"] = broken = copy.copy(bound)
    object.__setattr__(broken, attribute, Trigger(None, at=1))
    states: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        for _ in range(41):
            states = [c.state for c in caches]
            model(ids[:, -1:], cache=caches)
    after = caches[1].state
    assert after[0] == states[1][0] and all(map(mx.array_equal, after[1:], states[1][1:]))
    history.bound["values"] = bound
    for cache in caches:
        cache.trim(cache.offset - (PROMPT - 1))
    if method == "identity":
        assert rest(model, caches, int(ids[0, -1]), 60) == want
    else:  # what a trim brings back from codes is approximate
        assert len(rest(model, caches, int(ids[0, -1]), 60)) == 60


def test_an_interrupted_prefill(compress: Any, generate: Any) -> None:
    model = build("gemma3")
    handle = compress(model, residual=8)
    want = generate(model, prompt(200), steps=20)[0]
    caches = handle.make_cache()

    def stop(done: int, total: int) -> None:
        if done >= 96:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, prompt(200), steps=20, prompt_cache=caches, prompt_progress_callback=stop)
    assert {c.offset for c in caches} == {96}
    assert generate(model, prompt(200)[96:], steps=20, prompt_cache=caches)[0] == want


# ---- ours


def test_stream_tells_text_and_report(loaded: Any, compress: Any) -> None:
    model, tokenizer = loaded
    want = mlx_lm.generate(model, tokenizer, TEXT, max_tokens=30)
    *_, (_, plain) = stream(model, tokenizer, TEXT, max_tokens=30)
    assert plain.text == want and plain.report is None
    size = len(tokenizer.encode(TEXT)) + plain.generation_tokens
    assert plain.fp16 == 2 * size * 2 * 2 * 32 * 2 and plain.held > plain.fp16
    handle = compress(model, residual=8)
    pieces, runs = zip(*stream(model, tokenizer, TEXT, handle=handle, max_tokens=30), strict=True)
    run = runs[-1]
    assert "".join(pieces) == run.text == want
    assert run.prompt_tokens == len(tokenizer.encode(TEXT)) and run.generation_tokens == plain.generation_tokens
    assert run.held == run.report.bytes.held and run.fp16 == plain.fp16 and run.peak_memory > run.held
    assert run.prompt_tps > 0 and run.generation_tps > 0


def test_stream_of_a_hybrid(tmp_path: Path, compress: Any) -> None:
    model, tokenizer = load(save(tmp_path, "jamba"))
    *_, (_, plain) = stream(model, tokenizer, TEXT, max_tokens=10)
    handle = compress(model, residual=8)
    *_, (_, run) = stream(model, tokenizer, TEXT, handle=handle, max_tokens=10)
    assert run.text == plain.text
    assert run.report.native_bytes > 0 and run.held == run.report.bytes.held + run.report.native_bytes


def test_stream_samples_by_seed(loaded: Any, compress: Any) -> None:
    model, tokenizer = loaded
    compress(model, residual=8)

    def text(seed: int) -> str:
        *_, (_, run) = stream(model, tokenizer, TEXT, max_tokens=5, temperature=2.0, seed=seed)
        return run.text

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, "prompt is empty"),
        ("a", {"max_tokens": -1}, "max_tokens"),
        ("a", {"temperature": math.nan}, "temperature"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"seed": -1}, "seed"),
    ],
)
def test_stream_refuses(loaded: Any, text: str, options: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        list(stream(*loaded, text, **options))


def damage(folder: Path, kind: str) -> None:
    config, weights, tokenizer = (folder / n for n in ("config.json", "model.safetensors", "tokenizer.json"))
    if kind == "no config":
        config.unlink()
    elif kind == "no weights":
        weights.unlink()
    elif kind == "no tokenizer":
        tokenizer.unlink()
    elif kind == "broken config":
        config.write_text("{")
    elif kind == "config is a list":
        config.write_text("[1]")
    elif kind == "no model type":
        config.write_text("{}")
    elif kind == "unknown model type":
        config.write_text(config.read_text().replace('"llama"', '"nothing"'))
    elif kind == "no hidden size":
        config.write_text(config.read_text().replace('"hidden_size": 64, ', ""))
    elif kind == "other layers":
        config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    elif kind == "broken weights":
        weights.write_bytes(b"garbage")
    elif kind == "broken tokenizer":
        tokenizer.write_text("{")


KINDS = (
    "no config", "no weights", "no tokenizer", "broken config", "config is a list", "no model type",
    "unknown model type", "no hidden size", "other layers", "broken weights", "broken tokenizer",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_model_is_one_error(kind: str, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path, kind)
    with pytest.raises(HostError, match="mlx-lm cannot load"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/no/such/folder", "a/b/c"])
def test_a_missing_folder_is_said(name: str) -> None:
    with pytest.raises(HostError, match="no such folder"):
        load(name)


def test_plain_caches_are_plain(loaded: Any, compress: Any) -> None:
    model, _ = loaded
    handle = compress(model)
    assert [type(c) for c in handle.plain_cache()] == [KVCache] * 2
