"""Reading a checkpoint's files strictly: which tensors they hold, and whether a model got all of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .checkpoints import name_from_disk
from .errors import CheckpointError

_REMEDY = "The files are not a complete drafter of a layout that dflash_hf reads."
_OPTIONAL = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}


def tensor_names(source: str | os.PathLike, *, variant: str | None = None, **hub: Any) -> list[str] | None:
    """Names of all tensors in a checkpoint's safetensors files; None if it has none.

    Args:
        source: folder, or Hub repository (its files are downloaded into the cache).
        variant: of the weights, as in `from_pretrained`.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Raises:
        CheckpointError: for a file that is corrupt or cut off, naming it.
    """
    index = cached_file(source, _variant(SAFE_WEIGHTS_INDEX_NAME, variant), **hub, **_OPTIONAL)
    if index is not None:
        with open(index, encoding="utf-8") as file:
            shards = sorted(set(json.load(file)["weight_map"].values()))
    else:
        shards = [_variant(SAFE_WEIGHTS_NAME, variant)]
    names = []
    for shard in shards:
        path = cached_file(source, shard, **hub, **_OPTIONAL)
        if path is None:
            return None  # transformers' own loading says what is missing
        try:
            with safe_open(path, framework="pt") as file:
                names.extend(file.keys())
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}); it is corrupt or cut off. Download it again, for a "
                "cached file with force_download=True."
            ) from error
    return names


def _variant(name: str, variant: str | None) -> str:
    if variant is None:
        return name
    stem, _, ending = name.partition(".safetensors")
    return f"{stem}.{variant}.safetensors{ending}" if not ending else f"{stem}.safetensors.index.{variant}.json"


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
