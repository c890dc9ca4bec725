"""Models of which some layers attend to a window or within chunks."""

from __future__ import annotations

from typing import Any

WINDOWS: dict[str, dict[str, Any]] = {
    # Layers [full, window 32, window 32, full], case 32.
    "llama_windows": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 32,
    },
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
    # The last two layers read the caches of the two before them; the wrapper keeps the text part in language_model.
    "gemma3n": {
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 6,
            "intermediate_size": 96,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "sliding_window": 16,
            "vocab_size_per_layer_input": 101,
            "hidden_size_per_layer_input": 16,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5] + [0.0] * 5,
            "altup_num_inputs": 3,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    },
    # Heads of 32 in windows and of 64 elsewhere; the last two layers are given the keys and values of earlier ones.
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "global_head_dim": 64,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "vocab_size_per_layer_input": 101,
            "hidden_size_per_layer_input": 16,
        },
    },
    # The text part alone; full-attention layers store one product as keys and as values.
    "gemma4_text": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "global_head_dim": 64,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "vocab_size_per_layer_input": 101,
        "hidden_size_per_layer_input": 0,
    },
    # No positions in the full layers, windows in the others.
    "cohere2": {
        "model_type": "cohere2",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "logit_scale": 1.0,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    # Keys of 32 and values of 16; windows with learned sinks, one full layer with them.
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 3,
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": True,
        "sliding_window_size": 16,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_shared_experts": None,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 5000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
        "swa_head_dim": 32,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.7,
    },
    # Three layers attend within chunks of 32 tokens, the fourth to everything.
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    # Three windows, one full layer.
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 16},
    "exaone4": {
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "sliding_window": 16,
        "sliding_window_pattern": "LG",
    },
    # Two passes through the layers: the second reads the first's keys and values beside a window of its own.
    "iquestloopcoder": {"model_type": "iquestloopcoder", "loop_window_size": 16},
}
