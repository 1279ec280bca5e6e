"""`DFlashConfig`: one flat, typed, strict configuration of a drafter, whatever family its checkpoint came from."""

import json
import os
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .checkpoints import read_config, write_config
from .checkpoints.zlab import default_taps
from .configuration_checks import check_extras
from .errors import DFlashConfigError
from .inherited import attention_geometry, drafter_rope_parameters, target_embedding_scale

LAYER_TYPES = ("full_attention", "sliding_attention")

# Keywords that transformers itself passes to a config next to the dataclass fields.
_BASE_KEYWORDS = {
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "model_type",
    "attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "experts_implementation",
    "output_attentions",
    "torch_dtype",
    "rope_theta",
    "rope_scaling",
    "use_cache",
    "quantization_config",
}


def default_target_layer_ids(*, num_target_layers: int, num_taps: int) -> list[int]:
    """Spread `num_taps` taps evenly from the target's second layer to its third last one.

    Source: z-lab's published checkpoints and DFlash (arXiv 2602.06036). `round` is Python's, ties to even.

    Raises:
        DFlashConfigError: if the target has too few layers for that many distinct taps.
    """
    if num_taps < 1:
        raise DFlashConfigError(f"The number of taps must be at least 1, got {num_taps}.")
    ids = default_taps(num_target_layers=num_target_layers, num_draft_layers=num_taps)
    if min(ids) < 0 or max(ids) >= num_target_layers or ids != sorted(set(ids)):
        raise DFlashConfigError(
            f"{num_taps} taps do not fit between the second and the third last of {num_target_layers} target layers. "
            "Pass fewer taps, or name them yourself with `target_layer_ids`."
        )
    return ids


