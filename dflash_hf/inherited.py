"""What the configuration of a new drafter takes over from its target's."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


def target_embedding_scale(text: PreTrainedConfig) -> float:
    """What the embedding module of a target with this text config multiplies its rows by."""
    multiplier = getattr(text, "embedding_multiplier", None)  # Granite and its hybrids
    if multiplier is not None:
        return float(multiplier)
    if text.model_type.startswith(("gemma", "recurrent_gemma")):  # the module multiplies by sqrt(H), no key says so
        return float(text.hidden_size) ** 0.5
    return 1.0


def attention_geometry(text: PreTrainedConfig) -> tuple[int, int, int]:
    """Attention heads, key-value heads and head size of the target's first layer; Gemma 4's global layers differ."""
    first = text.per_layer_config[0] if text.is_heterogeneous else text
    # A target without attention (Mamba) says nothing of heads: the usual width.
    heads = getattr(first, "num_attention_heads", None) or max(text.hidden_size // 128, 1)
    kv_heads = getattr(first, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(first, "head_dim", None) or text.hidden_size // heads


def drafter_rope_parameters(text: PreTrainedConfig) -> dict[str, Any]:
    """The target's RoPE parameters as a drafter uses them: whole heads, plain positions, scaling kept."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if nested:  # one entry a layer type (Gemma 3): the global layers' parameters see the whole context
        rope = dict(rope.get("full_attention") or nested[0])
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type"):
        rope.pop(key, None)
    if rope.get("rope_type") in ("mrope", "proportional"):
        rope["rope_type"] = "default"
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None) or 10000.0)
    return rope
