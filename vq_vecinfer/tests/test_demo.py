"""The artifact of the model that ships: made again, and in use.

    vq calibrate demo --method vecinfer:sub=8,centroids=256 --rounds 8 \\
        --text vq_core/src/vq_core/demo/prompt.txt --out vq_vecinfer/tests/artifacts/demo.vqa

The text is the demonstration's prompt, which the held-out text does not contain.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

import vq_core
from vq_core.api import FormatError, PrepareContext, SettingsError, Side
from vq_core.calibration import artifact
from vq_core.cli.main import app
from vq_core.demo import MODEL_PATH, heldout_text
from vq_core.evaluate.divergence import divergences
from vq_core.hosts.mlx_lm import compressed, identity, load, observe
from vq_core.plugins import binding
from vq_core.testing import ProtocolConformance
from vq_core.testing.kit import pack, round_trip

FILE = Path(__file__).parent / "artifacts/demo.vqa"
SETTINGS = "sub=8,centroids=256"
TEXT = f"vecinfer:{SETTINGS},artifact={FILE}"


@pytest.fixture(scope="module")
def model() -> Any:
    return load(MODEL_PATH)


@pytest.fixture(scope="module")
def again(tmp_path_factory: Any) -> Path:
    """The documented command, with a file of its own to write."""
    command = (__doc__ or "").partition("vq calibrate")[2].partition("\n\n")[0].replace("\\\n", " ")
    words = shlex.split(command)
    out = tmp_path_factory.mktemp("made") / "demo.vqa"
    words[words.index("--text") + 1] = str(MODEL_PATH.parent / "prompt.txt")  # wherever it is installed
    words[words.index("--out") + 1] = str(out)
    done = CliRunner().invoke(app, ["calibrate", *words])
    assert done.exit_code == 0, done.output
    return out


def test_the_file_is_small_and_of_the_model_that_ships(model: Any) -> None:
    file = artifact.read(FILE)
    assert FILE.stat().st_size < 60_000 and file.model == identity(model[0])
    assert file.settings == f"{SETTINGS},codebooks=shared,mean=false" and len(file.entries) == 6
    assert (file.learnt["tokens"], file.learnt["rounds"]) == (1848, 8)


def test_it_can_be_made_again(again: Path, model: Any) -> None:
    """Byte for byte on one machine.  Others add in another order, and a vector between two centroids may go to the
    other one, so of the committed file the error on keys and values of other text is compared, to 2%."""
    first, second = artifact.read(FILE), artifact.read(again)
    assert (first.model, first.settings, first.learnt) == (second.model, second.settings, second.learnt)
    tokens = model[1].encode(heldout_text()[:600])
    held: dict[tuple[int, Side], mx.array] = {}
    list(observe(model[0], tokens, lambda layer, side, x: held.update({(layer, side): x}), context=600, step=600))
    assert set(first.entries) == set(second.entries)
    for place in first.entries:
        a, b = first.entries[place], second.entries[place]
        if place.side == "keys":
            assert np.allclose(a["smooth"], b["smooth"], rtol=1e-2)
        x = held[place.layer, place.side]  # type: ignore[index]
        errors = []
        for path in (FILE, again):
            ctx = PrepareContext(
                side=place.side, kv_heads=2, key_dim=64, value_dim=64, dtype="float16", layer=place.layer,  # type: ignore[arg-type]
                model=first.model,
            )  # fmt: skip
            bound = binding.bind(f"vecinfer:{SETTINGS},artifact={path}", ctx)
            wide = x.astype(mx.float32)
            errors.append(float((round_trip(bound, x) - wide).square().sum() / wide.square().sum()))
        assert errors[1] == pytest.approx(errors[0], rel=0.02) and errors[0] < 0.6, (place, errors)


def test_the_model_reads_on_from_its_own_constants(model: Any, tmp_path: Path) -> None:
    """Teacher-forced, all packed history read from codes: near the fp16 cache, and far nearer than from constants that
    are another layer's."""
    loaded, tokenizer = model
    tokens = tokenizer.encode(heldout_text()[:690])
    swapped = tmp_path / "swapped.vqa"
    file = artifact.read(FILE)
    turned = {p: file.entries[artifact.Place(2 - (p.layer or 0), p.side, 2, 64)] for p in file.entries}
    artifact.write(swapped, artifact.Learnt(file.method, file.settings, file.model, file.learnt, turned))
    caches = []
    for path in (FILE, swapped):
        with compressed(loaded, method=f"vecinfer:{SETTINGS},artifact={path}", residual=64) as handle:
            caches.append(handle.make_cache())
    with compressed(loaded, method=TEXT) as handle:
        good, wrong = divergences(loaded, tokens, handle.plain_cache(), caches, prefill=640)
    assert good.packed_share > 0.8 and good.tokens >= 40
    assert good.kl < 0.03 and good.kl < wrong.kl / 10, (good, wrong)
    assert good.perplexity < 1.1 * good.reference_perplexity


