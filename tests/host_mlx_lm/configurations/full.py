"""Models whose every layer attends to everything."""

from __future__ import annotations

from typing import Any

FULL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
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
    # mlx-lm reads it as llama.
    "mistral": {"model_type": "mistral"},
    "mistral3": {"model_type": "mistral3", "text_config": {"model_type": "llama", "num_hidden_layers": 3}},
    # Heads of 96; keys, values and queries from one product.
    "phi3": {"model_type": "phi3", "hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1},
    # One KV head for all.
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1},
    "cohere": {"model_type": "cohere", "logit_scale": 1.0, "use_qk_norm": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax": {
        "model_type": "minimax",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "rotary_dim": 16,
    },
    "nanochat": {"model_type": "nanochat", "num_key_value_heads": 4},
    "olmo2": {"model_type": "olmo2", "num_hidden_layers": 3},
    # Repeats the KV heads itself.
    "plamo": {"model_type": "plamo", "n_shared_head": 2},
    "exaone": {"model_type": "exaone", "head_dim": 16, "num_layers": 2, "layer_norm_epsilon": 1e-5},
    # No positions in every second layer.
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    },
    "glm4": {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": False, "tie_word_embeddings": False},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "num_key_value_heads": 4,
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.5,
    },
}
