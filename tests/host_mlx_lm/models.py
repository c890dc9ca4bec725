"""Tiny random models of mlx-lm, float32, from configurations written here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

VOCABULARY = 101

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "head_dim": 32,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    # Layers [full, window 32, window 32, full], case 32.
    "llama_windows": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 32,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    # Every third layer attends to everything, the others to a window.
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 32,
    },
    # Learned sinks, and windows in every other layer.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # A Mamba layer, an attention layer.
    "jamba": {
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
    # Latent attention: the cache holds a latent, from which keys and values are derived after the fetch.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    # Casts keys to float32 after the fetch.
    "stablelm": {
        "model_type": "stablelm",
        "use_qkv_bias": False,
        "partial_rotary_factor": 0.25,
        "layer_norm_eps": 1e-5,
    },
    # Caps the scores, so it multiplies keys and values itself.
    "gemma2": {"model_type": "gemma2"},
    # The last two layers read the keys and values of the layer before them.
    "afm7": {
        "model_type": "afm7",
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    # Shapes of case 11.
    "llama_wide": {
        "model_type": "llama",
        "hidden_size": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
    },
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, large enough that attention decides the next token."""
    config = _COMMON | CONFIGURATIONS[name] | changes
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(_spread, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _spread(path: str, weight: mx.array) -> mx.array:
    if path.endswith("sinks"):
        return mx.random.normal(weight.shape)
    # Queries and keys that agree with few tokens; a uniform softmax would hide a cache that loses tokens.
    if path.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
        return 4 * weight
    return 1.5 * weight if path.endswith("weight") and weight.ndim > 1 else weight


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
    config = _COMMON | CONFIGURATIONS[name] | {"vocab_size": 257, "eos_token_id": 256} | changes
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
