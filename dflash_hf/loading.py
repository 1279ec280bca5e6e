"""Whether a model got all of a checkpoint, and nothing but it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils import cached_file

from .checkpoints import name_from_disk
from .errors import CheckpointError

_REMEDY = "The files are not a complete drafter of a layout that dflash_hf reads."
_OPTIONAL = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}


def own_generation_config(source: str | os.PathLike, **hub: Any) -> GenerationConfig:
    """The drafter's `generation_config.json`; published drafters have none, which is an empty one.

    Args:
        source: folder or Hub repository.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.
    """
    if cached_file(source, "generation_config.json", **hub, **_OPTIONAL) is None:
        return GenerationConfig()
    return GenerationConfig.from_pretrained(source, **hub)


def require_complete(source: Any, info: dict[str, Any], *, ignored: Iterable[str] = ()) -> None:
    """Check what transformers reports about a load.

    Args:
        source: for the message.
        info: `output_loading_info` of `from_pretrained`.
        ignored: regular expressions of tensors that a family stores and a drafter does not need.

    Raises:
        CheckpointError: naming the first tensor that is missing, unknown or of the wrong shape.
    """
    unknown = [name for name in info["unexpected_keys"] if not any(re.search(pattern, name) for pattern in ignored)]
    problems = []
    for word, names in (("is missing", sorted(info["missing_keys"])), ("is unknown", sorted(unknown))):
        if names:
            problems.append(f"Tensor {names[0]!r} {word} in {source} ({len(names)} such tensors in all).")
    if problems:
        raise CheckpointError(" ".join([*problems, _REMEDY]))
    if info["mismatched_keys"]:
        name, found, expected = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"Tensor {name!r} in {source} has shape {tuple(found)}; config.json asks for {tuple(expected)}. {_REMEDY}"
        )


def require_consistent(source: Any, *, d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> None:
    """Check that the two maps of a trimmed vocabulary name the same tokens.

    Args:
        source: for the message.
        d2t: int64 `[D]`, offsets: draft token i is target token i + d2t[i].
        t2d: bool `[V]`, target tokens that have a draft token.

    Raises:
        CheckpointError: if they differ.
    """
    if d2t is None:
        return
    token_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    if not torch.equal(token_ids.sort().values, t2d.nonzero().flatten()):
        raise CheckpointError(f"Tensors 'd2t' and 't2d' in {source} name different tokens. {_REMEDY}")


def read_published_names(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_) -> None:
    """Rename published tensors in a state dict that is about to be loaded; a hook for `load_state_dict`."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = prefix + name_from_disk(key.removeprefix(prefix), model.config.family)
        if name != key:
            state_dict[name] = state_dict.pop(key)
