"""A frozen target's tapped hidden states: computed for a batch, or once for a whole dataset."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from ..errors import FeatureStoreError
from ..target import FeatureCapture
from .feature_store import MANIFEST, FeatureStore, Manifest, has_shard, write_shard
from .fingerprints import fingerprint_dataset, fingerprint_model, fingerprint_tokenizer

# A shard is computed in memory and lost if the run is killed, so it is kept small.
SHARD_BYTES = 2**28


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


def bytes_per_token(target: nn.Module, *, layer_ids: list[int], dtype: torch.dtype, final_hidden_states: bool) -> int:
    """Size of one token in a store."""
    width = target.config.get_text_config(decoder=True).hidden_size
    return (len(layer_ids) + final_hidden_states) * width * dtype.itemsize


def build_feature_store(
    path: str | os.PathLike,
    *,
    target: nn.Module,
    dataset: Dataset,
    layer_ids: list[int],
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    final_hidden_states: bool = False,
    shard_bytes: int | None = None,
    tokens_per_batch: int = 4096,
    on_start: Callable[[int, int], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> FeatureStore:
    """Compute the features of every example, or what is missing of them, and open the store.

    A store that is there is taken with the dtype, the shard size and the final hidden states that it has, where the
    arguments do not ask for others.

    Args:
        path: folder to write.
        target: the frozen target.
        dataset: prepared examples (`input_ids`).
        layer_ids: the drafter's taps.
        tokenizer: the target's, so that a store made with another one is refused by that name; not needed for examples
            that came as token ids.
        dtype: stored dtype; bf16 for a new store.
        final_hidden_states: also keep what the target's output head reads, for the target's own labels.
        shard_bytes: a shard ends before it exceeds this; 256 MiB for a new store.
        tokens_per_batch: padded tokens in one forward pass.
        on_start: called once with (bytes to write, bytes free), also when nothing is to be written.
        on_progress: called with (examples done, examples in all), at the start and after each forward pass.

    Raises:
        FeatureStoreError: if the folder holds features of another target, tokenizer, dataset, tap list or dtype, or the
            disk has no room for what is missing.
    """
    path = Path(path)
    found = Manifest.read(path)
    if dtype is None:
        dtype = torch.bfloat16 if found is None else getattr(torch, found.dtype)
    if found is not None:
        final_hidden_states = final_hidden_states or found.final_hidden_states
        shard_bytes = shard_bytes or found.shard_bytes
    manifest = Manifest(
        target=getattr(target.config, "_name_or_path", ""),
        target_revision=getattr(target.config, "_commit_hash", None),
        target_fingerprint=fingerprint_model(target),
        tokenizer_fingerprint=None if tokenizer is None else fingerprint_tokenizer(tokenizer),
        dataset_fingerprint=fingerprint_dataset(dataset),
        target_layer_ids=list(layer_ids),
        hidden_size=target.config.get_text_config(decoder=True).hidden_size,
        final_hidden_states=final_hidden_states,
        dtype=str(dtype).removeprefix("torch."),
        examples=len(dataset),
        shard_bytes=shard_bytes or SHARD_BYTES,
    )
    if found is not None:
        _refuse_other(path, found=found, wanted=manifest)
        manifest = found
    elif strays := sorted(path.glob("features-*.safetensors")):
        raise FeatureStoreError(
            f"{path} holds {strays[0].name} but no {MANIFEST}, so nothing says which target and examples its "
            "features belong to. Name another folder, or delete this one."
        )
    token_bytes = bytes_per_token(target, layer_ids=layer_ids, dtype=dtype, final_hidden_states=final_hidden_states)
    sizes = [len(ids) * token_bytes for ids in dataset["input_ids"]]
    shards = _cut(sizes, manifest.shard_bytes)
    missing = [number for number in range(len(shards)) if not has_shard(path, manifest, number)]
    path.mkdir(parents=True, exist_ok=True)
    needed, free = sum(sum(sizes[i] for i in shards[number]) for number in missing), shutil.disk_usage(path).free
    if on_start is not None:
        on_start(needed, free)
    if needed > free:
        raise FeatureStoreError(
            f"The features need {needed / 1e9:.2f} GB more, but {path} has {free / 1e9:.2f} GB free. Name a folder on "
            "a larger disk, use fewer taps or examples, or train with features='online'."
        )
    manifest.write(path)
    done = len(dataset) - sum(len(shards[number]) for number in missing)

    def count(examples: int) -> None:
        nonlocal done
        done += examples
        if on_progress is not None:
            on_progress(done, len(dataset))

    count(0)
    with FeatureCapture(target, layer_ids) as capture:
        for number in missing:
            tensors = _states_of(
                shards[number], target, capture, dataset, dtype, final_hidden_states, tokens_per_batch, count
            )
            entry = write_shard(path, number, examples=len(shards[number]), tensors=tensors)
            manifest.shards[number : number + 1] = [entry]
            manifest.write(path)
    return FeatureStore(path)


def _refuse_other(path: Path, *, found: Manifest, wanted: Manifest) -> None:
    for key, value in asdict(wanted).items():
        held = getattr(found, key)
        if key in ("target", "target_revision", "shards") or (key == "tokenizer_fingerprint" and None in (held, value)):
            continue  # what it is called, not what it is; and examples that came as ids have no tokenizer
        if held != value:
            raise FeatureStoreError(
                f"{path} holds features with {key} {_short(held)}, but this run needs {_short(value)}. Name another "
                "folder, or delete this one."
            )


def _states_of(
    indices: range,
    target: nn.Module,
    capture: FeatureCapture,
    dataset: Dataset,
    dtype: torch.dtype,
    final_hidden_states: bool,
    tokens_per_batch: int,
    count: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """Named tensors of one shard."""
    device = target.get_input_embeddings().weight.device
    tensors: dict[str, torch.Tensor] = {}
    for batch in _batches_by_length(dataset, indices, tokens_per_batch):
        ids = [torch.tensor(dataset[i]["input_ids"]) for i in batch]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(padded.shape[1])[None] < lengths[:, None]).long().to(device)
        features, final = compute_states(target, capture, padded, attention_mask=mask)
        kept = {"features": features}
        if final_hidden_states:
            kept["final_hidden_states"] = final
        for name, states in kept.items():
            states = states.to("cpu", dtype)
            for row, index in enumerate(batch):
                # A copy: a view would keep the whole batch alive.
                tensors[f"{name}.{index}"] = states[row, : lengths[row]].clone()
        count(len(batch))
    return tensors


def _cut(sizes: list[int], limit: int) -> list[range]:
    """Neighbouring examples in shards of at most `limit` bytes, at least one example each."""
    shards, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            shards.append(range(first, index))
            first, total = index, 0
        total += size
    return [*shards, range(first, len(sizes))] if sizes else []


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


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
