"""`DFlashDraftModel`: the drafter's forward pass, and nothing about decoding or training.

Block diffusion conditioned on the target's hidden states (DFlash, arXiv 2602.06036). Every draft layer attends from the
block to the context features of the positions before the anchor and to the block itself; the context is projected to
keys and values by each layer but never passes through its input norm or MLP. Parameter names are z-lab's, so a
checkpoint in their layout is this model's state dict.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import cached_file

from .checkpoints import FAMILIES, name_on_disk
from .configuration_dflash import DFlashConfig
from .convolution import GroupedDynamicConvolution
from .correction_heads import CandidateSelector, ConfidenceHead, GRUCorrection, MarkovHead
from .draft_cache import DraftCache
from .errors import DFlashError
from .loading import read_published_names, require_complete, require_consistent, tensor_names
from .masks import BlockMasks, LayerMasks

# GenerationStats of each drafter's latest call; a thread's own, and gone with it.
_LATEST = threading.local()

# What of a drafter's generation_config is its own; special tokens are the target's business.
_DRAFTING_KNOBS = {
    "block_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
}


# Keywords of from_pretrained that say where files lie.
_HUB_KEYWORDS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")


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
            keys, values = cache.update(keys, values, self.layer_idx)
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


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """One draft layer: attention over context and block, then a SwiGLU MLP on the block."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        has_convolutions = config.conv_kernel_size is not None
        self.attention_conv = GroupedDynamicConvolution(config) if has_convolutions else None
        self.mlp_conv = GroupedDynamicConvolution(config) if has_convolutions else None

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        masks: BlockMasks,
        cache: Any,
    ) -> torch.Tensor:
        """`block [b, B, H]`, `context [b, n, H]` -> `[b, B, H]`."""
        normed = self.input_layernorm(block)
        if self.attention_conv is None:
            block = block + self.self_attn(normed, context, position_embeddings, masks, cache)
            return block + self.mlp(self.post_attention_layernorm(block))
        normed, kernel = self.attention_conv.before(normed)
        attended = self.self_attn(normed, context, position_embeddings, masks, cache)
        block = block + self.attention_conv.after(attended, kernel)
        normed, kernel = self.mlp_conv.before(self.post_attention_layernorm(block))
        return block + self.mlp_conv.after(self.mlp(normed), kernel)


class DFlashPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about the drafter."""

    config_class = DFlashConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = False

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # A new DFlash 2 drafter starts as the plain one: identity convolutions, a selector without an opinion.
        if isinstance(module, GroupedDynamicConvolution):
            init.zeros_(module.base_kernel)
            init.ones_(module.base_kernel[:, 0])
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            init.zeros_(module.successor_codebook)

    def _supports_logits_to_keep(self) -> bool:
        # transformers asks an assistant this only where the package's gate is not installed.
        raise DFlashError("generate does not know DFlash drafters yet. Call dflash_hf.install() first.")


class DFlashDraftModel(DFlashPreTrainedModel):
    """A DFlash drafter. As a rule it has no embedding and no output head: it borrows the target's.

    Use it as `target.generate(..., assistant_model=drafter)`, or train one with `DFlashTrainer`.

    Attributes:
        generation_config: transformers' `GenerationConfig`. `block_size` on it runs the drafter with a smaller block
            than it was trained with.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        config.check()
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self._add_tables(config)
        self._add_corrections(config)
        self.gradient_checkpointing = False
        self.generation_config = GenerationConfig()
        # A Trainer's resume reads the saved file into the model as it is.
        self.register_load_state_dict_pre_hook(read_published_names)
        self.post_init()

    def _add_tables(self, config: DFlashConfig) -> None:
        rows, width = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(rows, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.draft_vocab_size or rows, bias=False) if config.own_head else None
        # speculators' names: offsets from draft to target ids, and the target ids that the draft vocabulary has.
        trimmed = config.draft_vocab_size
        self.register_buffer("d2t", None if trimmed is None else torch.zeros(trimmed, dtype=torch.int64))
        self.register_buffer("t2d", None if trimmed is None else torch.zeros(rows, dtype=torch.bool))

    def _add_corrections(self, config: DFlashConfig) -> None:
        self.candidate_selector = CandidateSelector(config) if config.selector_rank is not None else None
        self.markov_head = MarkovHead(config) if config.markov_rank is not None else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.prefix_gru = self.embed_proj = None
        if config.gru_hidden_dim is not None:
            self.prefix_gru = nn.GRU(config.hidden_size, config.gru_hidden_dim, batch_first=True, bias=False)
            self.embed_proj = nn.Sequential(
                nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
                nn.SiLU(),
                nn.Linear(config.emb_dim, config.vocab_size, bias=False),
            )

    def correction(self) -> CandidateSelector | MarkovHead | GRUCorrection | None:
        """The head that corrects draft logits by the tokens chosen before, if the drafter has one."""
        if self.prefix_gru is not None:
            return GRUCorrection(self.prefix_gru, self.embed_proj, self.config.pure_draft_prefix_len)
        return self.candidate_selector if self.candidate_selector is not None else self.markov_head

    @property
    def last_generation_stats(self):
        """`GenerationStats` of this thread's latest `generate` call with this drafter; None before the first."""
        return getattr(_LATEST, "stats", {}).get(self)

    def keep_generation_stats(self, stats: Any) -> None:
        """Make `stats` this thread's latest; called at the end of a `generate` call."""
        if not hasattr(_LATEST, "stats"):
            _LATEST.stats = weakref.WeakKeyDictionary()
        _LATEST.stats[self] = stats

    def new_cache(self) -> DraftCache:
        """An empty cache for context keys and values."""
        return DraftCache(num_layers=self.config.num_hidden_layers)

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | LayerMasks | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> BaseModelOutput:
        """Hidden states of a block of draft slots.

        Args:
            noise_embeds: `[b, B, H]`, target embeddings of the anchor and B - 1 mask tokens.
            context_hidden_states: `[b, n, K * H_t]`, the target's tapped states of the positions that are not in the
                cache yet, concatenated over the taps; n may be 0.
            position_ids: `[b, n + B]`, absolute positions of the new context rows, then of the block. By default they
                follow the cache.
            attention_mask: None; padding of shape `[b, cached + n + B]` (1 is visible); a 4-D mask
                `[b, 1, B, cached + n + B]`, boolean (True is visible) or additive; a flex `BlockMask`; a dictionary of
                these by layer type; or `LayerMasks`, which also names the attention implementation to use.
            cache: `DraftCache`, or a transformers cache. Context and block are appended to it; the caller crops the
                block's B rows before the next round.
            past_key_values: the name under which transformers before 5.24 passes the cache.

        Returns:
            `BaseModelOutput` with `last_hidden_state [b, B, H]`, after the final norm.
        """
        cache = past_key_values if cache is None else cache
        dtype = self.norm.weight.dtype
        context = self.project_context(context_hidden_states)
        block = noise_embeds if torch.is_autocast_enabled(noise_embeds.device.type) else noise_embeds.to(dtype)
        cached = cache.get_seq_length() if cache is not None else 0
        new_rows = context.shape[1] + block.shape[1]
        row_ends = getattr(cache, "row_ends", None)
        if position_ids is None:
            position_ids = torch.arange(cached, cached + new_rows, device=block.device)[None]
        position_embeddings = self.rotary_emb(block, position_ids)
        masks = BlockMasks(
            attention_mask,
            block=block,
            total_length=cached + new_rows,
            implementation=self.config._attn_implementation,
            row_ends=row_ends,
        )
        for layer in self.layers:
            block = layer(block, context, position_embeddings, masks, cache)
        return BaseModelOutput(last_hidden_state=self.norm(block))

    def project_context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Context features `hidden_norm(fc(.))`: raw concat `[b, n, K * H_t]` of any dtype -> `[b, n, H]`."""
        return self.hidden_norm(self.fc(context_hidden_states.to(self.hidden_norm.weight.dtype)))

    def append_context(
        self, context_hidden_states: torch.Tensor, *, position_ids: torch.LongTensor, cache: DraftCache
    ) -> None:
        """Take features into the cache without a block (chunked prefill, sessions).

        Args:
            context_hidden_states: `[b, n, K * H_t]` raw concat.
            position_ids: `[b, n]` absolute positions.
            cache: extended by n rows in every layer.
        """
        context = self.project_context(context_hidden_states)
        cos, sin = self.rotary_emb(context, position_ids)
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_and_values(context, cos, sin)
            cache.update(keys, values, index)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs) -> DFlashDraftModel:
        """Load a drafter of any supported family from a folder or a Hub repository, without remote code.

        Takes the keywords of `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...).

        Raises:
            CheckpointError: if the family is not supported, or a tensor is missing, unknown or of the wrong shape; a
                half-loaded drafter would accept nothing and say nothing.
        """
        with_info = kwargs.pop("output_loading_info", False)
        hub = {key: kwargs[key] for key in _HUB_KEYWORDS if key in kwargs}
        config = kwargs.get("config")
        if pretrained_model_name_or_path is not None and not isinstance(config, DFlashConfig):
            names = tensor_names(pretrained_model_name_or_path, variant=kwargs.get("variant"), **hub)
            kwargs["tensor_names"] = names
            config, _ = DFlashConfig.get_config_dict(config or pretrained_model_name_or_path, **hub, tensor_names=names)
            kwargs.setdefault("key_mapping", FAMILIES[config.get("family") or "zlab"].KEY_MAPPING)
        elif config is not None:
            kwargs.setdefault("key_mapping", FAMILIES[config.family].KEY_MAPPING)
        kwargs.setdefault("use_safetensors", True)  # no pickle, unless the caller asks for it
        model, info = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            output_loading_info=True,
            # A wrong shape is reported below, with its name and both shapes.
            **{**kwargs, "ignore_mismatched_sizes": True},
        )
        require_complete(pretrained_model_name_or_path, info, ignored=FAMILIES[model.config.family].IGNORED)
        require_consistent(pretrained_model_name_or_path, d2t=model.d2t, t2d=model.t2d)
        if pretrained_model_name_or_path is not None:
            # Optional: published drafters have none.
            optional = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
            if cached_file(pretrained_model_name_or_path, "generation_config.json", **hub, **optional) is not None:
                model.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **hub)
        return (model, info) if with_info else model

    def save_pretrained(
        self,
        save_directory,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs,
    ):
        """Write the drafter in its family's layout (z-lab's for new ones), and its own `generation_config.json` if any.

        Takes the arguments of `PreTrainedModel.save_pretrained`.
        """
        hub = {
            key: kwargs.pop(key) for key in ("repo_id", "commit_message", "private") if push_to_hub and key in kwargs
        }
        if FAMILIES[self.config.family].TO_DISK:
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = {name_on_disk(name, self.config.family): tensor for name, tensor in state_dict.items()}
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if is_main_process and _DRAFTING_KNOBS & self.generation_config.to_diff_dict().keys():
            self.generation_config.save_pretrained(save_directory)
        if push_to_hub:  # as a whole, so that no file of the folder is left out
            hub.setdefault("repo_id", os.path.basename(os.path.normpath(save_directory)))
            self.push_to_hub(**hub, token=kwargs.get("token"))
