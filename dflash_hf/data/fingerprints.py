"""Fingerprints: what a feature store was made from, in 64 characters each."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from datasets import Dataset
from torch import nn

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint_model(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes, ends and bit sums of all parameters; a change of any one weight changes it.

    The sum runs over the bits read as integers, so it is exact, the same on every device, and costs one pass.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().contiguous().reshape(-1)
        for part in (flat[:1024], flat[-1024:]):
            digest.update(part.to("cpu", torch.float32).numpy().tobytes())
        digest.update(str(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64).item()).encode())
    return digest.hexdigest()


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """SHA-256 over what turns text into ids: the fast tokenizer's whole pipeline, or a slow one's vocabulary."""
    if getattr(tokenizer, "is_fast", False):
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        for transient in ("padding", "truncation"):  # the latest call's
            parts.pop(transient, None)
    else:
        parts = [type(tokenizer).__name__, tokenizer.get_vocab()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fingerprint_dataset(dataset: Dataset) -> str:
    """SHA-256 over the token ids of every example, in order."""
    digest = hashlib.sha256()
    for ids in dataset["input_ids"]:
        digest.update(torch.tensor(ids, dtype=torch.int64).numpy().tobytes())
        digest.update(b"|")
    return digest.hexdigest()
