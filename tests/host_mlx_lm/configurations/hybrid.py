"""Models with recurrent or convolutional state in some or all layers."""

from __future__ import annotations

from typing import Any

HYBRID: dict[str, dict[str, Any]] = {
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
    # Mamba 2, attention, Mamba 2.
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "attention_bias": False,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
    },
    # Layers that mix nothing along tokens have no cache: five layers, three caches.
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": ["M", "-", "*", "-", "*"],
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    },
    # Mamba 2 and attention side by side in every layer.
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "attention_out_multiplier": 1.0,
        "key_multiplier": 1.0,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 1.0,
        "ssm_out_multiplier": 0.5,
    },
    # Caps the scores of its full layers; windows and short convolutions in between.
    "gear": {
        "model_type": "gear",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "conv_mixer", "full_attention"],
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "attn_logit_softcapping": 50.0,
    },
    # Mamba, attention.
    "plamo2": {
        "model_type": "plamo2",
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
    },
    # Gated delta rule, attention.
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    # A convolution of keys and values beside each cache; the second layer has a window.
    "baichuan_m1": {
        "model_type": "baichuan_m1",
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "sliding_window_layers": [1],
        "conv_window": 2,
    },
    # Short convolutions, attention.
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}
