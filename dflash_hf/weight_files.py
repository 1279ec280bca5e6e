"""The files that a drafter is loaded from: pinned to one commit, found, and checked before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import _add_variant
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    has_file,
)
from transformers.utils.hub import extract_commit_hash, get_checkpoint_shard_files

from .errors import CheckpointError

# Keywords of `from_pretrained` that say where a repository's files are.
HUB_KEYWORDS = (
    "revision",
    "token",
    "cache_dir",
    "subfolder",
    "local_files_only",
    "force_download",
    "proxies",
)


def pin_files(source: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
    """Options of `from_pretrained` with the revision pinned to a commit, and the names of the tensors in the files.

    A branch may move between the download of the config and that of the weights; the commit that the config came from
    cannot.

    Args:
        source: folder or Hub repository.
        options: keywords of `from_pretrained`.

    Returns:
        A copy of the options, and the names (None for pickled weights, which are not read here).

    Raises:
        CheckpointError: if the weights are pickled only (and `use_safetensors=False` does not allow it), or a
            safetensors file is missing, truncated or not one.
        OSError: transformers' own, if there is no such repository, revision or folder, or it may not be read.
    """
    options = dict(options)
    hub = {key: options[key] for key in HUB_KEYWORDS if options.get(key) is not None}
    config_file = cached_file(source, "config.json", **hub, _raise_exceptions_for_missing_entries=False)
    commit = extract_commit_hash(config_file, None)
    if commit is not None:
        options["revision"] = hub["revision"] = commit
    if options.get("use_safetensors") is False:
        return options, None  # the user's word; torch.load reads it with weights_only=True
    names = _safetensors_names(source, variant=options.get("variant"), hub=hub)
    options["use_safetensors"] = True
    options.pop("force_download", None)  # done above
    return options, sorted(names)


def _safetensors_names(source: str, *, variant: str | None, hub: dict[str, Any]) -> set[str]:
    def find(name: str) -> str | None:
        return cached_file(source, _add_variant(name, variant), **hub, _raise_exceptions_for_missing_entries=False)

    weights = find(SAFE_WEIGHTS_NAME)
    if weights is not None:
        return _open(weights)
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise CheckpointError(_no_safetensors(source, variant=variant, hub=hub))
    try:
        shard_of = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of weight files ({error!r}). {_FETCH_AGAIN}") from error
    shards, _ = get_checkpoint_shard_files(source, index, **hub)
    held = {Path(shard).name: _open(shard) for shard in shards}
    for tensor, shard in shard_of.items():
        if tensor not in held[Path(shard).name]:
            raise CheckpointError(f"{index} says that {shard} holds {tensor!r}, but it does not. {_FETCH_AGAIN}")
    return set().union(*held.values())


_FETCH_AGAIN = "Copy or download it again (from_pretrained(..., force_download=True) for a Hub repository)."


def _open(path: str) -> set[str]:
    """Names of the tensors in a file whose header and length are right."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing, truncated or corrupt ({error}). {_FETCH_AGAIN}") from error


def _no_safetensors(source: str, *, variant: str | None, hub: dict[str, Any]) -> str:
    where = {key: hub[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in hub}
    folder = Path(source) / hub.get("subfolder", "") if Path(source).is_dir() else None
    for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        name = _add_variant(name, variant)
        if (folder / name).is_file() if folder else has_file(source, name, **where):
            return (
                f"{source} holds pickled weights only ({name}); reading a pickle may run code, so they are not read "
                "unless you say so: pass use_safetensors=False (torch.load with weights_only=True), and "
                "save_pretrained to keep them as safetensors."
            )
    names = f"{_add_variant(SAFE_WEIGHTS_NAME, variant)} nor {_add_variant(SAFE_WEIGHTS_INDEX_NAME, variant)}"
    cached = folder is None and (hub.get("local_files_only") or is_offline_mode())
    return f"{'The local cache of ' if cached else ''}{source} holds no weights: neither {names}."


def remove_stale_weights(folder: str | Path) -> None:
    """Remove what an earlier save of another shape left: a single file beside new shards would be loaded first.

    A save as a single file removes old shards (transformers does that), so shards that are all there are the new ones.
    """
    single, index = Path(folder) / SAFE_WEIGHTS_NAME, Path(folder) / SAFE_WEIGHTS_INDEX_NAME
    if not (single.exists() and index.exists()):
        return
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    (single if all((Path(folder) / shard).exists() for shard in shards) else index).unlink()
