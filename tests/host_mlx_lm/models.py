"""Tiny random models of mlx-lm, float32, from configurations written here."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from .configurations import COMMON, CONFIGURATIONS, VOCABULARY


def configuration(name: str, **changes: Any) -> dict[str, Any]:
    """A config.json; ``changes`` of a model with a text part go to that."""
    config = copy.deepcopy(COMMON | CONFIGURATIONS[name])
    if "text_config" in config:
        config["text_config"] = COMMON | config["text_config"] | changes
    return config | changes


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, large enough that attention decides the next token."""
    from mlx_lm.utils import MODEL_REMAPPING

    config = configuration(name, **changes)
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(config['model_type'], config['model_type'])}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    tied = not any("lm_head" in path for path, _ in tree_flatten(model.parameters()))
    model.update(tree_map_with_path(functools.partial(_spread, tied=tied), model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


_QUERIES_AND_KEYS = (
    "q_proj",
    "k_proj",
    "qkv_proj",
    "q_b_proj",
    "kv_b_proj",
    "att_proj",
    "query_key_value",
    "embed_q",
    "W_pack",
)
_OUTPUTS = ("o_proj", "out_proj")
_EMBEDDINGS = ("embed_tokens", "embedding", "wte")


def _spread(path: str, weight: mx.array, tied: bool) -> mx.array:
    *_, module, name = ("", *path.split("."))
    if name in ("sinks", "attention_sink_bias", "conv_k", "conv_v"):
        return mx.random.normal(weight.shape)
    if name != "weight" or weight.ndim < 2:
        return weight
    # Queries and keys that agree with few tokens; a uniform softmax would hide a cache that loses tokens.
    if module in _QUERIES_AND_KEYS:
        return 4 * weight
    # Where the embedding is the head too, a residual stream that is mostly the token's embedding repeats the token.
    if tied and module in _EMBEDDINGS:
        return 0.4 * weight
    return (4 if tied and module in _OUTPUTS else 1.5) * weight


def prompt(n: int, seed: int = 1) -> mx.array:
    """n tokens."""
    return mx.random.randint(0, VOCABULARY, (n,), key=mx.random.key(seed))


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if quiet is defined and quiet %}[quiet]{% endif %}{% endif %}"
)
"""A chat template of the usual shape: a head, the content, the end token, a line break."""


def save(
    folder: Path, name: str = "llama", dtype: mx.Dtype = mx.float32, chat_template: str | None = None, **changes: Any
) -> Path:
    """A model of 256 bytes and an end token in mlx-lm's format: config.json, model.safetensors, tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = COMMON | CONFIGURATIONS[name] | {"vocab_size": 257, "eos_token_id": 256} | changes
    model = build(name, **{key: value for key, value in config.items() if key != "eos_token_id"})
    (folder / "config.json").write_text(json.dumps(config))
    weights = {key: value.astype(dtype) for key, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if chat_template is not None:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": chat_template
        }  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