def test_a_saved_cache_goes_on_with_its_artifact_and_with_no_other(model: Any, tmp_path: Path) -> None:
    loaded, tokenizer = model
    path, saved = tmp_path / "a.vqa", tmp_path / "saved.vq"
    path.write_bytes(FILE.read_bytes())
    with compressed(loaded, method=f"vecinfer:{SETTINGS},artifact={path}", residual=32) as handle:
        caches = handle.make_cache()
        mx.eval(loaded(mx.array([tokenizer.encode(heldout_text()[:200])]), cache=caches))
        vq_core.save_cache(saved, caches, model=handle)
        again = vq_core.load_cache(saved, model=handle)
        for one, two in zip(caches, again, strict=True):
            assert np.array_equal(np.array(one.decode()[0]), np.array(two.decode()[0]))
    file = artifact.read(path)
    artifact.write(
        path, artifact.Learnt(file.method, file.settings, file.model, {**file.learnt, "seed": 1}, file.entries)
    )
    with pytest.raises(FormatError, match=r"packed with the artifact of SHA-256 .*put the file back"):
        vq_core.load_cache(saved)


def test_a_saved_cache_goes_on_with_a_copy_of_its_artifact(model: Any, tmp_path: Path) -> None:
    """In another process too: what is compared is what is in the file, not where it lies."""
    loaded, tokenizer = model
    path, copy, saved = tmp_path / "a.vqa", tmp_path / "b c" / "copy.vqa", tmp_path / "saved.vq"
    path.write_bytes(FILE.read_bytes())
    with compressed(loaded, method=f"vecinfer:{SETTINGS},artifact={path}", residual=32) as handle:
        caches = handle.make_cache()
        mx.eval(loaded(mx.array([tokenizer.encode(heldout_text()[:200])]), cache=caches))
        vq_core.save_cache(saved, caches, model=handle)
    copy.parent.mkdir()
    path.rename(copy)
    method = f"vecinfer:{SETTINGS},artifact={quote(str(copy))}"
    with compressed(loaded, method=method, residual=32) as handle:
        again = vq_core.load_cache(saved, model=handle)
        for one, two in zip(caches, again, strict=True):
            assert (
                two.policy.keys.settings.artifact == str(copy) == unquote(two.report().keys.partition("artifact=")[2])
            )
            assert np.array_equal(np.array(one.decode()[0]), np.array(two.decode()[0]))
        vq_core.save_cache(saved, again, model=handle)
        assert len(vq_core.load_cache(saved, model=handle)) == 3
    with (
        compressed(loaded, method=method.replace("sub=8", "sub=8,codebooks=shared"), residual=16) as handle,
        pytest.raises(FormatError, match="residual 32 in the file, 16 in the model") as caught,
    ):
        vq_core.load_cache(saved, model=handle)
    assert "SHA-256" not in str(caught.value) and "keys" not in str(caught.value)
    file = artifact.read(copy)
    artifact.write(
        path, artifact.Learnt(file.method, file.settings, file.model, {**file.learnt, "seed": 1}, file.entries)
    )
    with (
        compressed(loaded, method=f"vecinfer:{SETTINGS},artifact={path}", residual=32) as handle,
        pytest.raises(
            FormatError, match=r"keys were packed with the artifact of SHA-256 .*, .*a\.vqa.* of the model is"
        ),
    ):
        vq_core.load_cache(saved, model=handle)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_what_is_far_away(side: Side) -> None:
    """One loud channel: in the stored basis never farther away than zeros; in keys themselves it may be, by README."""
    x = mx.broadcast_to((mx.eye(64) * 5)[None, None], (1, 2, 64, 64)).astype(mx.float16)
    worst = 0.0
    for layer in range(3):
        ctx = PrepareContext(side, 2, 64, 64, "float16", layer, model=artifact.read(FILE).model)
        bound = binding.bind(TEXT, ctx, kernels="off")
        stored, got = bound.state.stored(x, {}), bound.state.unit(pack(bound, x))
        assert ((got - stored).square().sum(-1) <= stored.square().sum(-1) * (1 + 1e-5)).all()
        worst = max(worst, float(np.array((round_trip(bound, x) - x).square().sum(-1) / 25).max()))
    assert worst <= 1 + 1e-3 if side == "values" else 1.5 < worst < 2.6, worst


def test_another_model_is_refused(model: Any) -> None:
    other, _ = load(MODEL_PATH)
    with pytest.raises(SettingsError, match=r"layer 0.*is of the model llama .*, not of llama "):
        norm = other.model.norm
        norm.weight = norm.weight * 2
        vq_core.compress(other, method=TEXT)


class TestDemoArtifact(ProtocolConformance):
    """The kit's caches as layer 1 of the model that ships, with its own constants: 2 heads of 64."""

    method = TEXT

    def context(self, side: Side, heads: int | None = None, dim: int | None = None, dtype: str = "float16") -> Any:
        """Of layer 1 of the model."""
        ctx = super().context(side, heads, dim, dtype)
        return PrepareContext(side, ctx.kv_heads, ctx.key_dim, ctx.value_dim, dtype, 1, model=artifact.read(FILE).model)

    def cache(self, text: str | None = None, *, residual: int = 64, **options: Any) -> Any:
        """Of layer 1 of the model."""
        policy = vq_core.cache.policy.LayerPolicy.make(**self.policy(text), residual=residual, **options)
        return vq_core.PackedKVCache.from_policy(policy, layer=1, model=artifact.read(FILE).model)
