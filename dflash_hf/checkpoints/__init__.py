"""Published on-disk formats <-> `DFlashConfig` fields and tensor names. Pure: dictionaries in, dictionaries out.

A family is chosen by what `config.json` contains, never by a repository's name.
"""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError
from . import zlab

_REFUSED_PROJECTORS = {
    "domino": "Domino (a GRU prefix and an embedding projector on top of DFlash)",
    "dspark": "DSpark (a Markov logit head on top of DFlash)",
}


def read_config(on_disk: dict[str, Any]) -> dict[str, Any]:
    """Translate a published `config.json` into keyword arguments of `DFlashConfig`.

    Args:
        on_disk: the parsed JSON.

    Raises:
        CheckpointError: if the family is not supported, or a key that concerns the drafter is not understood.
    """
    if on_disk.get("model_type") == "dflash" and "dflash_config" not in on_disk:
        return dict(on_disk)  # this package's own in-memory fields, as `DFlashConfig.to_dict()` gives them
    projector = (on_disk.get("dflash_config") or {}).get("projector_type") or on_disk.get("projector_type")
    if projector is not None:
        raise CheckpointError(
            f"This is a {_REFUSED_PROJECTORS.get(projector, f'drafter with projector_type {projector!r}')} checkpoint. "
            "dflash_hf reads plain DFlash drafters; run as one it would propose wrong tokens."
        )
    if zlab.matches(on_disk):
        return zlab.read_config(on_disk)
    if "speculators_model_type" in on_disk:
        raise CheckpointError(
            f"This is a speculators checkpoint (speculators_model_type {on_disk['speculators_model_type']!r}, "
            f"architectures {on_disk.get('architectures')}). dflash_hf reads z-lab's DFlashDraftModel layout."
        )
    raise CheckpointError(
        f"config.json describes {on_disk.get('architectures')} (model_type {on_disk.get('model_type')!r}), which is "
        "not a drafter family that dflash_hf reads. Supported: z-lab's DFlashDraftModel."
    )


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The published `config.json` for these `DFlashConfig` fields: z-lab's layout."""
    return zlab.write_config(fields)
