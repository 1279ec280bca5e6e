"""Gemma 4's decoder layer as a draft layer: DeepSpec's drafters for Gemma 4 targets have it.

Other norms than Qwen3's, around each sublayer and on the values, scores that are not scaled, and as a rule values from
the projection of the keys. Context and block meet as in every draft layer. Source: Gemma 4 in transformers 5.24, and
`Gemma4DSparkModel` in vLLM 0.33.0.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from .attention import DFlashAttention, rotate
from .configuration_dflash import DFlashConfig
from .masks import BlockMasks


class Gemma4DraftAttention(DFlashAttention):
    """Attention of a draft layer with Gemma 4's norms and, with `attention_k_eq_v`, without a projection of values."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scaling = 1.0  # the query norm's weight has taken it over
        self.q_norm = Gemma4RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Gemma4RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.v_norm = Gemma4RMSNorm(config.head_dim, eps=config.rms_norm_eps, with_scale=False)
        if config.attention_k_eq_v:
            self.v_proj = None

    def keys_and_values(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values (normed) `[b, kv_heads, n, head_dim]` of `states [b, n, H]`."""
        heads = (-1, self.head_dim)
        projected = self.k_proj(states).unflatten(-1, heads)
        values = projected if self.v_proj is None else self.v_proj(states).unflatten(-1, heads)
        return rotate(self.k_norm(projected).transpose(1, 2), cos, sin), self.v_norm(values).transpose(1, 2)


class Gemma4DraftLayer(GradientCheckpointingLayer):
    """One draft layer of Gemma 4's kind: a norm before and after each sublayer, then a factor for the whole layer."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Gemma4DraftAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalars else None)

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        masks: BlockMasks,
        cache: Any,
    ) -> torch.Tensor:
        """`block [b, B, H]`, `context [b, n, H]` -> `[b, B, H]`."""
        attended = self.self_attn(self.input_layernorm(block), context, position_embeddings, masks, cache)
        block = block + self.post_attention_layernorm(attended)
        block = block + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(block)))
        return block if self.layer_scalar is None else block * self.layer_scalar
