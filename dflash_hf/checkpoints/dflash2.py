"""z-lab's DFlash 2 layout: v1 plus grouped dynamic convolutions and a candidate selector (`DFlash2DraftModel`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import zlab
from .common import require_expressible, require_keys

FAMILY = "dflash2"
TITLE = "DFlash 2"
KEY_MAPPING = dict(zlab.KEY_MAPPING)
TO_DISK: dict[str, str] = {}
IGNORED: tuple[str, ...] = ()

_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SCALES = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


def matches(on_disk: dict[str, Any]) -> bool:
    """Whether this `config.json` describes a DFlash 2 drafter."""
    return "DFlash2DraftModel" in (on_disk.get("architectures") or [])


def read_config(on_disk: dict[str, Any], tensor_names: Iterable[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `DFlashConfig`.

    Raises:
        CheckpointError: as z-lab's reader, or if a key of convolution or selector is missing.
    """
    fields, nested = zlab.read_base(on_disk, family=FAMILY, title=TITLE, nested_keys=set(_KEYS))
    own = {key: nested.get(key, on_disk.get(key)) for key in _KEYS}
    require_keys(own, _KEYS, title=TITLE, where="dflash_config")
    return fields | own


def write_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a DFlash 2 drafter."""
    require_keys(fields, _KEYS, title=TITLE, where="The configuration")
    require_expressible(fields, _SCALES | set(_KEYS), title=TITLE)
    out = zlab.write_base(fields, architecture="DFlash2DraftModel", nested={key: fields[key] for key in _KEYS})
    out.pop("block_size")  # published DFlash 2 configs have it nested only
    return out
