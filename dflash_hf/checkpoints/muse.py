"""transformers' `MuseGlimmerAssistantModel`: keys at the top level, an `encoder.` prefix, an inclusive window.

Its bidirectional window counts W keys on each side besides the query (`|q - k| <= W`), one more than `sliding_window`
of DFlashConfig means; `vocab_size` and the number of target layers are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import CheckpointError
from .common import (
    DRAFTER_KEYS,
    backbone_fields,
    backbone_keys,
    bookkeeping_keys,
    require_backbone,
    require_expressible,
    require_keys,
    require_target_width,
)

FAMILY = "muse_assistant"
TITLE = "MuseGlimmerAssistantModel"
MODEL_TYPE = "muse_glimmer_assistant"
KEY_MAPPING = {r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."}
TO_DISK = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
IGNORED: tuple[str, ...] = ()

_REQUIRED = (
    "head_dim",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "layer_types",
)


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` is that of a Muse assistant."""
    architectures = on_disk.get("architectures") or []
    return TITLE in architectures or (not architectures and on_disk.get("model_type") == MODEL_TYPE)


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig`.

    Raises:
        CheckpointError: if a key is missing.
    """
    require_backbone(on_disk, title=TITLE)
    require_keys(on_disk, _REQUIRED, title=TITLE)
    fields = backbone_fields(on_disk)
    if fields.get("sliding_window") is not None:
        fields["sliding_window"] += 1
    fields |= {key: on_disk[key] for key in DRAFTER_KEYS if key in on_disk}
    return fields | {
        "vocab_size": on_disk.get("vocab_size"),
        "is_causal": False,
        "family": FAMILY,
        "architectures": ["DFlashDraftModel"],
        "source_config": dict(on_disk),
    }


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """A Muse assistant's `config.json`.

    Raises:
        CheckpointError: for a drafter with causal attention, or anything else that the layout has no key for.
    """
    require_expressible(fields, set(), title=TITLE)
    require_target_width(fields, title=TITLE)
    sliding = "sliding_attention" in fields["layer_types"]
    if fields.get("is_causal") or (fields.get("is_causal") is None and sliding):
        raise CheckpointError(f"A {TITLE} is bidirectional on every layer; this drafter is causal on some.")
    if fields.get("attention_bias"):
        raise CheckpointError(f"This drafter has attention_bias, which the {TITLE} layout has no key for.")
    out = backbone_keys(fields) | {key: fields[key] for key in DRAFTER_KEYS if fields.get(key) is not None}
    for key in ("max_window_layers", "use_sliding_window", "tie_word_embeddings", "use_cache", "attention_bias"):
        out.pop(key, None)
    if out["sliding_window"] is not None:
        out["sliding_window"] -= 1
    return out | {"architectures": [TITLE], "model_type": MODEL_TYPE} | bookkeeping_keys(fields)
