"""speculators' layout: `speculators_model_type` dflash, dflash2 or dspark, the backbone in `transformer_layer_config`.

Tap ids count hidden states (`hidden_states[id]`), one more than z-lab's. Sliding layers see the W context rows before
the anchor, the same ones from every slot, and the whole block (`window_rule: "anchor"`). Whether the checkpoint brings
an embedding and a head is told by its tensors: releases before 0.9 stored both, 0.9.0 stores the head of a trimmed
vocabulary only and takes the rest from the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import CheckpointError
from .common import (
    backbone_fields,
    backbone_keys,
    bookkeeping_keys,
    require_backbone,
    require_expressible,
    require_keys,
)
from .dspark import MARKOV_EXTRAS, markov_fields, markov_keys

FAMILY = "speculators"
TITLE = "speculators"
KEY_MAPPING: dict[str, str] = {}
TO_DISK: dict[str, str] = {}
# Copies of the target's weights that only training read; 0.9.0 no longer stores them.
IGNORED = (r"^verifier_lm_head\.weight$", r"^verifier_norm\.weight$")

_CONV_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
_REQUIRED = (
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    "block_size",
    "draft_vocab_size",
)
_KNOWN = {
    *_REQUIRED,
    *_CONV_KEYS,
    "architectures",
    "auto_map",
    "confidence_head_with_markov",
    "dtype",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "model_type",
    "quantization_config",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
}


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` was written by speculators."""
    return "speculators_model_type" in on_disk


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig`.

    Args:
        tensor_names: of the checkpoint; without them the layout of 0.9.0 is assumed.

    Raises:
        CheckpointError: for another algorithm, an unknown key, a missing one, or a half-stored vocabulary.
    """
    kind = on_disk["speculators_model_type"]
    if kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"speculators_model_type {kind!r} is not a block-diffusion drafter that dflash_hf reads. Supported: "
            f"{', '.join(_ARCHITECTURES)}."
        )
    title = f"{TITLE} {kind}"
    unknown = sorted(set(on_disk) - _KNOWN)
    if unknown:
        raise CheckpointError(
            f"config.json sets `{unknown[0]}` = {on_disk[unknown[0]]!r}, which is not a key of {title} as of 0.9.0. It "
            "may change what the drafter computes, so it is not ignored."
        )
    require_keys(on_disk, _REQUIRED, title=title)
    layers = on_disk["transformer_layer_config"]
    require_backbone(layers, title=title, where="transformer_layer_config")
    require_keys(layers, ("head_dim", "vocab_size"), title=title, where="transformer_layer_config")
    fields = backbone_fields(layers)
    fields |= {key: on_disk[key] for key in ("block_size", "mask_token_id", "target_hidden_size") if key in on_disk}
    fields["target_layer_ids"] = [layer_id - 1 for layer_id in on_disk["aux_hidden_state_layer_ids"]]
    if kind == "dspark":  # its readers disagree on what absence means; that of the others is false
        require_keys(on_disk, ("sample_from_anchor",), title=title)
    fields["sample_from_anchor"] = on_disk.get("sample_from_anchor", False)
    if "sliding_attention" in fields["layer_types"]:
        require_keys(on_disk, ("sliding_window_non_causal",), title=title)  # as above
        fields["window_rule"] = "anchor"
        # Full layers are always bidirectional; unset means causal on sliding ones.
        fields["is_causal"] = False if on_disk["sliding_window_non_causal"] else None
    if kind == "dflash2":
        require_keys(on_disk, _CONV_KEYS, title=title)
        fields |= {key: on_disk[key] for key in _CONV_KEYS}
    if kind == "dspark":
        require_keys(on_disk, ("markov_rank",), title=title)
        fields |= markov_fields(on_disk)
    verifier = (on_disk.get("speculators_config") or {}).get("verifier") or {}
    fields["target_name_or_path"] = verifier.get("name_or_path")
    for key in ("dtype", "torch_dtype", "quantization_config"):
        if on_disk.get(key):
            fields[key.removeprefix("torch_")] = on_disk[key]
    fields |= _tables(on_disk["draft_vocab_size"], layers["vocab_size"], tensor_names)
    return fields | {
        # Raw rows, whatever the target's own module does.
        "input_embedding_scale": None if fields["own_embedding"] else 1.0,
        "family": FAMILY,
        "architectures": ["DFlashDraftModel"],
        "source_config": dict(on_disk),
    }


def _tables(draft_vocab_size: int, vocab_size: int, tensor_names: Iterable[str] | None) -> dict[str, Any]:
    trimmed = draft_vocab_size != vocab_size
    if tensor_names is None:
        return {"own_embedding": False, "own_head": trimmed, "draft_vocab_size": draft_vocab_size if trimmed else None}
    names = set(tensor_names)
    own_embedding, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    if trimmed and not own_head:
        raise CheckpointError(
            f"Tensor 'lm_head.weight' is missing: draft_vocab_size is {draft_vocab_size} of {vocab_size} tokens, and "
            "the head of a trimmed vocabulary cannot be taken from the target."
        )
    if not trimmed and own_embedding != own_head:
        missing = "lm_head.weight" if own_embedding else "embed_tokens.weight"
        raise CheckpointError(f"Tensor {missing!r} is missing: this layout stores embedding and head together.")
    return {
        "own_embedding": own_embedding,
        "own_head": own_head,
        "draft_vocab_size": draft_vocab_size if trimmed else None,
    }


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """speculators' `config.json`, as 0.9.0 writes it.

    Raises:
        CheckpointError: for what the layout cannot say: a sliding window that counts from each query, causal full
            layers, an embedding that is scaled, draft logits that are transformed.
    """
    extras = {"sample_from_anchor", "window_rule", "own_embedding", "own_head", "draft_vocab_size"}
    extras |= {"input_embedding_scale", *_CONV_KEYS, *MARKOV_EXTRAS}
    require_expressible(fields, extras, title=TITLE)
    require_keys(fields, ("vocab_size",), title=TITLE, where="The configuration")
    scale = fields.get("input_embedding_scale")
    if not fields.get("own_embedding") and scale != 1.0:
        raise CheckpointError(
            f"The drafter has input_embedding_scale = {scale}; {TITLE} embeds blocks with the target's raw rows, which "
            "is a scale of 1.0. Where the target's embedding module gives raw rows too, set it to 1.0 first."
        )
    sliding = "sliding_attention" in fields["layer_types"]
    if sliding and fields.get("window_rule") != "anchor":
        raise CheckpointError(
            "The drafter's sliding layers count their window from each slot; speculators counts it from the anchor, so "
            "the drafts would differ as soon as the context is longer than the window."
        )
    if fields.get("is_causal") and "full_attention" in fields["layer_types"]:
        raise CheckpointError(f"{TITLE} has no causal full-attention layers; this drafter sets is_causal.")
    kind = "dflash2" if fields.get("conv_kernel_size") else "dspark" if fields.get("markov_rank") else "dflash"
    proposals = fields["block_size"] - (0 if fields.get("sample_from_anchor") else 1)
    layers = backbone_keys(fields) | {"model_type": "qwen3"}
    layers["max_window_layers"] = 0 if sliding else fields["num_hidden_layers"]
    out = {
        "architectures": [_ARCHITECTURES[kind]],
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in fields["target_layer_ids"]],
        "block_size": fields["block_size"],
        "draft_vocab_size": fields.get("draft_vocab_size") or fields["vocab_size"],
        "mask_token_id": fields["mask_token_id"],
        "sample_from_anchor": bool(fields.get("sample_from_anchor")),
        "sliding_window_non_causal": sliding and fields.get("is_causal") is False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": proposals,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": [], "name_or_path": fields.get("target_name_or_path")},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": _other_width(fields),
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }
    if kind == "dflash2":
        out |= {key: fields[key] for key in _CONV_KEYS}
    if kind == "dspark":
        out |= markov_keys(fields)
    return out | bookkeeping_keys(fields)


def _other_width(fields: dict[str, Any]) -> int | None:
    width = fields.get("target_hidden_size")
    return None if width == fields["hidden_size"] else width