@strict
class DFlashConfig(PreTrainedConfig):
    r"""Configuration of a DFlash drafter (method: arXiv 2602.06036).

    Args:
        hidden_size (`int`): width H of the drafter. It equals the target's where embedding and head are borrowed.
        intermediate_size (`int`): width of the SwiGLU MLP.
        num_hidden_layers (`int`): number of draft layers.
        num_attention_heads (`int`), num_key_value_heads (`int`), head_dim (`int`): attention geometry.
        rope_parameters (`dict`): transformers' RoPE parameters (`rope_theta`, `rope_type`, YaRN's own).
        layer_types (`list[str]`): `full_attention` or `sliding_attention` for each draft layer.
        sliding_window (`int`, *optional*): W; a key is visible if `query - key < W` (the query itself counts).
        window_rule (`str`): `query`, as above, or `anchor`: every slot sees the W context rows before the anchor, and
            the whole block as causality allows (speculators).
        vocab_size (`int`, *optional*): rows of the target's embedding; None where a checkpoint does not record them.
        block_size (`int`): B; slot 0 carries the anchor, the other B - 1 slots are proposals.
        mask_token_id (`int`): id whose embedding fills the slots to predict. It must be a row of the target's
            embedding.
        target_layer_ids (`list[int]`): taps; id `i` is the output of the target's decoder layer `i` (0-based), -1 the
            embedding output.
        num_target_layers (`int`): decoder layers of the target.
        target_hidden_size (`int`, *optional*): width of a tapped state, if it is not `hidden_size`.
        is_causal (`bool`, *optional*): attention inside the block on every layer. Unset means causal on sliding layers
            and bidirectional on full ones.
        input_embedding_scale (`float`, *optional*): the block's embedding is the raw rows of the target's table times
            this. Unset means whatever the target's embedding module returns.
        output_multiplier (`float`, *optional*), final_logit_softcapping (`float`, *optional*): applied to draft logits.
        family (`str`, *optional*): the published family whose layout `save_pretrained` writes; by default the first
            one that can say what the other fields ask for.
        sample_from_anchor (`bool`): slot k predicts the token at anchor + k + 1, so that slot 0 proposes too.
        own_embedding (`bool`), own_head (`bool`): the drafter has `embed_tokens` and `lm_head` of its own instead of
            borrowing the target's.
        draft_vocab_size (`int`, *optional*): rows of an own head that covers a part of the vocabulary.
        decoder_type (`str`): whose decoder layers it has, `qwen3` or `gemma4`; of the latter, attention_k_eq_v (`bool`)
            takes the values from the projection of the keys, layer_scalars (`bool`) has a factor for each layer.
        conv_kernel_size (`int`, *optional*), conv_group_size (`int`, *optional*): taps, and channels that share a
            dynamic kernel, of DFlash 2's convolutions.
        selector_rank (`int`, *optional*), selector_top_k (`int`, *optional*): DFlash 2's candidate selector.
        markov_rank (`int`, *optional*), markov_head_type (`str`, *optional*): DSpark's Markov head (`vanilla`, `gated`
            or `rnn`).
        confidence_head (`bool`), confidence_head_with_markov (`bool`): DSpark's acceptance predictor; kept with the
            checkpoint, not used in decoding.
        gru_hidden_dim (`int`, *optional*), emb_dim (`int`, *optional*), pure_draft_prefix_len (`int`, *optional*):
            Domino's GRU, the width of its projection, and the number of leading proposals that it leaves alone.
        target_name_or_path (`str`, *optional*): the target that the drafter was trained for.
        enable_thinking (`bool`, *optional*): what the chat template was told when the training data was rendered.
            Prompt the target the same way: a drafter that learned one is far worse at the other.
        source_config (`dict`, *optional*): the published config as it was read, so that an unchanged drafter is saved
            as it came.

    Raises:
        DFlashConfigError: for any value that cannot work, naming the value, the limit and the remedy.
    """

    model_type = "dflash"
    default_theta = 10000.0

    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 5
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float | int = 1e-6
    max_position_embeddings: int = 32768
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    initializer_range: float | int = 0.02
    window_rule: str = "query"
    vocab_size: int | None = 151936
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float | int | None = None
    output_multiplier: float | int | None = None
    final_logit_softcapping: float | int | None = None
    target_name_or_path: str | None = None
    enable_thinking: bool | None = None
    family: str | None = None
    sample_from_anchor: bool = False
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None
    decoder_type: str = "qwen3"
    attention_k_eq_v: bool = False
    layer_scalars: bool = False
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    confidence_head: bool = False
    confidence_head_with_markov: bool = False
    gru_hidden_dim: int | None = None
    emb_dim: int | None = None
    pure_draft_prefix_len: int | None = None
    source_config: dict | None = None

    def __post_init__(self, **kwargs):
        unknown = sorted(set(kwargs) - _BASE_KEYWORDS)
        if unknown:
            raise DFlashConfigError(
                f"DFlashConfig does not know `{unknown[0]}`. Its own fields are: {', '.join(self._own_fields())}."
            )
        kwargs.pop("use_cache", None)
        kwargs.pop("model_type", None)
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(
                num_target_layers=self.num_target_layers, num_taps=self.num_hidden_layers
            )
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.family is None:
            self.family = self._family_of_fields()
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def _own_fields(cls) -> list[str]:
        inherited = {field.name for field in fields(PreTrainedConfig)}
        return [field.name for field in fields(cls) if field.name not in inherited]

    def _family_of_fields(self) -> str:
        if self.decoder_type == "gemma4":
            return "deepspec_gemma4"
        if self.window_rule == "anchor" or self.draft_vocab_size is not None:
            return "speculators"
        if self.own_embedding or self.own_head:
            plain = self.own_embedding and self.own_head and self.hidden_size == self.target_hidden_size
            return "deepspec" if self.sample_from_anchor and plain else "speculators"
        if self.gru_hidden_dim is not None:
            return "domino"
        if self.sample_from_anchor:
            return "speculators"
        if self.markov_rank is not None:
            return "dspark"
        return "dflash2" if self.conv_kernel_size is not None else "zlab"

    def check(self) -> None:
        """Check the configuration as a whole; the model calls it again, since fields may be assigned later.

        Raises:
            DFlashConfigError: on the first value that cannot work.
        """
        if self.block_size < 2:
            raise DFlashConfigError(
                f"block_size is {self.block_size}, but a block needs at least 2 slots: the anchor and one proposal. "
                "Use 8 or 16."
            )
        if self.num_hidden_layers < 1:
            raise DFlashConfigError(f"num_hidden_layers is {self.num_hidden_layers}; a drafter needs at least 1 layer.")
        if self.mask_token_id is None:
            raise DFlashConfigError(
                "mask_token_id is not set. Name a reserved id of the target's vocabulary that its tokenizer never "
                "emits; do not reuse the padding token."
            )
        if self.mask_token_id < 0 or (self.vocab_size is not None and self.mask_token_id >= self.vocab_size):
            raise DFlashConfigError(
                f"mask_token_id {self.mask_token_id} is outside the target's embedding ({self.vocab_size} rows). "
                f"Choose a reserved id between 0 and {self.vocab_size - 1} that the tokenizer never emits."
            )
        if not self.target_layer_ids:
            raise DFlashConfigError(
                "target_layer_ids is empty and num_target_layers is not known, so there is nothing to tap. Pass "
                "target_layer_ids, or num_target_layers to get the default spread."
            )
        for layer_id in self.target_layer_ids:
            limit = self.num_target_layers
            if layer_id < -1 or (limit is not None and layer_id >= limit):
                raise DFlashConfigError(
                    f"Tap id {layer_id} in target_layer_ids {self.target_layer_ids} is out of range: the target has "
                    f"{limit if limit is not None else 'an unknown number of'} layers, so ids run from -1 (the "
                    f"embedding output) to {limit - 1 if limit is not None else 'the last layer'}."
                )
        if len(self.layer_types) != self.num_hidden_layers:
            raise DFlashConfigError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} draft layers. Give one "
                "entry a layer."
            )
        for layer_type in self.layer_types:
            if layer_type not in LAYER_TYPES:
                raise DFlashConfigError(f"layer type {layer_type!r} is not one of {', '.join(LAYER_TYPES)}.")
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise DFlashConfigError(
                f"layer_types asks for sliding attention, but sliding_window is {self.sliding_window}. Set it to the "
                "number of visible keys, the query itself included."
            )
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise DFlashConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}."
            )
        check_extras(self)

    @property
    def first_slot(self) -> int:
        """The slot that proposes the token after the anchor; a block has `block_size - first_slot` proposals."""
        return 0 if self.sample_from_anchor else 1

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether attention inside the block is causal on this layer (design: is_causal, else sliding means causal)."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    @classmethod
    def from_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        mask_token_id: int,
        num_hidden_layers: int = 5,
        block_size: int = 16,
        target_layer_ids: list[int] | None = None,
        num_taps: int = 5,
        intermediate_size: int | None = None,
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        input_embedding_scale: float | None = None,
        initializer_range: float = 0.02,
    ) -> "DFlashConfig":
        """A new drafter's configuration that fits `target_config` (of a causal language model, or one that holds one).

        Width, heads, MLP, norm and base RoPE frequency are the target's; its RoPE scaling is inherited, its partial
        rotary factor and M-RoPE sections are not, because a drafter rotates whole heads at plain positions. A target
        whose MLP width differs from the dense case (MoE) should pass `intermediate_size`.

        Args:
            mask_token_id: reserved id of the target's vocabulary that its tokenizer never emits.
            num_hidden_layers: draft layers; 3 to 5 are usual.
            target_layer_ids: taps; by default `num_taps` of them, evenly spread.
            input_embedding_scale: by default what the target's own embedding applies (sqrt(H) for Gemma, Granite's
                multiplier), else 1.

        Raises:
            DFlashConfigError: as the constructor does, or if the target's config has no text decoder.
        """
        text = target_config.get_text_config(decoder=True)
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            if getattr(text, name, None) is None:
                raise DFlashConfigError(
                    f"The target's config ({type(text).__name__}) has no `{name}`; from_target needs the config of a "
                    "decoder-only language model. Build DFlashConfig by hand for others."
                )
        heads, kv_heads, head_dim = attention_geometry(text)
        if target_layer_ids is None:
            target_layer_ids = default_target_layer_ids(num_target_layers=text.num_hidden_layers, num_taps=num_taps)
        intermediate_size = intermediate_size or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        if isinstance(intermediate_size, (list, tuple)):  # one a layer
            intermediate_size = max(intermediate_size)
        if input_embedding_scale is None:
            input_embedding_scale = target_embedding_scale(text)
        return cls(
            hidden_size=text.hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
            max_position_embeddings=getattr(text, "max_position_embeddings", 32768),
            rope_parameters=drafter_rope_parameters(text),
            layer_types=layer_types,
            sliding_window=sliding_window,
            initializer_range=initializer_range,
            vocab_size=text.vocab_size,
            bos_token_id=getattr(text, "bos_token_id", None),
            eos_token_id=getattr(text, "eos_token_id", None),
            pad_token_id=getattr(text, "pad_token_id", None),
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=list(target_layer_ids),
            num_target_layers=text.num_hidden_layers,
            input_embedding_scale=input_embedding_scale,
            target_name_or_path=getattr(target_config, "_name_or_path", None) or None,
        )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> tuple[dict, dict]:
        """Read a published `config.json` of any supported family and return this class's own fields.

        Takes `tensor_names`, the names in the checkpoint, which `DFlashDraftModel.from_pretrained` knows.
        """
        tensor_names = kwargs.pop("tensor_names", None)
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return (read_config(config_dict, tensor_names) if config_dict else config_dict), kwargs

    def _on_disk(self) -> dict[str, Any]:
        """The file that it came from (quantised or not since) where it still means the same, else its family's."""
        fields = self.to_dict()
        if self.source_config is not None:
            names = ["embed_tokens.weight"] * self.own_embedding + ["lm_head.weight"] * self.own_head
            names += ["layers.0.layer_scalar"] * self.layer_scalars
            source = type(self)(**read_config(self.source_config, names)).to_dict()
            if _meaning(fields) == _meaning(source) and fields.get("dtype") in (None, source.get("dtype")):
                key, value = "quantization_config", fields.get("quantization_config")
                kept = {name: entry for name, entry in self.source_config.items() if name != key}
                return kept | {key: value} if value else kept
        return write_config(fields)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Write `config.json` in the layout of the drafter's family, which is z-lab's for new ones.

        A drafter that was loaded and not changed gets the very keys and values that it came with.

        Raises:
            CheckpointError: if that layout cannot say what the drafter computes.
        """
        self.check()
        os.makedirs(save_directory, exist_ok=True)
        path = os.path.join(save_directory, "config.json")
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self._on_disk(), file, indent=2, sort_keys=True)
            file.write("\n")
        os.replace(temporary, path)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", None) or os.path.basename(save_directory), **kwargs)


def _meaning(fields: dict[str, Any]) -> dict[str, Any]:
    """What of a config's fields says which drafter it is, in one spelling."""
    bookkeeping = {"architectures", "dtype", "transformers_version", "_name_or_path", "quantization_config"}
    rope = {key: value for key, value in fields["rope_parameters"].items() if key != "type"}  # old name of rope_type
    return {key: value for key, value in fields.items() if key not in bookkeeping} | {"rope_parameters": rope}
