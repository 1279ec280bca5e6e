"""DeepSpec's layout: `Qwen3DSparkModel`, keys at the top level, embedding and head of its own, slot 0 proposes.

With `markov_rank` 0 it is a DFlash drafter under DSpark's class name; above 0 it is DSpark. `Gemma4DSparkModel`, with
Gemma 4's decoder layers, is `deepspec_gemma4.py`.
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
from .dspark import MARKOV_EXTRAS, markov_fields, markov_keys

FAMILY = "deepspec"
TITLE = "DeepSpec"
KEY_MAPPING: dict[str, str] = {}
TO_DISK: dict[str, str] = {}
IGNORED: tuple[str, ...] = ()

REQUIRED = (
    "vocab_size",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
)
OWN_EXTRAS = {"sample_from_anchor", "own_embedding", "own_head"}


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` is in DeepSpec's layout."""
    return "Qwen3DSparkModel" in (on_disk.get("architectures") or [])


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig`.

    Raises:
        CheckpointError: if a key is missing, or a layer slides (DeepSpec's attention is full everywhere).
    """
    require_backbone(on_disk, title=TITLE)
    require_keys(on_disk, ("head_dim", *REQUIRED), title=TITLE)
    return read_own(on_disk, backbone_fields(on_disk)) | {"family": FAMILY}


def read_own(on_disk: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of the backbone and those of DeepSpec's own keys.

    Raises:
        CheckpointError: if a layer slides.
    """
    if set(fields["layer_types"]) != {"full_attention"}:
        raise CheckpointError(
            f"config.json has layer_types {fields['layer_types']}; DeepSpec's drafters have full attention only."
        )
    fields = fields | {key: on_disk[key] for key in DRAFTER_KEYS if key in on_disk}
    return fields | {
        **markov_fields(on_disk),
        **dict.fromkeys(OWN_EXTRAS, True),
        "architectures": ["DFlashDraftModel"],
        "source_config": dict(on_disk),
    }


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's `config.json`.

    Raises:
        CheckpointError: for a drafter without embedding and head of its own, or whose slot 0 is silent.
    """
    require_expressible(fields, MARKOV_EXTRAS | OWN_EXTRAS, title=TITLE)
    own = own_keys(fields, title=TITLE)
    return backbone_keys(fields) | own | {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}


def own_keys(fields: dict[str, Any], *, title: str) -> dict[str, Any]:
    """DeepSpec's own keys: the inverse of `read_own`.

    Raises:
        CheckpointError: if the drafter is not one of DeepSpec's kind.
    """
    require_target_width(fields, title=title)
    for name in sorted(OWN_EXTRAS):
        if not fields.get(name):
            raise CheckpointError(f"A {title} drafter has {name} true, which this one has not.")
    if set(fields["layer_types"]) != {"full_attention"} or fields.get("is_causal"):
        raise CheckpointError(f"A {title} drafter has bidirectional full attention on every layer, this one has not.")
    own = {key: fields[key] for key in DRAFTER_KEYS if fields.get(key) is not None}
    return own | markov_keys(fields) | bookkeeping_keys(fields)
