"""A drafter's index of frequent tokens: the part of the vocabulary that its proposals come from.

The output head is the widest product of a draft. Over the few thousand most frequent tokens it costs a fraction, and
output stays exact: any proposal may be verified. The index is a small JSON file beside the weights, which engines that
do not know it never open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from .errors import CheckpointError, DFlashConfigError

FILE_NAME = "frequent_tokens.json"
_KEY = "token_ids"


def checked_index(token_ids: torch.Tensor | Iterable[int], *, vocab_size: int | None) -> torch.LongTensor:
    """An index as an int64 tensor `[v]` on the CPU, in the order given (most frequent first).

    Args:
        token_ids: of the target's vocabulary.
        vocab_size: its size, where it is known.

    Raises:
        DFlashConfigError: if it is empty, holds an id twice, or one outside the vocabulary.
    """
    index = torch.as_tensor(token_ids, device="cpu")
    if index.dim() != 1 or not len(index) or index.is_floating_point() or index.is_complex():
        raise DFlashConfigError(
            f"An index of frequent tokens is a list of at least one token id, not a {index.dtype} tensor of shape "
            f"{tuple(index.shape)}. dflash_hf.frequent_tokens makes one."
        )
    index = index.long()
    outside = index[(index < 0) | (index >= (index.max() + 1 if vocab_size is None else vocab_size))]
    if len(outside):
        raise DFlashConfigError(
            f"Token id {int(outside[0])} in the index of frequent tokens is outside the vocabulary of {vocab_size}. "
            "Count the tokens with the target's own tokenizer."
        )
    if len(index.unique()) < len(index):
        values, counts = index.unique(return_counts=True)
        raise DFlashConfigError(f"Token id {int(values[counts > 1][0])} is in the index of frequent tokens twice.")
    return index


def write_index(index: torch.LongTensor | None, folder: str | os.PathLike) -> None:
    """Write `frequent_tokens.json` into a drafter's folder, or remove an earlier drafter's if there is no index.

    Args:
        index: `[v]` token ids, or None.
        folder: that holds the weights.
    """
    path = Path(folder) / FILE_NAME
    if index is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps({_KEY: index.tolist()}) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_index(source: str | os.PathLike, *, vocab_size: int | None, **hub: Any) -> torch.LongTensor | None:
    """The index beside a drafter's weights; None if it has none.

    Args:
        source: folder or Hub repository.
        vocab_size: of the drafter's config.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Raises:
        CheckpointError: if the file is not an index for this vocabulary.
    """
    optional = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    path = cached_file(source, FILE_NAME, **hub, **optional)
    if path is None:
        return None
    remedy = f"Remove or replace the file, or download it again. {source} can be loaded without it."
    try:
        ids = json.loads(Path(path).read_text(encoding="utf-8"))[_KEY]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise TypeError(f"`{_KEY}` is not a list of integers")
        return checked_index(ids, vocab_size=vocab_size)
    except (ValueError, KeyError, TypeError, DFlashConfigError) as error:
        raise CheckpointError(f"{path} is not an index of frequent tokens ({error}). {remedy}") from error
