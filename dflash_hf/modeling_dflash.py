"""`DFlashDraftModel`: the drafter's forward pass, and nothing about decoding or training.

Block diffusion conditioned on the target's hidden states (DFlash, arXiv 2602.06036). Every draft layer attends from the
block to the context features of the positions before the anchor and to the block itself; the context is projected to
keys and values by each layer but never passes through its input norm or MLP. Parameter names are z-lab's, so a
checkpoint in their layout is this model's state dict.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from .attention import DFlashAttention, DFlashRotaryEmbedding
from .configuration_dflash import DFlashConfig
from .convolution import GroupedDynamicConvolution
from .correction_heads import CandidateSelector, ConfidenceHead, GRUCorrection, MarkovHead
from .draft_cache import DraftCache
from .errors import DFlashConfigError, DFlashError
from .gemma4 import Gemma4DraftLayer
from .loading import read_published_names
from .masks import BlockMasks, LayerMasks
from .pretrained import DrafterFiles
from .token_index import checked_index

# GenerationStats of each drafter's latest call; a thread's own, and gone with it.
_LATEST = threading.local()


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


# By `DFlashConfig.decoder_type`.
DECODER_LAYERS = {"qwen3": DFlashDecoderLayer, "gemma4": Gemma4DraftLayer}


class DFlashPreTrainedModel(DrafterFiles, PreTrainedModel):
    """What transformers needs to know about the drafter."""

    config_class = DFlashConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer", "Gemma4DraftLayer"]
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

    Use it as `target.generate(..., assistant_model=drafter)`, or train one with `DFlashTrainer`. Load it with this
    class: a published config.json names another model type (`qwen3`) for the engines' sake, so `AutoModel` would build
    that model, with random weights where the drafter has none.

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
        layer_class = DECODER_LAYERS[config.decoder_type]
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self._add_tables(config)
        self._add_corrections(config)
        self._frequent_token_ids = None
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
    def frequent_token_ids(self) -> torch.LongTensor | None:
        """Target tokens `[v]` that proposals are restricted to, most frequent first; None for the whole vocabulary.

        Assign a list or tensor of token ids (`dflash_hf.frequent_tokens` counts them) to draft with an output head of v
        rows: cheaper where the head is a large part of a draft, and as exact. It is saved and loaded with the drafter.

        Raises:
            DFlashConfigError: on assignment, for ids outside the vocabulary or given twice, or a drafter whose own
                vocabulary is trimmed already.
        """
        return self._frequent_token_ids

    @frequent_token_ids.setter
    def frequent_token_ids(self, token_ids: torch.Tensor | list[int] | None) -> None:
        if token_ids is not None and self.d2t is not None:
            raise DFlashConfigError(
                f"This drafter has a trimmed vocabulary of its own ({len(self.d2t)} tokens, tensor 'd2t'), so it takes "
                "no index of frequent tokens."
            )
        vocab_size = self.config.vocab_size
        self._frequent_token_ids = None if token_ids is None else checked_index(token_ids, vocab_size=vocab_size)

    @property
    def num_frequent_tokens(self) -> int | None:
        """Length of `frequent_token_ids`; None without an index."""
        return None if self._frequent_token_ids is None else len(self._frequent_token_ids)

    @property
    def last_generation_stats(self):
        """`GenerationStats` of this thread's latest `generate` call with this drafter; None before the first."""
        return getattr(_LATEST, "stats", {}).get(self)

    def keep_generation_stats(self, stats: Any) -> None:
        """Make `stats` this thread's latest; called at the end of a `generate` call."""
        if not hasattr(_LATEST, "stats"):
            _LATEST.stats = weakref.WeakKeyDictionary()
        _LATEST.stats[self] = stats

    def get_input_embeddings(self) -> nn.Embedding | None:
        """The drafter's own embedding; None where it borrows the target's. Quantisers ask for it."""
        return self.embed_tokens

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
            context_window=getattr(cache, "window", None),
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
