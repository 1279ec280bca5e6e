"""Attention of a draft layer, from a block to the context and to the block itself, and its rotary tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dflash import DFlashConfig
from .draft_cache import DraftCache
from .masks import BlockMasks


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary tables whose inverse frequencies stay in fp32 when the model is cast (rounding them costs 3e-2)."""

    def _apply(self, fn, recurse: bool = True):
        exact = {name: getattr(self, name) for name in ("inv_freq", "original_inv_freq")}
        super()._apply(fn, recurse)
        for name, value in exact.items():
            if not value.is_meta:
                setattr(self, name, value.to(device=getattr(self, name).device))
        return self


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of `states [b, heads, n, head_dim]` with `cos`, `sin` of shape [b, n, head_dim]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return states * cos + rotate_half(states) * sin


class DFlashAttention(nn.Module):
    """Attention from the block to the cached context, the new context rows and the block itself."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.layer_is_causal(layer_idx)
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.window_rule = config.window_rule
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_and_values(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values `[b, kv_heads, n, head_dim]` of `states [b, n, H]`."""
        heads = (-1, self.head_dim)
        keys = self.k_norm(self.k_proj(states).unflatten(-1, heads)).transpose(1, 2)
        values = self.v_proj(states).unflatten(-1, heads).transpose(1, 2)
        return rotate(keys, cos, sin), values

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        masks: BlockMasks,
        cache: Any,
    ) -> torch.Tensor:
        """`block [b, B, H]` (normed) and `context [b, n, H]` -> `[b, B, H]`."""
        cos, sin = position_embeddings
        length = block.shape[1]
        shape = (*block.shape[:-1], -1, self.head_dim)
        queries = self.q_norm(self.q_proj(block).view(shape)).transpose(1, 2)
        queries = rotate(queries, cos[:, -length:], sin[:, -length:])
        keys, values = self.keys_and_values(torch.cat([context, block], dim=1), cos, sin)
        if cache is not None:
            more = {"block_length": length} if isinstance(cache, DraftCache) else {}
            keys, values = cache.update(keys, values, self.layer_idx, **more)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(masks.implementation, eager_attention_forward)
        output, _ = attention(
            self,
            queries,
            keys,
            values,
            masks.of_layer(self, num_keys=keys.shape[2]),
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
        )
        return self.o_proj(output.reshape(*block.shape[:-1], -1))
