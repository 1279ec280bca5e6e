"""The feature store: a frozen target's tapped hidden states, computed once.

A folder of safetensors shards and a `manifest.json` that says what they belong to. Shards are written under a temporary
name and renamed; a run that was stopped goes on at the first missing shard. Reading is memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ..errors import FeatureStoreError
from ..target import FeatureCapture

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


def compute_states(
    target: nn.Module,
    capture: FeatureCapture,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tapped and final states of whole right-padded sequences, without the output head.

    Args:
        target: the frozen target.
        capture: entered, on the same target.
        input_ids: `[b, S]`.
        attention_mask: `[b, S]`, 1 on real tokens.
        position_ids: `[b, S]`, for rows of several documents.

    Returns:
        Features `[b, S, K * H_t]` and final hidden states `[b, S, H_t]` (what the output head reads), in the target's
        dtype, on the device of `input_ids`.
    """
    positions = {} if position_ids is None else {"position_ids": position_ids}  # not every target takes them
    with torch.no_grad(), capture.recording():
        output = target.get_decoder()(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions)
    return capture.take(input_ids.device), output.last_hidden_state.to(input_ids.device)


def compute_features(
    target: nn.Module, capture: FeatureCapture, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Features `[b, S, K * H_t]` of `compute_states`."""
    return compute_states(target, capture, input_ids, attention_mask=attention_mask)[0]


def fingerprint_model(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and the first and last 1,024 elements of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        for part in (flat[:1024], flat[-1024:]):
            digest.update(part.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def fingerprint_dataset(dataset: Dataset) -> str:
    """SHA-256 over the token ids of every example, in order."""
    digest = hashlib.sha256()
    for ids in dataset["input_ids"]:
        digest.update(torch.tensor(ids, dtype=torch.int64).numpy().tobytes())
        digest.update(b"|")
    return digest.hexdigest()


class FeatureStore:
    """Reads a store; `store[i]` is example i's features `[n_i, K * H_t]` in the stored dtype.

    Args:
        path: the folder.

    Raises:
        FeatureStoreError: if the folder is no complete store.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        if self.manifest is None:
            raise FeatureStoreError(f"{path} has no {MANIFEST}: it is not a feature store.")
        self._shard_of: list[int] = []
        for number, count in enumerate(self.manifest["shard_examples"]):
            if not _shard_path(self.path, number).exists():
                raise FeatureStoreError(
                    f"{path} lacks shard {number} of {len(self.manifest['shard_examples'])}. Run the same command "
                    "again to go on where it stopped."
                )
            self._shard_of += [number] * count
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._shard_of)

    def __getitem__(self, index: int) -> torch.Tensor:
        number = self._shard_of[index]
        if number not in self._open:
            self._open[number] = safe_open(_shard_path(self.path, number), framework="pt")
        return self._open[number].get_tensor(str(index))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # file handles do not travel to data loader workers


def build_feature_store(
    path: str | os.PathLike,
    *,
    target: nn.Module,
    dataset: Dataset,
    layer_ids: list[int],
    dtype: torch.dtype = torch.bfloat16,
    examples_per_shard: int = 64,
    tokens_per_batch: int = 4096,
    on_progress: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Compute the features of every example, or what is missing of them, and open the store.

    Args:
        path: folder to write.
        target: the frozen target.
        dataset: prepared examples (`input_ids`).
        layer_ids: the drafter's taps.
        dtype: stored dtype.
        examples_per_shard: examples in one file.
        tokens_per_batch: padded tokens in one forward pass.
        on_progress: called with (examples done, examples in all).

    Raises:
        FeatureStoreError: if the folder holds features of another target, dataset, tap list or dtype.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    count = len(dataset)
    sizes = [min(examples_per_shard, count - start) for start in range(0, count, examples_per_shard)]
    manifest = {
        "format_version": FORMAT_VERSION,
        "target": getattr(target.config, "_name_or_path", ""),
        "target_fingerprint": fingerprint_model(target),
        "dataset_fingerprint": fingerprint_dataset(dataset),
        "target_layer_ids": list(layer_ids),
        "hidden_size": target.config.get_text_config(decoder=True).hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "shard_examples": sizes,
    }
    found = _read_manifest(path)
    if found is None:
        strays = sorted(path.glob("features-*.safetensors"))
        if strays:
            raise FeatureStoreError(
                f"{path} holds {strays[0].name} but no {MANIFEST}, so nothing says which target and examples its "
                "features belong to. Name another folder, or delete this one."
            )
        _write_json(path / MANIFEST, manifest)
    else:
        for key, value in manifest.items():
            if key != "target" and found.get(key) != value:
                raise FeatureStoreError(
                    f"{path} holds features with {key} {_short(found.get(key))}, but this run needs {_short(value)}. "
                    "Name another folder, or delete this one."
                )
    device = target.get_input_embeddings().weight.device
    done = 0
    with FeatureCapture(target, layer_ids) as capture:
        for number, size in enumerate(sizes):
            file = _shard_path(path, number)
            if not file.exists():
                indices = range(done, done + size)
                tensors: dict[str, torch.Tensor] = {}
                for batch in _batches_by_length(dataset, indices, tokens_per_batch):
                    ids = [torch.tensor(dataset[i]["input_ids"]) for i in batch]
                    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
                    lengths = torch.tensor([len(row) for row in ids])
                    mask = (torch.arange(padded.shape[1])[None] < lengths[:, None]).long().to(device)
                    states = compute_features(target, capture, padded, mask).to("cpu", dtype)
                    for row, index in enumerate(batch):
                        tensors[str(index)] = states[row, : lengths[row]].contiguous()
                temporary = file.with_suffix(".tmp")
                save_file(tensors, temporary)
                os.replace(temporary, file)
            done += size
            if on_progress is not None:
                on_progress(done, count)
    return FeatureStore(path)


def _batches_by_length(dataset: Dataset, indices: range, tokens_per_batch: int) -> Iterator[list[int]]:
    by_length = sorted(indices, key=lambda i: len(dataset[i]["input_ids"]))
    batch: list[int] = []
    for index in by_length:
        if batch and len(dataset[index]["input_ids"]) * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _shard_path(path: Path, number: int) -> Path:
    return path / f"features-{number:05d}.safetensors"


def _read_manifest(path: Path) -> dict[str, Any] | None:
    file = path / MANIFEST
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _write_json(file: Path, content: dict[str, Any]) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2), encoding="utf-8")
    os.replace(temporary, file)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
