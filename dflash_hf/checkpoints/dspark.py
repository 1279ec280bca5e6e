"""SpecForge's DSpark layout: z-lab's plus a Markov head and a confidence head; slots 1 to B-1 propose.

DeepSpec's and speculators' DSpark drafters have other layouts: `deepspec.py`, `speculators.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import zlab
from .common import require_expressible, require_keys

FAMILY = "dspark"
TITLE = "SpecForge DSpark"
KEY_MAPPING = dict(zlab.KEY_MAPPING) | {r"^logit_head\.": ""}
TO_DISK: dict[str, str] = {}
IGNORED: tuple[str, ...] = ()

MARKOV_EXTRAS = {"markov_rank", "markov_head_type", "confidence_head", "confidence_head_with_markov"}
_KEYS = {
    "projector_type",
    "attention_mode",  # says again whether heads are grouped
    "confidence_head_alpha",  # a loss weight; above 0 it means that there is a head
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
}
_SCALES = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` describes a DSpark drafter in SpecForge's layout."""
    projector = (on_disk.get("dflash_config") or {}).get("projector_type", on_disk.get("projector_type"))
    return projector == "dspark" or "DSparkDraftModel" in (on_disk.get("architectures") or [])


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig`.

    Raises:
        CheckpointError: as z-lab's reader.
    """
    fields, nested = zlab.read_base(on_disk, family=FAMILY, title=TITLE, nested_keys=_KEYS)
    own = {key: nested.get(key, on_disk.get(key)) for key in _KEYS}
    require_keys(own, ("markov_rank",), title=TITLE, where="dflash_config")
    if own["enable_confidence_head"] is None:
        own["enable_confidence_head"] = (own["confidence_head_alpha"] or 0) > 0
    return fields | markov_fields(own)


def markov_fields(own: dict[str, Any]) -> dict[str, Any]:
    """The fields of Markov and confidence head, from the key names that all three DSpark layouts use."""
    rank = own.get("markov_rank") or None
    confidence = bool(own.get("enable_confidence_head"))
    return {
        "markov_rank": rank,
        "markov_head_type": (own.get("markov_head_type") or "vanilla") if rank else None,
        "confidence_head": confidence,
        "confidence_head_with_markov": confidence and bool(own.get("confidence_head_with_markov")),
    }


def markov_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `markov_fields`."""
    return {
        "markov_rank": fields.get("markov_rank") or 0,
        "markov_head_type": fields.get("markov_head_type") or "vanilla",
        "enable_confidence_head": fields.get("confidence_head", False),
        "confidence_head_with_markov": fields.get("confidence_head_with_markov", False),
    }


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a DSpark drafter in SpecForge's layout."""
    require_expressible(fields, _SCALES | MARKOV_EXTRAS, title=TITLE)
    grouped = fields["num_key_value_heads"] < fields["num_attention_heads"]
    nested = {"projector_type": "dspark", "attention_mode": "gqa" if grouped else "mha"} | markov_keys(fields)
    return zlab.write_base(fields, architecture="DSparkDraftModel", nested=nested)
