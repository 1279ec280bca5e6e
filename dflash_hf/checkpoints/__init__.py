"""Published on-disk formats <-> `DFlashConfig` fields and tensor names. Pure: dictionaries in, dictionaries out.

A family is chosen by what the files contain, never by a repository's name. Each has a module with

* `FAMILY`, its identifier (`DFlashConfig.family`), and `TITLE`, its name in messages;
* `matches(on_disk)`, whether a parsed `config.json` is in its layout;
* `read_config(on_disk, tensor_names)`, keyword arguments of `DFlashConfig`, and `write_config(fields)`, the inverse,
  which refuses what the layout cannot say;
* `KEY_MAPPING` and `TO_DISK`, regular expressions that rename tensors when read and when written (values never change),
  and `IGNORED`, tensors that the drafter does not need.

To add a family: write such a module, put it into `_FAMILIES`, in front of any layout that would match it too, add a
recorded case under `tests/fixtures/golden`, and name new mathematics in `DFlashConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ..errors import CheckpointError
from . import deepspec, deepspec_gemma4, dflash2, domino, dspark, muse, speculators, zlab
from .refused import refusal

# Keys that end in `_type` and are understood, or describe the target.
_KNOWN_TYPES = {
    "model_type",
    "projector_type",
    "markov_head_type",
    "speculators_model_type",
    "target_model_type",
    "target_text_model_type",
}
_FAMILIES = (speculators, domino, dspark, dflash2, deepspec, deepspec_gemma4, muse, zlab)
FAMILIES: dict[str, ModuleType] = {module.FAMILY: module for module in _FAMILIES}


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Translate a published `config.json` into keyword arguments of `DFlashConfig`.

    Args:
        on_disk: the parsed JSON.
        tensor_names: names in the checkpoint, where they are known: one layout stores an embedding and a head without
            a key that says so.

    Raises:
        CheckpointError: if the family is not supported, or a key that concerns the drafter is missing or not
            understood.
    """
    if on_disk.get("model_type") == "dflash" and "dflash_config" not in on_disk:
        return dict(on_disk)  # this package's own in-memory fields, as `DFlashConfig.to_dict()` gives them
    reason = refusal(on_disk)
    if reason is not None:
        raise CheckpointError(reason)
    for key in sorted(on_disk):
        if key.endswith("_type") and key not in _KNOWN_TYPES and on_disk[key] is not None:
            raise CheckpointError(
                f"config.json sets `{key}` = {on_disk[key]!r}, which dflash_hf does not know. It may name another "
                "drafter family, so it is not ignored."
            )
    for module in _FAMILIES:
        if module.matches(on_disk):
            return module.read_config(on_disk, tensor_names)
    raise CheckpointError(
        f"config.json describes {on_disk.get('architectures')} (model_type {on_disk.get('model_type')!r}), which is "
        f"not a drafter family that dflash_hf reads. Supported: {', '.join(module.TITLE for module in _FAMILIES)}."
    )


def write_config(fields: dict[str, Any], family: str | None = None) -> dict[str, Any]:
    """The published `config.json` for these `DFlashConfig` fields.

    Args:
        family: one of `FAMILIES`; by default the family that the drafter came from (z-lab's for new ones).

    Raises:
        CheckpointError: if that family's layout cannot say what the drafter computes.
    """
    return FAMILIES[family or fields["family"]].write_config(fields)


def name_from_disk(name: str, family: str) -> str:
    """The name in `DFlashDraftModel` of a published tensor."""
    return _renamed(name, FAMILIES[family].KEY_MAPPING)


def name_on_disk(name: str, family: str) -> str:
    """The published name of a tensor of `DFlashDraftModel`."""
    return _renamed(name, FAMILIES[family].TO_DISK)


def _renamed(name: str, patterns: dict[str, str]) -> str:
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name
