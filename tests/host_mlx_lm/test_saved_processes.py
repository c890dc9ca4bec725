"""Saved in one process, loaded in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MODELS = f"import sys; sys.path.insert(0, {str(HERE.parents[1])!r})\n"


def child(*arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, cwd=os.sep)
    assert (done.returncode != 0) is fails, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process saved."""
    made = tmp_path_factory.mktemp("saved")
    child(str(HERE / "saved_cases.py"), "save", str(made))
    return made


def test_the_next_50_tokens_in_another_process(folder: Path) -> None:
    """Cases 23 and 25: bit-equal logits to those of the unsaved caches, through our file and through mlx-lm's."""
    found = json.loads(child(str(HERE / "saved_cases.py"), "load", str(folder)).stdout)
    # 11 cases, and one with our caches as children of lists, by two routes.
    assert found == {"compared": 12 * 2, "wrong": []}


LOAD = "caches = load_prompt_cache({path!r})\nprint([type(c).__name__ for c in caches], caches[0].offset)\n"


def test_mlx_lm_imported_first(folder: Path) -> None:
    path = str(folder / "kivi4.safetensors")
    code = "from mlx_lm.models.cache import load_prompt_cache\nimport vq_core\n" + LOAD.format(path=path)
    assert child("-c", code).stdout.strip() == "['PackedKVCache', 'PackedKVCache'] 150"


def test_without_vq_core_it_fails_loudly(folder: Path) -> None:
    """A process that does not import vq_core must not take the file for something else."""
    path = str(folder / "kivi4.safetensors")
    code = "from mlx_lm.models.cache import load_prompt_cache\n" + LOAD.format(path=path)
    assert child("-c", code, fails=True).stderr.strip().endswith("KeyError: 'PackedKVCache'")


CACHE_PROMPT = """
import runpy, sys
import mlx.core as mx
import mlx_lm.utils
import vq_core
plain = mlx_lm.utils.load_model
def load_model(*args, **kwargs):
    model, config = plain(*args, **kwargs)
    vq_core.compress(model, method="kivi:bits=4", residual=16)
    return model, config
mlx_lm.utils.load_model = load_model
import mlx_lm.cache_prompt
sys.argv = ["cache_prompt", "--model", {model!r}, "--prompt", {prompt!r}, "--prompt-cache-file", {path!r}]
mlx_lm.cache_prompt.main()
"""
AFTER = """
import json
import mlx.core as mx
import vq_core
from mlx_lm.models.cache import load_prompt_cache
from tests.host_mlx_lm.saved_cases import continued
caches = load_prompt_cache({path!r}) if {load} else None
import mlx_lm
model, tokenizer = mlx_lm.load({model!r})
if caches is None:  # what the other process did, without a file
    from mlx_lm.generate import generate_step
    handle = vq_core.compress(model, method="kivi:bits=4", residual=16)
    caches = handle.make_cache()
    for _ in generate_step(mx.array(tokenizer.encode({prompt!r})), model, max_tokens=0, prompt_cache=caches):
        pass
else:
    from vq_core.hosts.mlx_lm import hook
    hook.install()
tokens, logits = continued(model, caches, 7)
print(json.dumps([[type(c).__name__ for c in caches], caches[0].offset, tokens, logits.tolist()]))
"""


def test_mlx_lm_s_cache_prompt_command(tmp_path: Any) -> None:
    """The file that mlx-lm's own command writes for a compressed model goes on as the caches would have."""
    from .models import save

    model, path = str(save(tmp_path / "model")), str(tmp_path / "prompt.safetensors")
    prompt = "the old harbour lay still " * 6
    child("-c", CACHE_PROMPT.format(model=model, path=path, prompt=prompt))
    code = {load: MODELS + AFTER.format(model=model, path=path, load=load, prompt=prompt) for load in (True, False)}
    loaded, unsaved = (json.loads(child("-c", code[load]).stdout) for load in (True, False))
    assert loaded[0] == ["PackedKVCache", "PackedKVCache"] and loaded[1] == len(prompt) + 50
    assert loaded == unsaved
