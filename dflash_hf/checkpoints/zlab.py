"""z-lab's DFlash v1 layout: `architectures: ["DFlashDraftModel"]`, `model_type: "qwen3"`, a `dflash_config` block.

Tensor names are those of `DFlashDraftModel` itself, so only the config needs translating; two historic spellings of the
names are mapped by `KEY_MAPPING`.
"""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError

# What the format's own reader takes where a key is absent.
DEFAULT_BLOCK_SIZE = 16
DEFAULT_HEAD_DIM = 128

# Regular expressions on published tensor names -> names in `DFlashDraftModel`.
KEY_MAPPING = {r"^model\.": "", r"^midlayer\.": "layers.0."}

_NESTED_KEYS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
# Keys with the same name and meaning in the file and in DFlashConfig.
_PLAIN_KEYS = (
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
    "num_target_layers",
    "target_hidden_size",
    "target_name_or_path",
    "enable_thinking",
)
# Family markers of other formats that share the class name: their presence changes the mathematics.
_FOREIGN_KEYS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "markov_rank",
    "draft_vocab_size",
    "sample_from_anchor",
    "attention_sink_bias",
    "aux_hidden_state_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
    "gating",
)


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` is in z-lab's v1 layout."""
    return "DFlashDraftModel" in (on_disk.get("architectures") or []) and "speculators_model_type" not in on_disk


def read_config(on_disk: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig` for a z-lab v1 `config.json`; the file itself is kept in `source_config`.

    Raises:
        CheckpointError: for a key of `dflash_config`, or a marker of another family, that is not understood.
    """
    nested = dict(on_disk.get("dflash_config") or {})
    unknown = sorted(set(nested) - _NESTED_KEYS)
    if unknown:
        raise CheckpointError(
            f"dflash_config.{unknown[0]} = {nested[unknown[0]]!r} is not a key of z-lab's DFlash v1 format. It may "
            "change what the drafter computes, so it is not ignored. Known keys: " + ", ".join(sorted(_NESTED_KEYS))
        )
    for key in _FOREIGN_KEYS:
        if on_disk.get(key):
            raise CheckpointError(
                f"config.json sets `{key}` = {on_disk[key]!r}, which belongs to another drafter family than z-lab's "
                "DFlash v1 and changes what the drafter computes."
            )
    fields = {key: on_disk[key] for key in _PLAIN_KEYS if key in on_disk}
    fields["head_dim"] = on_disk.get("head_dim") or DEFAULT_HEAD_DIM
    layers = on_disk["num_hidden_layers"]
    fields["layer_types"] = _layer_types(on_disk)
    if "sliding_attention" in fields["layer_types"] and on_disk.get("use_sliding_window") is False:
        raise CheckpointError(
            "config.json names sliding layers in layer_types, but says use_sliding_window: false. Readers disagree on "
            "what that means; set use_sliding_window to true, or the layers to full_attention."
        )
    if "sliding_attention" not in fields["layer_types"]:
        fields.pop("sliding_window", None)
    fields["rope_parameters"] = _rope_parameters(on_disk)
    # Nested wins: retrained repositories kept an old top-level value beside it.
    fields["block_size"] = nested.get("block_size", on_disk.get("block_size", DEFAULT_BLOCK_SIZE))
    fields["mask_token_id"] = nested.get("mask_token_id", on_disk.get("mask_token_id"))
    layer_ids = nested.get("target_layer_ids", on_disk.get("target_layer_ids"))
    if layer_ids is None and on_disk.get("num_target_layers") is not None:
        layer_ids = default_taps(num_target_layers=on_disk["num_target_layers"], num_draft_layers=layers)
    fields["target_layer_ids"] = layer_ids
    is_causal = on_disk.get("is_causal")
    fields["is_causal"] = nested.get("causal") if is_causal is None else is_causal
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        fields[key] = nested.get(key, on_disk.get(key))
    if on_disk.get("dtype") or on_disk.get("torch_dtype"):
        fields["dtype"] = on_disk.get("dtype") or on_disk.get("torch_dtype")
    fields["architectures"] = ["DFlashDraftModel"]
    fields["source_config"] = dict(on_disk)
    return fields


def default_taps(*, num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The taps that a checkpoint without `target_layer_ids` means: as many as it has draft layers."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + j * span / (num_draft_layers - 1)) for j in range(num_draft_layers)]


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """z-lab's `config.json` for `DFlashConfig` fields. `block_size` is written at both places that readers look at."""
    out = {key: fields[key] for key in _PLAIN_KEYS if fields.get(key) is not None}
    if out.get("target_hidden_size") == fields["hidden_size"]:
        out.pop("target_hidden_size")
    sliding = "sliding_attention" in fields["layer_types"]
    rope = dict(fields["rope_parameters"])
    nested = {
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "target_layer_ids": list(fields["target_layer_ids"]),
    }
    # Always stated: readers disagree on what its absence means for targets whose embedding module scales.
    if fields.get("input_embedding_scale") is not None:
        nested["input_embedding_scale"] = fields["input_embedding_scale"]
    for key in ("output_multiplier", "final_logit_softcapping"):
        if fields.get(key) is not None:
            nested[key] = fields[key]
    out |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",  # what the engines' loaders expect, for every target
        "block_size": fields["block_size"],
        "dflash_config": nested,
        "head_dim": fields["head_dim"],
        "layer_types": list(fields["layer_types"]),
        "max_window_layers": fields["num_hidden_layers"],
        "rope_parameters": rope,
        # Older readers know only this pair.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": _legacy_rope_scaling(rope),
        "sliding_window": fields.get("sliding_window") if sliding else None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
    }
    if fields.get("is_causal") is not None:
        out["is_causal"] = fields["is_causal"]
    dtype = fields.get("dtype")
    if dtype is not None:
        out["dtype"] = str(dtype).removeprefix("torch.")
    if fields.get("transformers_version"):
        out["transformers_version"] = fields["transformers_version"]
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


def _legacy_rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type", "default") == "default":
        return None
    return {key: value for key, value in rope.items() if key != "rope_theta"}
