"""The feature store on disk: safetensors shards and a `manifest.json` that says what they belong to.

Shards and manifest are written under a temporary name and renamed, the shard first: what the manifest lists is
complete. Sizes are checked when a store is opened, SHA-256 sums when a shard is first read. Reading is memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import FeatureStoreError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """What a store holds and what it was made from.

    Attributes:
        target, target_revision: where the target came from, for people to read.
        target_fingerprint, tokenizer_fingerprint, dataset_fingerprint: of `fingerprints`; the tokenizer's is None where
            the examples came as token ids.
        target_layer_ids: taps.
        hidden_size: H_t.
        final_hidden_states: whether the target's final hidden states are kept too.
        dtype: of all tensors.
        examples: number of examples.
        shard_bytes: size at which a shard ends.
        shards: of each finished shard, in order, its number of `examples`, its `bytes` and its `sha256`.
        format_version: of this layout.
    """

    target: str
    target_revision: str | None
    target_fingerprint: str
    tokenizer_fingerprint: str | None
    dataset_fingerprint: str
    target_layer_ids: list[int]
    hidden_size: int
    final_hidden_states: bool
    dtype: str
    examples: int
    shard_bytes: int
    shards: list[dict[str, Any]] = field(default_factory=list)
    format_version: int = FORMAT_VERSION

    def write(self, path: Path) -> None:
        """Write it into the folder `path`."""
        temporary = path / f"{MANIFEST}.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path / MANIFEST)

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The manifest of the folder `path`, or None.

        Raises:
            FeatureStoreError: if it is of another format.
        """
        file = path / MANIFEST
        if not file.exists():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise FeatureStoreError(
                f"{path} is a feature store of format {version}, but this version of dflash_hf reads format "
                f"{FORMAT_VERSION}. Name another folder, or delete this one and compute the features again."
            )
        return cls(**content)


class FeatureStore:
    """Reads a complete store; `store[i]` is example i's features `[n_i, K * H_t]` in the stored dtype.

    Args:
        path: the folder.

    Raises:
        FeatureStoreError: if the folder is no complete store, or when a shard is read that was changed.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        manifest = Manifest.read(self.path)
        if manifest is None:
            raise FeatureStoreError(f"{path} has no {MANIFEST}: it is not a feature store.")
        self.manifest = manifest
        self._shard_of: list[int] = []
        for number, shard in enumerate(manifest.shards):
            file = shard_path(self.path, number)
            size = file.stat().st_size if file.exists() else None
            if size != shard["bytes"]:
                found = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
                raise FeatureStoreError(f"{file} {found}. {_MEND}")
            self._shard_of += [number] * shard["examples"]
        if len(self._shard_of) != manifest.examples:
            raise FeatureStoreError(
                f"{path} is not finished: it holds {len(self._shard_of)} of {manifest.examples} examples. Run the same "
                "command again to go on where it stopped."
            )
        self._open: dict[int, Any] = {}
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return self.manifest.examples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tensor("features", index)

    @property
    def final_hidden_states(self) -> FinalHiddenStates | None:
        """The target's final hidden states by example, or None where the store keeps none."""
        return FinalHiddenStates(self) if self.manifest.final_hidden_states else None

    def _tensor(self, name: str, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = self._shard_of[index]
        if number not in self._open:
            file = shard_path(self.path, number)
            if number not in self._verified:
                if sha256_of(file) != self.manifest.shards[number]["sha256"]:
                    raise FeatureStoreError(f"{file} was changed: its SHA-256 is not that of {MANIFEST}. {_MEND}")
                self._verified.add(number)
            self._open[number] = safe_open(file, framework="pt")
        return self._open[number].get_tensor(f"{name}.{index}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # file handles do not travel to data loader workers


class FinalHiddenStates:
    """`states[i]` is example i's `[n_i, H_t]` after the target's final norm: what its output head reads."""

    def __init__(self, store: FeatureStore):
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._store._tensor("final_hidden_states", index)


_MEND = "Delete that file and compute the features again with the same command; only what is missing is computed."


def write_shard(path: Path, number: int, *, examples: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write shard `number` and return its entry of the manifest."""
    file = shard_path(path, number)
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary)
    entry = {"examples": examples, "bytes": temporary.stat().st_size, "sha256": sha256_of(temporary)}
    os.replace(temporary, file)
    return entry


def has_shard(path: Path, manifest: Manifest, number: int) -> bool:
    """Whether shard `number` is listed and there with its full size."""
    file = shard_path(path, number)
    return number < len(manifest.shards) and file.exists() and file.stat().st_size == manifest.shards[number]["bytes"]


def shard_path(path: Path, number: int) -> Path:
    """File of shard `number`."""
    return path / f"features-{number:05d}.safetensors"


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, read in parts."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
