"""Tiny random targets of about a hundred configuration classes, for the fuzzer."""

import random

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB = 97
IMAGE, VISION_START, VISION_END = 94, 95, 96  # token ids of vision-language targets
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)
EXPERTS = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)  # fmt: skip
SLIDING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2)
LATENT = dict(
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1,
    num_key_value_heads=4, head_dim=8, first_k_dense_replace=1,
)  # fmt: skip
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"] * 2,
)  # fmt: skip
SSM = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=8, mamba_n_groups=2)

# Configuration classes that COMMON and EXPERTS describe well enough.
ALIKE = [
    "afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "cohere", "cohere2_moe", "ctrl", "cwm",
    "diffllama", "doge", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "glm", "glm4",
    "glm4_moe", "gpt_bigcode", "gpt_neox_japanese", "gpt_oss", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe",
    "laguna", "llama", "mellum", "mimo_v2_flash", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "llama4_text",
    "minimax", "lfm2", "mamba", "falcon_mamba", "recurrent_gemma", "olmo_hybrid", "rwkv", "zamba", "xglm",
]  # fmt: skip
SPECIAL = {
    "bamba": {**SSM, "attn_layer_indices": [1, 3]},
    "bloom": {"n_layer": 4, "n_head": 4},
    "codegen": {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 256},
    "cohere2": {**SLIDING, "logit_scale": 0.25},
    "deepseek_v2": {**LATENT, **EXPERTS},
    "deepseek_v3": {**LATENT, **EXPERTS},
    "dots1": {**EXPERTS, **SLIDING, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "falcon_alibi": {"alibi": True, "multi_query": False},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
        "mamba_n_groups": 2,
    },
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        **SLIDING, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
        "laurel_rank": 8, "num_hidden_layers": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        **SLIDING, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
        "num_global_key_value_heads": 2,
    },
    "glm4_moe_lite": {**LATENT, **EXPERTS},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 80},
    "gpt_neo": {
        "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 6,
    },
    "gpt_neox": {"use_parallel_residual": True},
    "gptj": {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 256},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoehybrid": {
        **SSM, **EXPERTS, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": "rope",
    },
    "jamba": {
        **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **LATENT, **EXPERTS, "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2_moe": {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2},
    "minicpm3": LATENT,
    "mistral_sliding": {"sliding_window": 7},
    "mpt": {"use_cache": True},
    "nemotron_h": {
        **EXPERTS, "layers_block_type": ["mamba", "attention", "moe", "attention"], "ssm_state_size": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo3": SLIDING,
    "opt": {
        "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2, "max_position_embeddings": 80,
    },
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 8,
        "mamba_ngroups": 2, "chunk_size": 8, "num_key_value_heads": 4, "use_mamba_kernels": False, "adapter_rank": 4,
    },
}  # fmt: skip

