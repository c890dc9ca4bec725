"""Tiny configurations of mlx-lm's architectures, written here, and what becomes of each one's caches.

``PLACES`` has one letter a cache; a layer that keeps its caches in a list has a ``+`` after the first:

- P: packed, read packed.  D: packed, read densely.  L: packed, single tokens read a latent's codes, the rest densely.
- F: a sliding window that another layer fetches again, native.
- W and a number: a sliding window of so many tokens.  C: attention in chunks.  A: recurrent state.  These stay the
  model's own.
- I, O: an index of keys beside keys and values, told by values without width or by values that the model writes over.
"""

from __future__ import annotations

from typing import Any

from .full import FULL
from .hybrid import HYBRID
from .latent import LATENT
from .windows import WINDOWS

VOCABULARY = 101

COMMON = {
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

CONFIGURATIONS: dict[str, dict[str, Any]] = FULL | WINDOWS | HYBRID | LATENT

PLACES: dict[str, str] = {
    "afm7": "P P",
    "baichuan_m1": "A+P A+W16 A+P",
    "cohere": "P P",
    "cohere2": "W16 P W16 P",
    "deepseek_v2": "P P",
    "deepseek_v3": "L L",
    "deepseek_v32": "D+O D+O",
    "ernie4_5": "P P",
    "exaone": "P P",
    "exaone4": "W16 P W16 P",
    "falcon_h1": "A+P A+P",
    "gear": "D W16 A D",
    "gemma": "P P",
    "gemma2": "D D",
    "gemma3": "W16 W16 P W16 W16 P",
    "gemma3n": "W16 P F16 P",
    "gemma4": "W16 P W16 P",
    "gemma4_text": "W16 P W16 P",
    "glm4": "P P",
    "gpt_neox": "P P",
    "gpt_oss": "W16 P W16 P",
    "granitemoehybrid": "A P A",
    "iquestloopcoder": "P P W16 W16",
    "jamba": "A P",
    "lfm2": "A P A",
    "llama": "P P",
    "llama4": "C C C P",
    "llama_wide": "P P",
    "llama_windows": "P W32 W32 P",
    "longcat_flash": "L+L L+L",
    "mimo_v2_flash": "P W16 P",
    "minicpm3": "P P",
    "minimax": "P P",
    "minimax_m3_vl": "P+ P+I P+I",
    "mistral": "P P",
    "mistral3": "P P P",
    "mixtral": "P P",
    "nanochat": "P P",
    "nemotron_h": "A P P",
    "olmo2": "P P P",
    "olmo3": "W16 W16 W16 P",
    "phi3": "P P",
    "plamo": "D D",
    "plamo2": "A P A P",
    "qwen2": "P P",
    "qwen3": "P P",
    "qwen3_moe": "P P",
    "qwen3_next": "A P A P",
    "smollm3": "P P P P",
    "stablelm": "D D",
}
