"""z-lab's DFlash v1 layout: `architectures: ["DFlashDraftModel"]`, `model_type: "qwen3"`, a `dflash_config` block.

Tensor names are those of `DFlashDraftModel` itself, so only the config needs translating; two historic spellings of the
names are mapped by `KEY_MAPPING`. DFlash 2, Domino and DSpark extend this layout (`read_base`, `write_base`).
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

FAMILY = "zlab"
TITLE = "z-lab DFlash v1"
DEFAULT_BLOCK_SIZE = 16

# Regular expressions on published tensor names -> names in `DFlashDraftModel`.
KEY_MAPPING = {r"^model\.": "", r"^midlayer\.": "layers.0."}
TO_DISK: dict[str, str] = {}
IGNORED: tuple[str, ...] = ()

_NESTED_KEYS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_OWN_KEYS = ("num_target_layers", "target_hidden_size", "target_name_or_path", "enable_thinking")
# Markers of other formats that share the class name: their presence changes the mathematics.
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
    "use_gemma_norm",
)


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` is in z-lab's v1 layout."""
    return "DFlashDraftModel" in (on_disk.get("architectures") or [])


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig` for a z-lab v1 `config.json`; the file itself is kept in `source_config`.

    Raises:
        CheckpointError: for a key of `dflash_config`, or a marker of another family, that is not understood.
    """
    fields, _ = read_base(on_disk, family=FAMILY, title=TITLE, nested_keys=set())
    return fields


def read_base(
    on_disk: dict[str, Any], *, family: str, title: str, nested_keys: set[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What z-lab's layout and its extensions share.

    Args:
        family, title: of the reader that calls.
        nested_keys: keys of `dflash_config` that the extension adds.

    Returns:
        the fields, and the `dflash_config` block.
    """
    require_backbone(on_disk, title=title)
    require_keys(on_disk, ("vocab_size",), title=title)
    nested = dict(on_disk.get("dflash_config") or {})
    if nested.get("use_swa") is False:  # ModelOpt states that it does not slide
        nested.pop("use_swa")
        nested.pop("swa_window_size", None)
    known = _NESTED_KEYS | nested_keys
    unknown = sorted(set(nested) - known)
    if unknown:
        raise CheckpointError(
            f"dflash_config.{unknown[0]} = {nested[unknown[0]]!r} is not a key of the {title} format. It may change "
            "what the drafter computes, so it is not ignored. Known keys: " + ", ".join(sorted(known))
        )
    for key in _FOREIGN_KEYS:
        if key not in nested_keys and on_disk.get(key):
            raise CheckpointError(
                f"config.json sets `{key}` = {on_disk[key]!r}, which belongs to another drafter family than {title} "
                "and changes what the drafter computes."
            )
    fields = backbone_fields(on_disk)
    fields |= {key: on_disk[key] for key in _OWN_KEYS if key in on_disk}
    # Nested wins: retrained repositories kept an old top-level value beside it.
    fields["block_size"] = nested.get("block_size", on_disk.get("block_size", DEFAULT_BLOCK_SIZE))
    fields["mask_token_id"] = nested.get("mask_token_id", on_disk.get("mask_token_id"))
    layer_ids = nested.get("target_layer_ids", on_disk.get("target_layer_ids"))
    if layer_ids is None and on_disk.get("num_target_layers") is not None:
        layer_ids = default_taps(
            num_target_layers=on_disk["num_target_layers"], num_draft_layers=on_disk["num_hidden_layers"]
        )
    fields["target_layer_ids"] = layer_ids
    is_causal = on_disk.get("is_causal")
    fields["is_causal"] = nested.get("causal") if is_causal is None else is_causal
    for key in _SCALES:
        fields[key] = nested.get(key, on_disk.get(key))
    fields["family"] = family
    fields["architectures"] = ["DFlashDraftModel"]
    fields["source_config"] = dict(on_disk)
    return fields, nested


def default_taps(*, num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The taps that a checkpoint without `target_layer_ids` means: as many as it has draft layers."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + j * span / (num_draft_layers - 1)) for j in range(num_draft_layers)]


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """z-lab's `config.json` for `DFlashConfig` fields. `block_size` is written at both places that readers look at."""
    require_expressible(fields, set(_SCALES), title=TITLE)
    return write_base(fields, architecture="DFlashDraftModel", nested={})


def write_base(fields: dict[str, Any], *, architecture: str, nested: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `read_base`; `nested` are the extension's keys of `dflash_config`."""
    require_keys(fields, ("vocab_size",), title=architecture, where="The configuration")
    out = backbone_keys(fields)
    out |= {key: fields[key] for key in _OWN_KEYS if fields.get(key) is not None}
    if out.get("target_hidden_size") == fields["hidden_size"]:
        out.pop("target_hidden_size")
    rope = out["rope_parameters"]
    inner = {
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "target_layer_ids": list(fields["target_layer_ids"]),
    }
    # An embedding scale is stated wherever it is known: readers disagree on what its absence means for targets whose
    # embedding module scales.
    inner |= {key: fields[key] for key in _SCALES if fields.get(key) is not None}
    out |= {
        "architectures": [architecture],
        "model_type": "qwen3",  # what the engines' loaders expect, for every target
        "block_size": fields["block_size"],
        "dflash_config": inner | nested,
        # Older readers know only this pair.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": _legacy_rope_scaling(rope),
    }
    if fields.get("is_causal") is not None:
        out["is_causal"] = fields["is_causal"]
    return out | bookkeeping_keys(fields)


def _legacy_rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type", "default") == "default":
        return None
    return {key: value for key, value in rope.items() if key != "rope_theta"}
