"""What a process does that saves caches, and one that loads them: ``python saved_cases.py save|load FOLDER``.

Each case is a model, its options for ``compress`` and a prompt. Saving also stores what the unsaved caches give for
the next 50 tokens; loading goes on from the files, ours and mlx-lm's, and prints what differs.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.host_mlx_lm.models import CONFIGURATIONS, build, prompt

STEPS = 50
METHODS = ("identity", "sign_sketch", "centred")

CONFIGURATIONS.setdefault(
    "falcon_h1",
    {
        "model_type": "falcon_h1", "mamba_d_ssm": 32, "mamba_d_head": 16, "mamba_n_heads": 2, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
)  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "kivi4": ("llama", {"method": "kivi:bits=4", "residual": 16}, 150),
    "kivi2_sinks": ("llama", {"method": "kivi:bits=2", "residual": 16, "sink_tokens": 4}, 150),
    "case25": ("llama", {"method": "kivi:bits=4"}, 284),
    "identity": ("qwen3", {"method": "identity", "residual": 16}, 90),
    "sign_sketch": ("llama", {"keys": "sign_sketch", "values": "kivi:bits=4", "residual": 16, "sink_tokens": 4}, 150),
    "centred": ("qwen2", {"method": "centred", "residual": 16}, 150),
    "windows": ("llama_windows", {"method": "kivi:bits=4", "residual": 16}, 150),
    "recurrent": ("jamba", {"method": "kivi:bits=4", "residual": 16}, 150),
    "lists": ("falcon_h1", {"method": "kivi:bits=4", "residual": 16}, 90),
    "shared": ("afm7", {"method": "centred", "residual": 16}, 90),
    "empty": ("llama_windows", {"method": "kivi:bits=2", "residual": 16}, 0),
}


def continued(model: Any, caches: list[Any], token: int) -> tuple[list[int], mx.array]:
    """The next tokens, the most likely each time, and their logits."""
    tokens, rows = [], []
    for _ in range(STEPS):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        mx.eval(logits)
        token = int(mx.argmax(logits))
        tokens.append(token)
        rows.append(logits)
    return tokens, mx.stack(rows)


def with_packed_children(caches: list[Any]) -> list[Any]:
    """Lists of caches whose plain cache is one of ours, put there by hand."""
    from mlx_lm.models.cache import CacheList, KVCache

    from vq_core import PackedKVCache

    def changed(cache: Any) -> Any:
        if type(cache) is not CacheList:
            return cache
        made = [PackedKVCache(method="kivi:bits=4", residual=16) if type(c) is KVCache else c for c in cache.caches]
        return CacheList(*made)

    return [changed(cache) for cache in caches]


def prepared(case: str) -> tuple[Any, Any, mx.array]:
    import vq_core

    name, options, length = CASES[case]
    model = build(name)
    return model, vq_core.compress(model, **options), prompt(max(1, length))[:length]


def save(folder: Path) -> None:
    from mlx_lm.models.cache import save_prompt_cache

    import vq_core

    for case in CASES:
        model, handle, tokens = prepared(case)
        kinds = {"": handle.make_cache()}
        if case == "lists":
            kinds["_by_hand"] = with_packed_children(handle.plain_cache())
        for kind, caches in kinds.items():
            if tokens.size:
                mx.eval(model(tokens[None], cache=caches))
            # A cache by hand is not the handle's: it is the model's by its shapes alone.
            vq_core.save_cache(folder / f"{case}{kind}.vq", caches, model=None if kind else handle)
            save_prompt_cache(str(folder / f"{case}{kind}.safetensors"), caches)
            found, logits = continued(model, caches, 7)
            mx.save_safetensors(
                str(folder / f"{case}{kind}.want.safetensors"), {"logits": logits, "tokens": mx.array(found)}
            )
        handle.undo()


def load(folder: Path) -> None:
    from mlx_lm.models.cache import load_prompt_cache

    import vq_core

    wrong: list[str] = []
    compared = 0
    # Nothing has been compressed in this process yet: mlx-lm finds our class because vq_core was imported.
    stored = load_prompt_cache(str(folder / "kivi4.safetensors"))
    assert [type(c) for c in stored] == [vq_core.PackedKVCache] * 2 and stored[0].offset == 150
    for path in sorted(folder.glob("*.want.safetensors")):
        label = path.name.removesuffix(".want.safetensors")
        case = label.removesuffix("_by_hand")
        model, handle, _ = prepared(case)
        want = mx.load(str(path))
        loaded = {
            "mlx_lm": load_prompt_cache(str(folder / f"{label}.safetensors")),
            "ours": vq_core.load_cache(folder / f"{label}.vq", model=handle if label == case else None),
        }
        if label == case:
            made = handle.make_cache()
            assert [type(c) for c in loaded["ours"]] == [type(c) for c in made]
            for a, b in zip(loaded["ours"], made, strict=True):
                assert getattr(a, "layer", None) == getattr(b, "layer", None)
                assert getattr(a, "_strict", None) is getattr(b, "_strict", None)
            handle.adopt(loaded["ours"])
            assert handle.report().tokens()[:2] == handle.report(loaded["ours"]).tokens()[:2]
        for route, caches in loaded.items():
            if case == "case25":
                offsets = [c.offset for c in caches]
                x = mx.ones((1, 2, 1, 32))
                keys, _ = vq_core.PackedKVCache.from_state(caches[0].state).update_and_fetch(x, x)
                assert offsets == [284, 284] and keys.shape[2] == 285, (route, offsets, keys.shape)
            found, logits = continued(model, caches, 7)
            compared += 1
            if found != want["tokens"].tolist() or not mx.array_equal(logits, want["logits"]):
                wrong.append(f"{label} {route}")
            if case == "case25":
                assert [c.offset for c in caches] == [284 + STEPS] * 2
        handle.undo()
    print(json.dumps({"compared": compared, "wrong": wrong}))


def main(what: str, folder: str) -> None:
    from vq_core.testing import load_plugin, registered

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(registered(load_plugin(Path(__file__).parent.parent / "methods" / f"{name}.py")))
        {"save": save, "load": load}[what](Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