_TEXT = {key: value for key, value in COMMON.items() if key != "head_dim"}
_VISION = dict(depth=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3, initializer_range=0.2)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_MROPE_INTERLEAVED = {**_MROPE, "mrope_interleaved": True}
_QWEN_IDS = dict(
    image_token_id=IMAGE, video_token_id=3, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END
)
_QWEN3_VISION = {
    **_VISION, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
_ROPE_QWEN35 = {**_MROPE_INTERLEAVED, "partial_rotary_factor": 1.0}
_PATCHES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16)
VISION = {
    "qwen2_vl": {
        **_QWEN_IDS, "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_VISION, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **_QWEN_IDS, "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            **_VISION, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
            "window_size": 16, "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **_QWEN_IDS, "text_config": {**COMMON, "rope_parameters": _MROPE_INTERLEAVED},
        "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        **_QWEN_IDS, "text_config": {**COMMON, **EXPERTS, "rope_parameters": _MROPE_INTERLEAVED},
        "vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {
        **_QWEN_IDS, "text_config": {**COMMON, **DELTA, "rope_parameters": _ROPE_QWEN35},
        "vision_config": _QWEN3_VISION,
    },
    "qwen3_5_moe": {
        **_QWEN_IDS, "text_config": {**COMMON, **DELTA, **EXPERTS, "rope_parameters": _ROPE_QWEN35},
        "vision_config": _QWEN3_VISION,
    },
    "llava": {
        "image_token_index": IMAGE, "image_seq_length": 16, "text_config": {"model_type": "qwen3", **COMMON},
        "vision_config": {"model_type": "clip_vision_model", **_PATCHES, "patch_size": 4},
    },
    "gemma3": {
        "image_token_index": IMAGE, "boi_token_index": VISION_START, "eoi_token_index": VISION_END,
        "mm_tokens_per_image": 4, "text_config": {**COMMON, **SLIDING},
        "vision_config": {"model_type": "siglip_vision_model", **_PATCHES, "patch_size": 4},
    },
}  # fmt: skip
# Their transformers implementation cannot go on with several tokens at once from a state, so no draft can be verified:
# the call must be refused.
CANNOT_VERIFY = {"falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "zamba"}
BEFORE_524 = Version(transformers.__version__) < Version("5.24")
if BEFORE_524:
    CANNOT_VERIFY.add("falcon_h1")
TARGETS = sorted([*ALIKE, *SPECIAL, *VISION])
_RENAMED = {"falcon_alibi": "falcon", "mistral_sliding": "mistral", "qwen2_sliding": "qwen2"}
_BUILT: dict[str, torch.nn.Module] = {}


def available(name: str) -> bool:
    """Whether this transformers version knows the configuration class."""
    return _RENAMED.get(name, name) in CONFIG_MAPPING


def build_target(name: str):
    """A random fp32 target, built once: the first of some seeds whose text is not constant."""
    if name not in _BUILT:
        _BUILT[name] = _livelier(name)
    return _BUILT[name]


def _livelier(name: str):
    best, most = None, 0
    for seed in range(8):
        model = _random_model(name, seed)
        ids = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            text = model.generate(ids, do_sample=False, max_new_tokens=24)[:, 9:]
        distinct = min(len(set(row)) for row in text.tolist())
        if distinct > most:
            best, most = model, distinct
        if most >= 8:
            break
    return best


def _random_model(name: str, seed: int):
    torch.manual_seed(seed)
    model_type = _RENAMED.get(name, name)
    if name in VISION:
        config = AutoConfig.for_model(model_type, **VISION[name], tie_word_embeddings=False)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        options = {**COMMON, **(EXPERTS if name in ALIKE else SPECIAL[name])}
        if name in ("falcon", "falcon_alibi"):
            del options["head_dim"]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def image_inputs(name: str, ids: torch.LongTensor, mask: torch.LongTensor, seed: int) -> dict:
    """`ids [b, L]` of a vision-language target with one image put in front of each row's text, as a processor would."""
    generator = torch.Generator().manual_seed(seed)
    qwen = name.startswith("qwen")
    batch = ids.shape[0]
    grids = [(1, *random.Random(seed + row).choice([(4, 4), (4, 2), (2, 4)])) for row in range(batch)]
    counts = [rows * columns // 4 for _, rows, columns in grids] if qwen else [16 if name == "llava" else 4] * batch
    width = ids.shape[1] + max(counts) + 2
    new_ids, new_mask = torch.zeros(batch, width, dtype=torch.long), torch.zeros(batch, width, dtype=torch.long)
    for row, count in enumerate(counts):
        text = ids[row][mask[row].bool()]
        image = torch.tensor([VISION_START, *[IMAGE] * count, VISION_END])
        new_ids[row, width - len(text) - len(image) :] = torch.cat([image, text])
        new_mask[row, width - len(text) - len(image) :] = 1
    types = (new_ids == IMAGE).long()
    inputs = {"input_ids": new_ids, "attention_mask": new_mask}
    if not qwen:
        inputs["pixel_values"] = torch.randn(batch, 3, 16, 16, generator=generator)
        return {**inputs, "token_type_ids": types} if name == "gemma3" else inputs
    patches = sum(rows * columns for _, rows, columns in grids)
    return {
        **inputs,
        "mm_token_type_ids": types,
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor(grids),
    }
