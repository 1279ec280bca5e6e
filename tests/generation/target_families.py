"""Tiny random targets of many kinds: positions, windows, softcaps, scales, experts, sinks."""

import torch
from generation_helpers import plain, prompt
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
MHA = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
SLIDING = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "llama": COMMON,
    "qwen3": {**COMMON, "head_dim": 8},
    "qwen2": COMMON,
    "qwen2_sliding": {**COMMON, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "mistral": {**COMMON, "sliding_window": 7, "head_dim": 8},
    "gemma": {**COMMON, "head_dim": 8},
    "gemma2": {**COMMON, "head_dim": 8, "sliding_window": 6, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
    "gemma3_text": {**COMMON, "head_dim": 8, "sliding_window": 6, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **COMMON, "head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "layer_types": SLIDING,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    "gpt2": dict(
        vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64, initializer_range=0.2, bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
    ),
    "gpt_neox": {**MHA, "use_parallel_residual": True},
    "opt": dict(
        vocab_size=97, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, init_std=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    ),
    "phi": COMMON,
    "phi3": COMMON,
    "cohere": {**COMMON, "logit_scale": 0.25},
    "granite": {**COMMON, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "gpt_oss": {**COMMON, **MOE, "head_dim": 8, "sliding_window": 6, "layer_types": SLIDING},
    "mixtral": {**COMMON, **MOE},
    "qwen3_moe": {
        **COMMON, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "olmo2": COMMON,
    "bloom": dict(
        vocab_size=97, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.2, bos_token_id=1, eos_token_id=None,
        pad_token_id=0,
    ),
    "stablelm": COMMON,
    "starcoder2": {**COMMON, "sliding_window": 6},
    "smollm3": {**COMMON, "no_rope_layers": [1, 0, 1, 0]},
}  # fmt: skip
_MODELS = {}


def family_target(name: str):
    """A random target of a family, built once: the first one whose text is not constant."""
    model_type = name.removesuffix("_sliding")
    for seed in range(20):
        if name in _MODELS:
            return _MODELS[name]
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **{"tie_word_embeddings": False, **FAMILIES[name]})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        texts = [plain(model, prompt(11, seed=which), max_new_tokens=30)[0, 11:].tolist() for which in (3, 5)]
        if min(len(set(text)) for text in texts) > 3:
            _MODELS[name] = model
    raise AssertionError(f"every {name} gave a constant text, which hides faults of positions and rollback")
