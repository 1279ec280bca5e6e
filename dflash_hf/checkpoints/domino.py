"""Domino: z-lab's layout, the same class name, and a GRU over the block's tokens that corrects the logits.

Known by `dflash_config.projector_type: "domino"`; without that key the GRU's tensors are unknown and stop the load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import zlab
from .common import require_expressible, require_keys

FAMILY = "domino"
TITLE = "Domino"
# Early checkpoints kept the correction in a container of its own.
KEY_MAPPING = dict(zlab.KEY_MAPPING) | {r"^logit_head\.": ""}
TO_DISK: dict[str, str] = {}
IGNORED: tuple[str, ...] = ()

_REQUIRED = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
_KEYS = {*_REQUIRED, "projector_type"}
_SCALES = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` describes a Domino drafter."""
    projector = (on_disk.get("dflash_config") or {}).get("projector_type", on_disk.get("projector_type"))
    return projector == "domino" or "DominoDraftModel" in (on_disk.get("architectures") or [])


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig`.

    Raises:
        CheckpointError: as z-lab's reader, or if a size of the GRU is missing.
    """
    fields, nested = zlab.read_base(on_disk, family=FAMILY, title=TITLE, nested_keys=_KEYS)
    own = {key: nested.get(key, on_disk.get(key)) for key in _KEYS}
    require_keys(own, _REQUIRED, title=TITLE, where="dflash_config")
    return fields | {
        "gru_hidden_dim": own["gru_hidden_dim"],
        "emb_dim": own["emb_dim"],
        "pure_draft_prefix_len": own["pure_draft_prefix_len"],
        "sample_from_anchor": own["shift_label"],
    }


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Domino drafter."""
    sizes = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
    require_keys(fields, sizes, title=TITLE, where="The configuration")
    require_expressible(fields, _SCALES | {*sizes, "sample_from_anchor"}, title=TITLE)
    nested = {key: fields[key] for key in sizes}
    nested |= {"projector_type": "domino", "shift_label": fields["sample_from_anchor"]}
    return zlab.write_base(fields, architecture="DFlashDraftModel", nested=nested)
