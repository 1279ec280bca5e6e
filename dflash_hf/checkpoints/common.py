"""What the layouts share: the backbone of a Qwen3 `config.json`, and the check that a layout can say a thing."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError

# Keys with the same name and meaning in published Qwen3-style configs and in DFlashConfig.
BACKBONE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "attention_dropout",
    "sliding_window",
    "initializer_range",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)

# What every published config states; the sizes are told by the tensors too, the others by nothing else.
BACKBONE_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)

# What the format's own reader takes where `head_dim` is absent.
# What a drafter adds to its backbone, in layouts that keep it at the top level under our own names.
DRAFTER_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "target_name_or_path",
    "enable_thinking",
)
DEFAULT_HEAD_DIM = 128

# Fields that change what a drafter computes, beyond the plain backbone, and the value that means "not used".
EXTRAS = {
    "sample_from_anchor": False,
    "window_rule": "query",
    "own_embedding": False,
    "own_head": False,
    "draft_vocab_size": None,
    "decoder_type": "qwen3",
    "attention_k_eq_v": False,
    "layer_scalars": False,
    "input_embedding_scale": None,
    "output_multiplier": None,
    "final_logit_softcapping": None,
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "markov_rank": None,
    "markov_head_type": None,
    "confidence_head": False,
    "confidence_head_with_markov": False,
    "gru_hidden_dim": None,
    "emb_dim": None,
    "pure_draft_prefix_len": None,
}


def require_keys(on_disk: dict[str, Any], keys: tuple[str, ...], *, title: str, where: str = "config.json") -> None:
    """Stop at the first key that a layout cannot do without.

    Raises:
        CheckpointError: naming the key.
    """
    for key in keys:
        if on_disk.get(key) is None:
            raise CheckpointError(f"{where} of this {title} drafter has no `{key}`, without which it is incomplete.")


def require_backbone(on_disk: dict[str, Any], *, title: str, where: str = "config.json") -> None:
    """Stop at the first key of the backbone that is missing; RoPE may be stated in either of its spellings."""
    require_keys(on_disk, BACKBONE_REQUIRED, title=title, where=where)
    if all(on_disk.get(key) is None for key in ("rope_parameters", "rope_theta")):
        raise CheckpointError(f"{where} of this {title} drafter has neither `rope_parameters` nor `rope_theta`.")


def require_expressible(fields: dict[str, Any], extras: set[str], *, title: str) -> None:
    """Stop at the first field that a layout has no key for, since a reader of the file would compute something else.

    Args:
        fields: of a DFlashConfig.
        extras: the entries of `EXTRAS` that the layout can say.

    Raises:
        CheckpointError: naming the field.
    """
    for name, unused in EXTRAS.items():
        value = fields.get(name, unused)
        if value is None or (name == "input_embedding_scale" and value == 1.0 and fields.get("own_embedding")):
            value = unused  # the raw rows of an own table
        if name not in extras and value != unused:
            raise CheckpointError(
                f"The drafter has {name} = {value!r}, which the {title} layout has no key for: whoever loads the file "
                "would compute something else. Save it in the layout of its own family."
            )


def require_target_width(fields: dict[str, Any], *, title: str) -> None:
    """Stop if the target's width differs from the drafter's, for a layout that has no key for it.

    Raises:
        CheckpointError: naming both.
    """
    width = fields.get("target_hidden_size")
    if width not in (None, fields["hidden_size"]):
        raise CheckpointError(
            f"The drafter of width {fields['hidden_size']} reads states of width {width} (target_hidden_size), which "
            f"the {title} layout has no key for."
        )


def backbone_fields(on_disk: dict[str, Any]) -> dict[str, Any]:
    """The fields of DFlashConfig that a Qwen3-style config gives directly, RoPE, layer types and dtype included.

    Raises:
        CheckpointError: if the config contradicts itself about sliding layers.
    """
    fields = {key: on_disk[key] for key in BACKBONE_KEYS if key in on_disk}
    fields["head_dim"] = on_disk.get("head_dim") or DEFAULT_HEAD_DIM
    fields["layer_types"] = _layer_types(on_disk)
    if "sliding_attention" in fields["layer_types"] and on_disk.get("use_sliding_window") is False:
        raise CheckpointError(
            "config.json names sliding layers in layer_types, but says use_sliding_window: false. Readers disagree on "
            "what that means; set use_sliding_window to true, or the layers to full_attention."
        )
    if "sliding_attention" not in fields["layer_types"]:
        fields.pop("sliding_window", None)
    fields["rope_parameters"] = _rope_parameters(on_disk)
    dtype = on_disk.get("dtype") or on_disk.get("torch_dtype")
    if dtype:
        fields["dtype"] = dtype
    if on_disk.get("quantization_config"):
        fields["quantization_config"] = on_disk["quantization_config"]
    return fields


def backbone_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `backbone_fields`, in the spelling of a current Qwen3Config."""
    out = {key: fields[key] for key in BACKBONE_KEYS if fields.get(key) is not None}
    sliding = "sliding_attention" in fields["layer_types"]
    out |= {
        "head_dim": fields["head_dim"],
        "layer_types": list(fields["layer_types"]),
        "max_window_layers": fields["num_hidden_layers"],
        "rope_parameters": dict(fields["rope_parameters"]),
        "sliding_window": fields.get("sliding_window") if sliding else None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
    }
    return out


def bookkeeping_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """dtype, quantisation and library version, where known."""
    out = {}
    if fields.get("dtype") is not None:
        out["dtype"] = str(fields["dtype"]).removeprefix("torch.")
    for key in ("transformers_version", "quantization_config"):
        if fields.get(key):
            out[key] = fields[key]
    return out


def _layer_types(on_disk: dict[str, Any]) -> list[str]:
    layers = on_disk["num_hidden_layers"]
    layer_types = on_disk.get("layer_types")
    if layer_types is not None:
        return list(layer_types)
    if on_disk.get("use_sliding_window") and on_disk.get("sliding_window"):
        first = on_disk.get("max_window_layers", layers)
        return ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return ["full_attention"] * layers


def _rope_parameters(on_disk: dict[str, Any]) -> dict[str, Any]:
    rope = dict(on_disk.get("rope_parameters") or on_disk.get("rope_scaling") or {})
    rope.setdefault("rope_theta", on_disk.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope
